"""The formulas of distillation: late interaction, the losses of the cascade, and calibration.

After ERNIE-Search (arXiv 2205.09153), with a judge in the place of its cross-encoder, and a group of samples of one
prompt in the place of a list of passages. The order is judge, late interaction (ColBERT, arXiv 2004.12832), dual
encoder: each teaches the next. Scores are logits: their sigmoid is the verdict that a student expects.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, log_softmax

CERTAIN = 0.02
"""Verdicts are moved this far from 0 and 1 where their logit is taken, which would be infinite there."""
_STEPS = 100
_SEEN, _ROUNDED = 1e-12, 1e-20
"""A smaller fall of the cost is lost in its rounding; one that is smaller still changes no weight."""
_RIDGE = 1e-3


@dataclass(frozen=True)
class Losses:
    """The terms of the loss, each a mean: of groups (the first three, divergences of lists) or of samples.

    ``interaction_list`` and ``dual_list``: from the judge's verdicts to a student. ``between``: from the interaction
    student, which does not move for it, to the dual one. ``interaction`` and ``dual``: cross-entropy with each verdict.
    """

    interaction_list: Tensor
    dual_list: Tensor
    between: Tensor
    interaction: Tensor
    dual: Tensor

    def total(self) -> Tensor:
        return self.interaction_list + self.dual_list + self.between + self.interaction + self.dual


def maxsim(queries: Tensor, query_mask: Tensor, answers: Tensor, answer_mask: Tensor) -> Tensor:
    """ColBERT's late interaction: the mean, over the query's tokens, of the largest product with a token of the answer.

    ``queries`` ``[..., Q, K]`` and ``answers`` ``[..., A, K]`` with masks ``[..., Q]`` and ``[..., A]`` (1: a token);
    leading dimensions broadcast. The mean, not ColBERT's sum, so that a longer prompt has no larger scores. Each side
    must have a token.
    """
    products = queries @ answers.transpose(-1, -2)
    products = products.masked_fill(~answer_mask.bool().unsqueeze(-2), -torch.inf)
    best = products.amax(-1) * query_mask
    return best.sum(-1) / query_mask.sum(-1)


def losses(dual: Tensor, interaction: Tensor, verdicts: Tensor, mask: Tensor, temperature: float = 1.0) -> Losses:
    """The losses of logits ``[G, n]`` of both students for ``verdicts`` ``[G, n]`` in [0, 1].

    ``mask`` ``[G, n]``: 1 for a sample, 0 for padding. ``temperature`` divides all logits of the lists. A group of one
    sample has no list and adds nothing to the divergences.
    """
    there = mask.bool()
    judge = torch.logit(verdicts.clamp(CERTAIN, 1 - CERTAIN))
    lists = [log_softmax((x / temperature).masked_fill(~there, -1e9), dim=1) for x in (judge, interaction, dual)]
    of_judge, of_interaction, of_dual = lists
    counted = mask.sum(1) > 1
    return Losses(
        _divergence(of_judge, of_interaction, there, counted),
        _divergence(of_judge, of_dual, there, counted),
        _divergence(of_interaction.detach(), of_dual, there, counted),
        binary_cross_entropy_with_logits(interaction[there], verdicts[there]),
        binary_cross_entropy_with_logits(dual[there], verdicts[there]),
    )


def _divergence(teacher: Tensor, student: Tensor, there: Tensor, counted: Tensor) -> Tensor:
    """The mean over the groups ``counted`` of KL(teacher, student); 0 where there is none."""
    each = torch.where(there, teacher.exp() * (teacher - student), 0.0).sum(1)
    return (each * counted).sum() / counted.sum().clamp(min=1)


def calibrated(logits: Tensor, slope: float, shift: float) -> Tensor:
    """The verdicts that ``logits`` mean, by Platt's scaling."""
    return torch.sigmoid(slope * logits + shift)


def platt(logits: Tensor, verdicts: Tensor) -> tuple[float, float]:
    """Slope and shift with the smallest cross-entropy between ``verdicts`` (in [0, 1]) and the calibrated ``logits``.

    With a very small pull of the slope towards 1, so that there is a smallest one where the logits divide yes and no
    without a mistake.
    """
    design = torch.stack([logits.double(), torch.ones_like(logits, dtype=torch.float64)], 1)
    prior = torch.tensor([1.0, 0.0], dtype=torch.float64)
    at = logistic(design, verdicts, torch.full_like(prior, _RIDGE), prior)
    return float(at[0]), float(at[1])


def rising(logits: Tensor, verdicts: Tensor) -> tuple[float, float]:
    """``platt`` with a slope that is not below 0. Where it would be, the logits say nothing of the verdicts: the slope
    is 0, and the shift is the logit of the mean verdict."""
    slope, shift = platt(logits, verdicts)
    if slope > 0:
        return slope, shift
    return 0.0, float(torch.logit(verdicts.double().mean().clamp(1e-6, 1 - 1e-6)))


def logistic(design: Tensor, verdicts: Tensor, pull: Tensor, prior: Tensor) -> Tensor:
    """The weights ``[D]`` with the smallest cross-entropy between ``verdicts`` ``[N]`` (in [0, 1]) and the logits
    ``design @ weights``, each pulled to ``prior`` ``[D]`` by ``pull`` ``[D]``: Newton's method in float64."""
    x, y = design.double(), verdicts.double()

    def cost(at: Tensor) -> Tensor:
        fit = binary_cross_entropy_with_logits(x @ at, y)
        return fit + (pull * (at - prior) ** 2).sum() / 2

    at = prior.clone()
    for _ in range(_STEPS):
        p = torch.sigmoid(x @ at)
        gradient = x.T @ (p - y) / len(x) + pull * (at - prior)
        curve = (x * (p * (1 - p)).unsqueeze(1)).T @ x / len(x) + torch.diag(pull)
        step, share = torch.linalg.solve(curve, gradient), 1.0
        fall = float(gradient @ step)  # twice what the step takes off the cost
        if fall > _SEEN:
            now = cost(at)
            while cost(at - share * step) > now and share > 1e-6:
                share /= 2
        at = at - share * step
        if fall < _ROUNDED:
            break
    return at


def sureness(verdicts: Tensor) -> Tensor:
    """How sure a calibrated student is that the judge is on its side of one half: from 0.5 to 1."""
    return torch.maximum(verdicts, 1 - verdicts)


def threshold_of(sure: Tensor, share: float) -> float:
    """The threshold under which ``share`` of the samples lie, whose sureness is ``sure``."""
    ordered = sure.double().sort().values
    count = round(share * len(ordered))
    if count <= 0:
        return 0.0
    if count >= len(ordered):
        return 1.0
    return float((ordered[count - 1] + ordered[count]) / 2)

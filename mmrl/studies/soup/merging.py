"""Merge the backbones of a soup into one model: a sum of their weights, or adapters put side by side."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from mmrl.app.build import build, find_checkpoint, open_run
from mmrl.app.export import check, new_directory, write_model
from mmrl.config.evaluation_checks import label_of
from mmrl.config.schema import Recipe
from mmrl.core.checkpoint_reader import Saved
from mmrl.core.errors import UserError
from mmrl.logging.card import What
from mmrl.logging.rundir import RunDir
from mmrl.models.policy import Policy
from mmrl.step.step_context import StepContext
from mmrl.studies.soup.formulas import merging_weights
from mmrl.studies.soup.record import Soup, read_soup

_A, _B = {"lora_A", "lora_embedding_A"}, {"lora_B", "lora_embedding_B"}
_FACTORS = _A | _B


@dataclass(frozen=True)
class Merged:
    """A model whose weights are a merge of backbones, once ``weigh`` was called; all else is as of their recipe."""

    context: StepContext
    saved: Sequence[Saved]
    base: Mapping[str, Tensor]
    """The trained weights of the base model, where merges go beyond the backbones; else empty."""

    @property
    def steps(self) -> list[int]:
        """Training steps of each backbone."""
        return [one.step for one in self.saved]

    @torch.no_grad()
    def weigh(self, weights: Sequence[float]) -> None:
        """Have the weights ``theta = sum_j weights[j] theta_j`` of the backbones, those that evaluation uses. With
        ``base`` the base model counts what the weights lack to a sum of 1.

        An adapter of rank ``n r`` has the deltas ``sum_j weights[j] B_j A_j`` exactly. Raises ``UserError`` where the
        backbones are not of one model.
        """
        policy = self.context.policy
        if self.context.recipe.model.lora is None:
            _sum(policy, self.saved, weights)
        else:
            _side_by_side(policy, self.saved, weights)
        for k, tensor in self.base.items():
            if not set(k.split(".")) & _FACTORS:  # an adapter begins as no change at all
                policy.trainable[k].add_(tensor, alpha=1 - sum(weights))
        policy.copies.pop("ema", None)  # which the model began with
        policy.updates += 1  # an engine with weights of its own asks whether they changed
        policy.weights.changed()


def merge(
    folder: Path,
    mu: Sequence[float],
    out: Path,
    what: str = "merged",
    checkpoint: str = "latest",
    *,
    extrapolate: bool = True,
    beyond: Sequence[float] = (),
) -> list[float]:
    """Merge the soup in ``folder`` for the preferences ``mu``, one per reward, and write the model to the new directory
    ``out``, as ``mmrl.app.export.export`` does. Returns the weight of each backbone, which may be negative.

    ``what``: as of ``export``. ``checkpoint``: ``latest``, ``best`` or a step of every backbone. With
    ``extrapolate=False`` no backbone's weight is negative. ``beyond``: as of ``merging_weights``, one number for each
    reward. Raises ``UserError``.
    """
    soup = read_soup(folder)
    beyond = shares_beyond(soup, beyond)
    weights = merging_weights(soup.matrix, preferences(soup, mu), extrapolate=extrapolate, beyond=beyond)
    recipe, saved = found(soup, checkpoint)
    check(recipe, out, what)
    merged = opened(soup, recipe, saved, mu, beyond=any(beyond))
    with closing(merged.context):
        merged.weigh(weights)
        with new_directory(out, "the merged model") as aside:
            made = _about(soup, mu, weights, merged.steps)
            write_model(merged.context, RunDir(folder), max(merged.steps), aside, out.name, cast(What, what), made)
    return weights


def preferences(soup: Soup, mu: Sequence[float]) -> Sequence[float]:
    """``mu``, if it is one number from 0 to 1 for each reward and sums to 1. Raises ``UserError``."""
    asked = f"--weights {','.join(f'{m:g}' for m in mu)}"
    named = f"one for each of {', '.join(soup.rewards)}"
    if len(mu) != len(soup.rewards):
        raise UserError(f"{asked}: there are {len(mu)} numbers; give {len(soup.rewards)}, {named}")
    if not all(math.isfinite(m) and m >= 0 for m in mu):
        raise UserError(f"{asked}: give numbers from 0 to 1, {named}")
    if abs(sum(mu) - 1) > 1e-6:
        raise UserError(f"{asked}: the sum is {sum(mu):g}, and has to be 1; divide each number by it")
    return mu


def shares_beyond(soup: Soup, beyond: Sequence[float]) -> list[float]:
    """``beyond`` for each reward: as it is, or its only number. Raises ``UserError``."""
    asked = f"--beyond {','.join(f'{share:g}' for share in beyond)}"
    if len(beyond) not in (0, 1, len(soup.rewards)):
        raise UserError(
            f"{asked}: there are {len(beyond)} numbers; give 1, or {len(soup.rewards)}, one for each of "
            f"{', '.join(soup.rewards)}"
        )
    if not all(0 <= share < 1 for share in beyond):
        raise UserError(f"{asked}: give numbers from 0 to below 1 (the authors try 0.1 to 0.5), or auto")
    return list(beyond) * (len(soup.rewards) if len(beyond) == 1 else 1)


def found(soup: Soup, checkpoint: str) -> tuple[Recipe, list[Saved]]:
    """The recipe of the first backbone and a checkpoint of each. Raises ``UserError``, before a model is loaded, where
    one is missing or has none, and where they are not of one model."""
    if checkpoint == "base":
        raise UserError("--checkpoint base: the backbones begin equal, and a merge of them is the base model itself")
    recipes, saved = list[Recipe](), list[Saved]()
    for path in soup.backbones:
        if not RunDir(path).resolved.exists():
            raise UserError(
                f"{path} is missing: the soup needs a run for each of {', '.join(soup.rewards)}; train it with:\n"
                f"{soup.command}"
            )
        recipe, directory = open_run(path)
        at = find_checkpoint(directory, checkpoint)
        assert at is not None
        recipes.append(recipe)
        saved.append(at)
    if checkpoint == "latest" and len(soup.finished) < len(saved):
        steps = ", ".join(str(one.step) for one in saved)
        print(f"warning: not all backbones are finished; they are at steps {steps}", file=sys.stderr)
    for recipe, path in zip(recipes, soup.backbones, strict=True):
        if (recipe.model, recipe.pipeline) != (recipes[0].model, recipes[0].pipeline):
            raise UserError(
                f"{path} was trained with other settings of model or pipeline than {soup.backbones[0]}, so their "
                "weights cannot be added; train it again with the recipe of the soup"
            )
    return recipes[0], saved


def opened(
    soup: Soup, recipe: Recipe, saved: Sequence[Saved], mu: Sequence[float] | None = None, *, beyond: bool = False
) -> Merged:
    """Load the model that ``saved`` are of, with room for all adapters. ``mu``: what the recipe of it says. ``beyond``:
    keep the base model's weights, which merges that go beyond the backbones need.

    Raises ``UserError``.
    """
    model = recipe.model
    if beyond and model.lora is not None and model.lora.path is not None:
        raise UserError(
            f"--beyond: the backbones went on from the adapter {model.lora.path}, and a step away from it is not "
            "built; leave out --beyond"
        )
    if model.lora is not None:
        n = len(saved)
        wider = {"rank": n * model.lora.rank, "alpha": n * model.lora.alpha, "path": None}
        model = model.model_copy(update={"lora": model.lora.model_copy(update=wider)})
    changed: dict[str, object] = {"model": model}
    if recipe.device != "cpu":
        changed["device"] = "auto"
    if mu is not None:
        weight = {label: u * m for label, u, m in zip(soup.rewards, soup.units, mu, strict=True)}
        changed["rewards"] = [
            reward.model_copy(update={"weight": weight.get(label_of(reward.name, reward.label), reward.weight)})
            for reward in recipe.rewards
        ]
    context = build(recipe.model_copy(update=changed))
    base = {k: p.detach().clone() for k, p in context.policy.trainable.items()} if beyond else {}
    return Merged(context, saved, base)


def _part(saved: Saved) -> str:
    """The part of a checkpoint that evaluation uses."""
    return "copy_ema" if "copy_ema" in saved.shapes else "weights"


def _sum(policy: Policy, saved: Sequence[Saved], weights: Sequence[float]) -> None:
    """Sum up in float32, a backbone in memory at a time."""
    for p in policy.trainable.values():
        p.zero_()
    for one, weight in zip(saved, weights, strict=True):
        room = policy.rooms({"weights": one.shapes[_part(one)]})["weights"]
        one.read({_part(one): {k: policy.checkpoint_view("weights", k, t) for k, t in room.items()}})
        for k, p in policy.trainable.items():
            p.add_(room[k], alpha=weight)


def _side_by_side(policy: Policy, saved: Sequence[Saved], weights: Sequence[float]) -> None:
    """``[w_1 B_1, w_2 B_2] [A_1; A_2] = w_1 B_1 A_1 + w_2 B_2 A_2``. Of a convolution the same axes are the ranks."""
    parts = [one.parts(part)[part] for one in saved for part in [_part(one)]]
    for part in parts:
        if different := sorted(set(part) ^ set(policy.trainable)):
            raise UserError(
                f"the backbones' adapters do not fit the recipe ({', '.join(different[:3])}, ...): its model or "
                "model.lora.path was changed after training; put it back"
            )
    for name, p in policy.trainable.items():
        p.copy_(_joined(name, [part[name] for part in parts], weights))


def _joined(name: str, tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    kinds = set(name.split("."))
    if kinds & _A:
        return torch.cat(list(tensors), 0)
    scaled = [weight * t for weight, t in zip(weights, tensors, strict=True)]
    if kinds & _B:
        return torch.cat(scaled, 1)
    return torch.stack(scaled).sum(0)


def _about(soup: Soup, mu: Sequence[float], weights: Sequence[float], steps: Sequence[int]) -> str:
    """How the model was made, for its card."""
    rows = zip(soup.rewards, mu, soup.matrix.tolist(), weights, steps, strict=True)
    rest = 1 - sum(weights)
    lines = [
        "## Merge",
        "",
        f"Bone Soup (arXiv 2502.10762) with beta {soup.beta:g}: the sum of {len(weights)} backbones, each trained on a "
        "mix of the rewards. The model stands for the weights below; the steps above are of a backbone.",
        "",
        f"| reward | weight | backbone's mix of {', '.join(soup.rewards)} | its steps | its weight in the sum |",
        "|---|---:|---|---:|---:|",
    ]
    for label, m, mix, weight, step in rows:
        lines.append(f"| {label} | {m:g} | {', '.join(f'{b:.3g}' for b in mix)} | {step} | {weight:.4g} |")
    if abs(rest) > 1e-9:
        lines += ["", f"The base model counts {rest:.4g}: the merge goes beyond the backbones, away from it."]
    return "\n".join(lines)

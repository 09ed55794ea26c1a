"""Rewards during sampling: begin more samples of a prompt than are trained on, and finish those that teach most.

All samples of a group are denoised for ``midway.step`` steps, and their clean results are predicted there and scored;
of text the first ``midway.tokens`` tokens are drawn and scored. ``train.group_size`` of them are kept: those with the
largest variance of rewards (the max-variance down-sampling of PODS, arXiv 2504.13818, which selects finished
responses), the best and the worst half, or the best. The others are dropped. With ``midway.branches`` fewer are kept,
and each is continued several times (``mmrl.rollout.branches``). With ``midway.draft_steps`` all samples are drafts,
drawn whole in fewer steps, and those that are kept are drawn again with all steps from the same noise (Sol-RL, arXiv
2604.06916, whose drafts are in four bits besides): a sample's noise depends on its name alone.
Sampling, scoring and selection happen on the controller that owns the group, and depend on nothing but the recipe and
the weights.

The gradient is no longer an unbiased estimate: a kept group has more extreme samples than the policy draws. Metrics
``midway/*`` show how much its mean and its spread changed, and how well the predicted rewards rank the final ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from mmrl.core.clock import Clock
from mmrl.core.trajectory import Rows, SampleId, Slot, text_rows
from mmrl.models.policy import Version
from mmrl.rewards.judging.statistics import spearman
from mmrl.rewards.scoring import Failure, RewardError, Scores
from mmrl.rollout.branches import branch_ids, known_std
from mmrl.step.batch import chunks_of_a_size, gather, samples_of
from mmrl.step.step_context import Chunk, SamplingSpec, StepContext
from mmrl.step.step_metrics import StepMetrics, Sums


@dataclass(frozen=True)
class Pruned:
    """What a round kept. ``chunks``: micro-batches of the kept samples, to be finished; ``rows``: the place of each of
    their samples among the round's. ``values``: the rewards of all predicted results, ``[N, begun]`` float64, NaN
    without one; ``kept``: the columns that were kept, ``[N, K / branches]``. Of text ``tokens`` ``[N, begun]`` are
    the lengths of what was drawn, and ``ended`` ``[N, begun]`` the responses that had ended."""

    chunks: list[Chunk]
    rows: list[list[int]]
    values: Tensor
    kept: Tensor
    failures: list[Failure]
    tokens: Tensor | None = None
    ended: Tensor | None = None


class Beginning:
    """Final class: the samples of a round that are begun, until ``prune``. The constructor submits them."""

    def __init__(
        self, context: StepContext, slots: list[Slot], how: SamplingSpec, clock: Clock, version: Version | None
    ) -> None:
        midway = context.recipe.midway
        assert midway is not None
        self._context, self._slots, self._midway = context, slots, midway
        asked, self._rows = chunked(context, samples_of(slots, context.recipe.begun_per_prompt))
        self._labels = midway.rewards or [label for label, weight in context.rewards.weights.items() if weight]
        self._scoring = context.rewards.start(
            how.step, midway.group_size, scale=False, round=how.round, patient=False, labels=self._labels
        )
        begun = replace(how, until=midway.at) if midway.draft_steps is None else replace(how, draft=midway.draft_steps)
        self._drawn = context.compute.devices.sample(context, asked, begun, clock, version)

    def prune(self) -> Pruned:
        """Wait for the samples and their rewards, and choose which are finished. Raises ``RewardError``."""
        size, midway = self._midway.group_size, self._midway
        micro_batches: dict[int, Rows] = {}
        groups = [list(range(first, first + size)) for first in range(0, len(self._slots) * size, size)]
        try:
            for n, rows, samples in self._drawn:
                micro_batches[n] = rows
                self._scoring.add(samples, self._rows[n])
            scores = self._scoring.finish(groups)
        except RewardError as error:
            of = f"responses cut after {midway.tokens} tokens"
            if midway.draft_steps is not None:
                of = f"drafts of {midway.draft_steps} denoising steps"
            elif midway.tokens is None:
                of = f"results predicted after {midway.step} denoising steps"
            raise RewardError(f"midway, of {of}: {error}") from error
        values = self._values(scores).view(-1, size)
        keep = self._context.recipe.train.group_size // midway.branches
        kept = torch.stack([torch.tensor(chosen(row, keep, midway.keep)) for row in values])
        parts = [micro_batches[n] for n in sorted(micro_batches)]
        chunks, rows = self._chunks(parts, kept)
        if midway.tokens is None:
            return Pruned(chunks, rows, values, kept, scores.failures)
        texts = [text_rows(part) for part in parts]
        tokens = self._in_order([torch.tensor(part.responses) for part in texts]).view(-1, size)
        ended = self._in_order([~part.under_way.cpu() for part in texts if part.under_way is not None]).view(-1, size)
        return Pruned(chunks, rows, values, kept, scores.failures, tokens, ended)

    def _in_order(self, columns: list[Tensor]) -> Tensor:
        """Values of the rows of each micro-batch as one column in the order of the round."""
        out = torch.cat(columns)
        out[[n for of in self._rows for n in of]] = out.clone()
        return out

    def _values(self, scores: Scores) -> Tensor:
        """``[B]`` float64: the weighted sum of the rewards, with what they give to pieces of a response. A single one
        counts even if its weight is 0."""
        weights = {label: self._context.rewards.weights[label] for label in self._labels}
        if len(weights) > 1:
            found = scores.total
        else:
            ((label, weight),) = weights.items()
            weights = {label: -1.0 if weight < 0 else 1.0}
            found = scores.parts[label] * weights[label]
        for label, spans in scores.spans.items():
            if label in self._context.rewards.by_token:  # what a teacher says is no reward
                continue
            pieces = [sum(span.value for span in of or ()) for of in spans]
            found = found + weights[label] * torch.tensor(pieces, dtype=found.dtype)
        return found

    def _chunks(self, parts: list[Rows], kept: Tensor) -> tuple[list[Chunk], list[list[int]]]:
        """The micro-batches of the kept samples, and the places of their rows in the round."""
        size = self._midway.group_size
        place = {row: (m, i) for m, of in enumerate(self._rows) for i, row in enumerate(of)}
        branches = range(self._midway.branches)
        begun = [place[n * size + int(k)] for n, row in enumerate(kept) for k in row for _ in branches]
        ids = [branch_ids([parts[m].ids[i]], n % len(branches), size)[0] for n, (m, i) in enumerate(begun)]
        named = [(parts[m].slots[i], name) for (m, i), name in zip(begun, ids, strict=True)]
        again, rows = chunked(self._context, named)
        if self._midway.draft_steps is not None:
            return again, rows
        whole = [replace(gather(parts, [begun[n] for n in of]), ids=[ids[n] for n in of]) for of in rows]
        return [Chunk(one.slots, one.ids, one) for one in whole], rows


def chunked(context: StepContext, rows: Sequence[tuple[Slot, SampleId]]) -> tuple[list[Chunk], list[list[int]]]:
    """Samples in the micro-batches that they are drawn in, and the places of each micro-batch in ``rows``."""
    recipe, prompts = context.recipe, [slot.prompt for slot, _ in rows]
    places = list(chunks_of_a_size(prompts, recipe.sampling, recipe.sampled_at_once))
    return [Chunk([rows[n][0] for n in chunk], [rows[n][1] for n in chunk]) for chunk in places], places


def chosen(values: Tensor, keep: int, how: Literal["spread", "extremes", "best"]) -> list[int]:
    """The indices, in order, of the ``keep`` samples of a group that are finished; ``values`` ``[begun]`` float64.

    A sample without a value (NaN) is kept only if there are too few others. Of equal values the first samples are kept.
    """
    known = [i for i, value in enumerate(values.tolist()) if value == value]
    if len(known) <= keep:
        missing = [i for i in range(len(values)) if i not in known]
        return sorted([*known, *missing[: keep - len(known)]])
    order = sorted(known, key=lambda i: (values[i].item(), i))
    low = {"extremes": keep // 2, "best": 0}.get(how)
    low = _low(values[order].double(), keep) if low is None else low
    return sorted([*order[:low], *order[len(order) - (keep - low) :]])


def _low(values: Tensor, keep: int) -> int:
    """How many of the smallest belong to the ``keep`` of the sorted ``values`` with the largest variance; the rest are
    the largest. Some such choice is always the best: the variance is convex in each value (PODS, arXiv 2504.13818)."""
    spread = [
        torch.cat([values[:low], values[len(values) - (keep - low) :]]).var(correction=0) for low in range(keep + 1)
    ]
    best = max(spread)
    ties = [low for low, value in enumerate(spread) if value >= best - 1e-12 * abs(best)]
    return min(ties, key=lambda low: abs(2 * low - keep))  # of equal ones the most balanced


def measures(pruned: Pruned, final: Tensor, finished: Sequence[Rows]) -> Sums:
    """The metrics ``midway/*``. ``final``: the rewards ``[N, K]`` of the ``finished`` samples, NaN without one."""
    metrics = StepMetrics()
    before, after = pruned.values, pruned.values.gather(1, pruned.kept)
    branches = final.shape[1] // after.shape[1]
    ends = final.view(len(final), -1, branches).nanmean(2)
    rank = [rank_correlation(a, b) for a, b in zip(after, ends, strict=True)]
    found = [r for r in rank if r is not None]
    if found:
        metrics.gather({"midway/rank_correlation": torch.tensor(sum(found))}, {}, len(found))
    groups = len(before)
    metrics.gather(
        {
            "midway/kept_std": known_std(after).nan_to_num().sum(),
            "midway/begun_std": known_std(before).nan_to_num().sum(),
            "midway/mean_shift": (after.nanmean(1) - before.nanmean(1)).nan_to_num().sum(),
        },
        {},
        groups,
    )
    metrics.count({"midway/dropped": before.numel() - after.numel()})
    if branches > 1:
        inner = known_std(final.view(len(final), -1, branches))
        metrics.gather({"midway/branch_std": inner.nansum()}, {}, int((~inner.isnan()).sum()))
    if pruned.tokens is not None and pruned.ended is not None:
        at = int(pruned.tokens[~pruned.ended].max()) if not pruned.ended.all() else 0
        later = sum(max(0, n - at) for part in finished for n in text_rows(part).responses) if at else 0
        dropped = pruned.tokens.sum() - pruned.tokens.gather(1, pruned.kept).sum()
        metrics.gather({"midway/tokens_dropped": dropped}, {}, int(pruned.tokens.sum()) + later)
        metrics.gather({"midway/ended": pruned.ended.sum()}, {}, pruned.ended.numel())
    return metrics.sums()


def rank_correlation(predicted: Tensor, final: Tensor) -> float | None:
    """Spearman's correlation in a group; None where one of the two is constant, or fewer than two are known."""
    known = ~(predicted.isnan() | final.isnan())
    found = spearman(predicted[known].tolist(), final[known].tolist())
    return None if math.isnan(found) else found

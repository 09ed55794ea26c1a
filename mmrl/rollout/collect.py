"""The first half of a step: sample a group for every slot, score the samples, and compute advantages.

A *round* is one pass of sampling and scoring; dynamic sampling needs several for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from mmrl.algorithms.advantages import Advantages
from mmrl.algorithms.multi_reward import aggregated
from mmrl.algorithms.objective import Scored, advantages_of, compares_batch, prepared_by, sampler
from mmrl.algorithms.settings import PictureSettings, TokenSettings
from mmrl.config.evaluation_checks import label_of
from mmrl.datasets.mixture import SOURCE, by_source, counts_of_sources, values_of_sources
from mmrl.pipelines.protocol import entries_of, of_text
from mmrl.placement import device_tasks
from mmrl.report.clock import Clock
from mmrl.rewards.scoring import Failure, Scores
from mmrl.rollout.branches import with_credit
from mmrl.rollout.encoding import encode
from mmrl.rollout.importance import SCALE, mean_weight, normalizes
from mmrl.rollout.mismatched import mismatched, of_batch, prompt_of_step
from mmrl.rollout.moving import moves, whole_first
from mmrl.rollout.rounds import sample_and_score
from mmrl.training.batch import Batch, Groups, Round, rows_of_update, samples_of
from mmrl.training.micro_batches import split_micro_batches
from mmrl.training.step_context import StepContext
from mmrl.training.step_metrics import StepMetrics
from mmrl.trajectory import Rows, Slot, TextRows


def collect_batch(context: StepContext, slots: list[Slot], step: int, clock: Clock, metrics: StepMetrics) -> Batch:
    """Sample a group for every slot, score it, and compute the advantages. Raises ``RewardError`` and ``UserError``."""
    with context.compute.devices.sampling_phase(context, sampler(context.objective, step)):
        rounds, groups = context.rollout.strategy.groups(context, slots, step, clock, metrics)
    if moves(context, 0):
        metrics.weigh(len(rounds[0].slots))
    first = replace(rounds[0].scores, total=rewards_of(context, rounds, groups_of(rounds[0])))
    metrics.merge([r.measured for r in rounds if r.measured is not None])
    metrics.set(reward_metrics(first, context.controller.gather, rows_by_source(context, rounds[0].slots)))
    batch, scored = assemble(context, rounds, groups)
    batch.slots = rounds[0].slots if moves(context, 0) else slots
    if batch.texts or context.recomputes_old_log_probs:
        with clock("prepare"):
            scored = prepare(context, batch, scored)
    how = context.recipe.algorithm.aggregates
    advantages = with_credit(context.recipe, aggregated(advantages_of(context.objective), scored, how))
    batch.advantages, batch.weights = advantages.values, row_weights(context, batch, scored.groups, advantages)
    if normalizes(context) and scored.mask is not None:
        mean = mean_weight(context, batch, scored.mask)
        batch.prepared[SCALE] = torch.full((len(batch.places),), mean)
        metrics.set({"mismatch/normalizer": mean})
    if advantages.returns is not None:
        batch.prepared["returns"] = advantages.returns
    if scored.mask is not None:
        metrics.set(text_metrics(batch, scored.mask))
    metrics.set({"advantage/zero_std_groups": advantages.zero_std_groups / advantages.groups, **advantages.metrics})
    return batch


def row_weights(context: StepContext, batch: Batch, groups: Tensor, advantages: Advantages) -> Tensor:
    """``[B]`` float32: 1 for each row that counts in the update's mean, and 0 for those left out.

    Left out are rows without a reward and, depending on the algorithm's settings, responses cut at the length limit
    (``mask_truncated``) and groups without an advantage (``drop_zero_std_groups``).
    """
    settings, counts = context.recipe.algorithm, advantages.valid.clone()
    if isinstance(settings, TokenSettings) and settings.mask_truncated:
        counts &= ~torch.tensor(truncated_rows(batch))
    if isinstance(settings, TokenSettings | PictureSettings) and settings.drop_zero_std_groups:
        sizes = advantages.values.abs().reshape(len(groups), -1).sum(1) * advantages.valid
        total = torch.zeros(int(groups.max()) + 1).index_add(0, groups, sizes)
        counts &= total[groups] > 0
    return counts.float()


class SynchronousRollout:
    """Final class, a ``RolloutStrategy``: every group is sampled in its step, with the trained weights."""

    staleness = 0
    replaces_groups = False

    def groups(
        self, context: StepContext, slots: list[Slot], step: int, clock: Clock, metrics: StepMetrics
    ) -> tuple[list[Round], Groups]:
        whole = sample_and_score(context, slots, step, clock)
        return [whole], whole_first(context, whole) if moves(context, 0) else groups_of(whole)


def assemble(context: StepContext, rounds: list[Round], groups: list[tuple[int, int]]) -> tuple[Batch, Scored]:
    """Join the groups (round, group in it) that are trained on into one batch, with their rewards."""
    size = context.recipe.train.group_size
    sampled = [rows for r in rounds for rows in r.micro_batches]
    before = [0, *accumulate(len(r.micro_batches) for r in rounds)]
    places = [r.places(first) for r, first in zip(rounds, before, strict=False)]
    rows = [(r, n * size + k) for r, n in groups for k in range(size)]
    kept = sorted({places[r][i][0] for r, i in rows})  # micro-batches of replaced groups are dropped
    micro_batches = [sampled[m] for m in kept]
    lengths = [row_lengths(context, of) for of in micro_batches]
    chosen = [(kept.index(m), k) for m, k in (places[r][i] for r, i in rows)]
    batch = Batch(
        micro_batches,
        chosen,
        advantages=torch.zeros(len(chosen)),
        weights=torch.ones(len(chosen)),
        lengths=torch.tensor([float(context.objective.entries or lengths[m][i]) for m, i in chosen]),
        keys=[key for r in rounds for key in r.keys],
        failures=[failure for r in rounds for failure in r.scores.failures],
    )
    rewards = rewards_of(context, rounds, groups)
    token_rewards, all_sum = span_rewards(context, batch, rounds, rows), context.controller.total
    parts, labels = parts_of(context, rounds, groups), context.rewards.weights
    batch.rewards = parts
    each = [
        (weight, torch.where(rewards.isnan(), torch.nan, parts[label])) for label, weight in labels.items() if weight
    ]
    scored = Scored(
        rewards, group_of_row(len(groups), context), token_rewards=token_rewards, all_sum=all_sum, parts=each
    )
    return batch, scored


def row_lengths(context: StepContext, rows: Rows) -> list[int]:
    """The entries of each row that an update trains on: written tokens, denoising steps, or noise levels."""
    if isinstance(rows, TextRows):
        return rows.written
    return [entries_of(context.pipeline, context.objective.kind)] * len(rows)


def groups_of(whole: Round) -> Groups:
    """The groups of a first round: each slot trains on its own group."""
    return [(0, n) for n in range(len(whole.slots))]


def rewards_of(context: StepContext, rounds: list[Round], groups: list[tuple[int, int]]) -> Tensor:
    """The weighted sum ``[B]`` of the rewards of these groups; ``normalize: batch`` is over these groups."""
    if not context.rollout.strategy.replaces_groups:
        return rows_of_groups(context, groups, [one.scores.total for one in rounds])
    size = context.recipe.train.group_size
    return context.rewards.total(
        parts_of(context, rounds, groups), [range(n, n + size) for n in range(0, len(groups) * size, size)]
    )


def parts_of(context: StepContext, rounds: list[Round], groups: list[tuple[int, int]]) -> dict[str, Tensor]:
    """The raw values ``[B]`` of every reward of these groups, by label."""
    return {
        label: rows_of_groups(context, groups, [one.scores.parts[label] for one in rounds])
        for label in context.rewards.labels
    }


def rows_of_groups(context: StepContext, groups: list[tuple[int, int]], columns: list[Tensor]) -> Tensor:
    """The rows ``[B]`` of these groups (round, group in it); ``columns`` has a value per sample for each round."""
    size = context.recipe.train.group_size
    return torch.cat([columns[r][n * size : (n + 1) * size] for r, n in groups])


def span_rewards(context: StepContext, batch: Batch, rounds: list[Round], rows: list[tuple[int, int]]) -> Tensor | None:
    """Rewards per token ``[B, T]`` float64: the values that rewards gave to spans of a response, times the weight of
    the reward, summed over spans and rewards; None if no reward gives any."""
    labels = rounds[0].scores.spans
    if not labels:
        return None
    weights = {label_of(r.name, r.label): r.weight for r in context.recipe.rewards}
    out = torch.zeros(len(rows), max(t.width for t in batch.texts), dtype=torch.float64)
    for n, ((r, i), (m, k)) in enumerate(zip(rows, batch.places, strict=True)):
        given = [(s.start, s.end, s.value * weights[x]) for x in labels for s in rounds[r].scores.spans[x][i] or ()]
        if given:
            values = of_text(context.pipeline).token_values(batch.texts[m].rows([k]), given)
            out[n, : len(values)] = torch.tensor(values, dtype=torch.float64)
    return out


def group_of_row(groups: int, context: StepContext) -> Tensor:
    """The group number of each row ``[B]``; the rows of a group are contiguous."""
    return torch.arange(groups).repeat_interleave(context.recipe.train.group_size)


def prepare(context: StepContext, batch: Batch, scored: Scored) -> Scored:
    """Recompute the tensors that are needed of the whole batch before its first update (old log-probs, reference
    log-probs, a critic's values), in the same slices as the updates.

    With one update per step text needs no old log-probs, unless importance weights are normalised: the update's forward
    pass is the old policy, and the ratio is 1. For pictures sampling recorded them (but see
    ``StepContext.recomputes_old_log_probs``).
    """
    updates, mask = context.recipe.train.updates_per_step, mask_of(batch)
    moves = (updates > 1 or normalizes(context)) and "log_probs" in context.objective.needs
    kept = {"log_probs", "values"}
    wanted = prepared_by(context.objective) | (frozenset({"log_probs"}) if moves else frozenset())
    if context.policy.weights.stages is not None:  # pipeline stages: an update calls the model once
        wanted |= context.objective.needs & {"reference_log_probs"}
        kept |= {"reference_log_probs"}
    width = entries_of(context.pipeline, context.objective.kind) if mask is None else mask.shape[1]
    columns = {name: torch.zeros(len(batch.places), width) for name in wanted}
    for update in range(updates if wanted else 0):
        micro_batches = split_micro_batches(
            context,
            batch,
            rows_of_update(batch, update, updates),
            partial(context.compute.devices.lockstep_count, context),
        )
        for made in context.compute.devices.map_micro_batches(context, device_tasks.prepare, micro_batches, wanted):
            for index, entries, new in made:
                at = torch.tensor(index).unsqueeze(1)
                for name in new:
                    of = entries if mask is None else list(range(new[name].shape[1]))
                    columns[name][at, torch.tensor(of)] = new[name]
    batch.prepared = {name: columns[name] for name in sorted(kept) if name in columns}
    return replace(scored, mask=mask, **columns)


def mask_of(batch: Batch) -> Tensor | None:
    """``[B, T]``: 1 for the response tokens of each row; None for pictures."""
    if not batch.texts:
        return None
    masks = [t.padded("action_mask").float().cpu() for t in batch.texts]
    mask = torch.zeros(len(batch.places), max(m.shape[1] for m in masks))
    for n, (m, i) in enumerate(batch.places):
        mask[n, : masks[m].shape[1]] = masks[m][i]
    return mask


def unsampled_batch(context: StepContext, slots: list[Slot], step: int, clock: Clock) -> Batch:
    """The rows of a step without sampling before the update: a pathwise objective samples in the update, an offline one
    trains on given pairs or responses."""
    with clock("encode"):
        slots, keys, bad = encode(context, slots)
    objective = context.objective
    if not compares_batch(objective):
        return prompts_only(context, slots, keys, bad)
    slots = mismatched(context, slots, prompt_of_step(context, step))
    batch = prompts_only(context, slots, keys, bad)
    with clock("prepare"):
        batch.prepared = of_batch(context, objective, batch)
    return batch


def prompts_only(context: StepContext, slots: list[Slot], keys: list[str], failures: Sequence[Failure] = ()) -> Batch:
    """A batch that holds prompts and no samples; every row has weight 1."""
    rows = samples_of(slots, context.recipe.train.group_size)
    of_prompts = Rows([s for s, _ in rows], [i for _, i in rows])
    ones = torch.ones(len(rows))
    given = context.pipeline.pairs
    lengths = ones if given is None else torch.tensor([float(n) for n in given.sizes(of_prompts)])
    places = [(0, i) for i in range(len(rows))]
    return Batch([of_prompts], places, torch.zeros(len(rows)), ones, lengths, keys, failures=list(failures))


def rows_by_source(context: StepContext, slots: Sequence[Slot]) -> Mapping[str, list[int]]:
    """The rows of the groups of ``slots`` by the source of their prompts, if the data set is a mixture."""
    size = context.recipe.train.group_size
    found = by_source([s.prompt for s in slots], context.recipe.data.labels)
    return {label: [i * size + k for i in of for k in range(size)] for label, of in found.items()}


def reward_metrics(
    scores: Scores,
    gather: Callable[[dict[str, list[float]]], list[dict[str, list[float]]]],
    sources: Mapping[str, Sequence[int]] | None = None,
) -> dict[str, float]:
    """Mean and standard deviation of the total, the mean of every part, and the number of samples left out, over all
    controllers.

    ``sources``: the rows of each source of a mixture, for which the metrics are added separately.
    """
    mine = {name: values.tolist() for name, values in {**scores.parts, "mean": scores.total}.items()}
    apart = values_of_sources(mine, sources or {})
    everyone = gather(mine | apart)
    out: dict[str, float] = {}
    for name in dict.fromkeys(name for one in everyone for name in one):
        values = torch.tensor([value for one in everyone for value in one.get(name, ())], dtype=torch.float64)
        valid = values[values.isfinite()]
        if name.startswith(SOURCE):
            out[name] = valid.mean().item()
            continue
        out[f"reward/{name}"] = valid.mean().item()
        if name == "mean":
            out["reward/std"] = (valid - valid.mean()).square().mean().sqrt().item()
            out["reward/dropped"] = float(len(values) - len(valid))
    return out | counts_of_sources(everyone)


def text_metrics(batch: Batch, mask: Tensor) -> dict[str, float]:
    """Mean length of the responses in tokens, and the share that was cut at the length limit."""
    cut = truncated_rows(batch)
    return {"text/length": mask.sum(1).mean().item(), "text/truncated": sum(cut) / len(cut)}


def truncated_rows(batch: Batch) -> list[bool]:
    """For each row of text whether the response was cut at the length limit."""
    truncated = [t.truncated.tolist() for t in batch.texts]
    return [truncated[m][i] for m, i in batch.places]

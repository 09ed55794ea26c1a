"""The first half of a step: sample a group for every slot, score the samples, and compute advantages.

A *round* is one pass of sampling and scoring; dynamic sampling needs several for a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import torch
from torch import Tensor

from mmrl.algorithms.advantages import Advantages
from mmrl.algorithms.modality_routing import AUDIO_ADVANTAGES, advantages_by_modality, routed
from mmrl.algorithms.multi_reward import aggregated
from mmrl.algorithms.objective import (
    ComparesBatch,
    Objective,
    Scored,
    advantages_of,
    compares_batch,
    prepared_by,
    sampler,
)
from mmrl.config.algorithm_settings import AlgorithmSettings, PictureSettings, TokenSettings
from mmrl.config.evaluation_checks import label_of
from mmrl.core.clock import Clock
from mmrl.core.episode import of_episodes
from mmrl.core.reward_contract import Span
from mmrl.core.trajectory import Rows, Segment, Slot, TextRows
from mmrl.data.mixture import SOURCE, by_source, counts_of_sources, values_of_sources
from mmrl.models.protocol import Pipeline, of_text
from mmrl.models.teachers import column_name
from mmrl.placement import device_tasks
from mmrl.rewards.scoring import Failure, Scores
from mmrl.rollout.branches import with_credit
from mmrl.rollout.encoding import encode
from mmrl.rollout.hints import with_hints
from mmrl.rollout.importance import SCALE, mean_weight, normalizes
from mmrl.rollout.kto_baseline import mismatched, prompt_of_step
from mmrl.rollout.moving import prompts_move, whole_first
from mmrl.rollout.rounds import sample_and_score
from mmrl.rollout.turn_credit import with_turns
from mmrl.step.batch import Batch, Groups, MicroBatch, rows_of_update, samples_of
from mmrl.step.micro_batches import micro_batches_of, packed_rows
from mmrl.step.step_context import RolloutStrategy, StepContext
from mmrl.step.step_metrics import StepMetrics


def collect_batch(context: StepContext, slots: list[Slot], step: int, clock: Clock, metrics: StepMetrics) -> Batch:
    """Rollout, prepare and credit: the batch of a step whose objective trains on samples. Raises ``RewardError`` and
    ``UserError``."""
    groups = rollout(context, slots, step, clock, metrics)
    batch = assembled(context, groups)
    batch.slots = groups.rounds[0].slots if prompts_move(context) else slots
    mask, prepared = mask_of(batch), dict[str, Tensor]()
    if batch.texts or context.recomputes_old_log_probs:
        with clock("prepare"):
            prepared = prepare(context, batch, mask)
    metrics.set(credit(context, groups, batch, mask, prepared))
    batch.prepared |= said_by_rewards(context, batch, groups)
    metrics.set(with_hints(context, groups, batch, rewards_of(context, groups)))
    return batch


def rollout(context: StepContext, slots: list[Slot], step: int, clock: Clock, metrics: StepMetrics) -> Groups:
    """Sample a group for every slot, and score it.

    Rewards are asked about a micro-batch as soon as it is sampled, while others are drawn; this returns when all have
    answered. An engine with weights of its own gets the policy's before it samples, once after each change of them
    (``TextPipeline.sync``). Raises ``RewardError`` where a reward with ``on_failure: fail`` has failed.
    """
    with context.compute.devices.sampling_phase(context, sampler(context.objective, step)):
        groups = context.rollout.strategy.groups(context, slots, step, clock, metrics)
    first = groups.rounds[0]
    if prompts_move(context):
        metrics.weight = len(first.slots)
    metrics.merge([r.measured for r in groups.rounds if r.measured is not None])
    alone = Groups.of_round(first, groups.size)
    scores = replace(first.scores, total=rewards_of(context, alone))
    sources = rows_by_source(first.slots, groups.size, context.recipe.data.labels)
    metrics.set(reward_metrics(scores, context.controller.gather, sources))
    return groups


def credit(
    context: StepContext, groups: Groups, batch: Batch, mask: Tensor | None, prepared: Mapping[str, Tensor]
) -> dict[str, float]:
    """Set the advantage and the weight of every row of ``batch``, and the critic's targets, from the rewards of
    ``groups`` and what was ``prepared``. Returns the step's metrics of both.

    The objective computes the advantages (``advantages_of``): by default of the rewards of each group. A sample whose
    reward failed has the reward NaN: it gets weight 0, and the statistics of its group are those of the others. A group
    in which all have failed adds nothing. Rewards are float64; advantages, weights and log-probs are float32 in any
    ``model.dtype``.
    """
    rewards, algorithm = rewards_of(context, groups), context.recipe.algorithm
    parts = {label: groups.column(lambda s, label=label: s.parts[label]) for label in context.rewards.labels}
    weights = {label: weight for label, weight in context.rewards.weights.items() if weight}
    scored = Scored(
        rewards,
        groups.of_row,
        mask,
        span_rewards(context, batch, groups),
        **prepared,
        all_sum=context.controller.total,
        step_rewards=groups.steps,
        parts=[(weight, torch.where(rewards.isnan(), torch.nan, parts[label])) for label, weight in weights.items()],
    )
    of, how = advantages_of(context.objective), algorithm.aggregates
    if apart := routed(context.recipe.rewards):
        advantages = advantages_by_modality(of, scored, how, context.recipe.rewards)
    else:
        advantages = aggregated(of, scored, how)
    advantages = with_credit(context.recipe, advantages)
    advantages = with_turns(context.recipe, batch, scored, advantages)
    batch.rewards, batch.advantages = parts, advantages.values
    if apart:
        batch.advantages, batch.prepared[AUDIO_ADVANTAGES] = advantages.values.unbind(1)
    batch.weights = row_weights(algorithm, batch, scored.groups, advantages)
    metrics = {} if mask is None else text_metrics(batch, mask)
    if normalizes(context) and mask is not None:
        mean = mean_weight(context, batch, mask)
        batch.prepared[SCALE] = torch.full((len(batch.places),), mean)
        metrics["mismatch/normalizer"] = mean
    if advantages.returns is not None:
        batch.prepared["returns"] = advantages.returns
    flat = advantages.zero_std_groups / advantages.groups
    return {**metrics, "advantage/zero_std_groups": flat, **advantages.metrics}


def row_weights(settings: AlgorithmSettings, batch: Batch, groups: Tensor, advantages: Advantages) -> Tensor:
    """``[B]`` float32: 1 for each row that counts in the update's mean, and 0 for those left out.

    Left out are rows without a reward and, depending on the algorithm's settings, responses cut at the length limit
    (``mask_truncated``) and groups without an advantage (``drop_zero_std_groups``).
    """
    counts = advantages.valid.clone()
    if isinstance(settings, TokenSettings) and settings.mask_truncated:
        counts &= ~torch.tensor(truncated_rows(batch))
    if isinstance(settings, TokenSettings | PictureSettings) and settings.drop_zero_std_groups:
        sizes = advantages.values.abs().reshape(len(groups), -1).sum(1) * advantages.valid
        total = torch.zeros(int(groups.max()) + 1).index_add(0, groups, sizes)
        counts &= total[groups] > 0
    return counts.float()


class SynchronousRollout(RolloutStrategy):
    """Final class: every group is sampled in its step, with the trained weights."""

    def groups(self, context: StepContext, slots: list[Slot], step: int, clock: Clock, metrics: StepMetrics) -> Groups:
        whole = sample_and_score(context, slots, step, clock)
        if prompts_move(context):
            return whole_first(context.recipe, whole)
        return Groups.of_round(whole, context.recipe.train.group_size)


def assembled(context: StepContext, groups: Groups) -> Batch:
    """Join the groups that are trained on into one batch, which has no advantages yet."""
    sampled = [rows for r in groups.rounds for rows in r.micro_batches]
    before = [0, *accumulate(len(r.micro_batches) for r in groups.rounds)]
    places = [r.places(first) for r, first in zip(groups.rounds, before, strict=False)]
    kept = sorted({places[r][i][0] for r, i in groups.rows})  # micro-batches of replaced groups are dropped
    chosen = [(kept.index(m), k) for m, k in (places[r][i] for r, i in groups.rows)]
    micro_batches = [sampled[m] for m in kept]
    lengths = [row_lengths(context.pipeline, context.objective, of) for of in micro_batches]
    return Batch(
        micro_batches,
        chosen,
        advantages=torch.zeros(len(chosen)),
        weights=torch.ones(len(chosen)),
        lengths=torch.tensor([float(context.objective.entries or lengths[m][i]) for m, i in chosen]),
        keys=[key for r in groups.rounds for key in r.keys],
        failures=[failure for r in groups.rounds for failure in r.scores.failures],
    )


def row_lengths(pipeline: Pipeline, objective: Objective, rows: Rows) -> list[int]:
    """The entries of each row that an update trains on: written tokens, denoising steps, or noise levels."""
    if isinstance(rows, TextRows):
        return rows.written
    return [pipeline.entries(objective.kind)] * len(rows)


def rewards_of(context: StepContext, groups: Groups) -> Tensor:
    """The weighted sum ``[B]`` of the rewards of these groups; ``normalize: batch`` is over these groups."""
    if not context.rollout.strategy.replaces_groups:
        return groups.column(lambda scores: scores.total)
    parts = {label: groups.column(lambda s, label=label: s.parts[label]) for label in context.rewards.labels}
    rows = range(0, len(groups.chosen) * groups.size, groups.size)
    return context.rewards.total(parts, [range(n, n + groups.size) for n in rows])


def span_rewards(context: StepContext, batch: Batch, groups: Groups) -> Tensor | None:
    """Rewards per token ``[B, T]`` float64: the values that rewards gave to spans of a response, times the weight of
    the reward, summed over spans and rewards; None if no reward gives any."""
    labels = groups.rounds[0].scores.spans
    if not labels:
        return None
    weights = {label_of(r.name, r.label): r.weight for r in context.recipe.rewards}
    out = torch.zeros(len(batch.places), max(t.width for t in batch.texts), dtype=torch.float64)
    for n, ((r, i), (m, k)) in enumerate(zip(groups.rows, batch.places, strict=True)):
        spans = groups.rounds[r].scores.spans
        by_token = context.rewards.by_token
        given = [(s.start, s.end, s.value * weights[x]) for x in labels for s in spans[x][i] or () if x not in by_token]
        if given:
            values = of_text(context.pipeline).token_values(batch.texts[m].rows([k]), given)
            out[n, : len(values)] = torch.tensor(values, dtype=torch.float64)
        for label in (x for x in by_token if weights[x] and spans[x][i]):
            at = written_places(batch.texts[m].segments[k])
            out[n, at] += weights[label] * torch.tensor(values_of_tokens(spans[label][i] or (), len(at)))
    return out


def said_by_rewards(context: StepContext, batch: Batch, groups: Groups) -> dict[str, Tensor]:
    """Some teachers are served as rewards. Returns, by ``column_name``, the log-probs ``[B, T]`` that each gave to the
    written tokens; NaN for other tokens, and for samples whose reward failed."""
    out: dict[str, Tensor] = {}
    for label in {teacher.reward for teacher in context.recipe.teacher if teacher.reward}:
        column = torch.full((len(batch.places), max(t.width for t in batch.texts)), torch.nan)
        for n, ((r, i), (m, k)) in enumerate(zip(groups.rows, batch.places, strict=True)):
            if (given := groups.rounds[r].scores.spans[label][i]) is not None:
                at = written_places(batch.texts[m].segments[k])
                column[n, at] = torch.tensor(values_of_tokens(given, len(at)), dtype=torch.float32)
        out[column_name(label)] = column
    return out


def written_places(segments: Sequence[Segment]) -> list[int]:
    """Where the written tokens of a row are among those behind its prompt."""
    asked = segments[0].stop
    return [n - asked for s in segments if s.kind == "written" for n in range(s.start, s.stop)]


def values_of_tokens(spans: Sequence[Span], count: int) -> list[float]:
    """The values of ``spans`` on each of ``count`` written tokens."""
    out = [0.0] * count
    for start, end, value in spans:
        for n in range(start, end):
            out[n] += value
    return out


def prepare(context: StepContext, batch: Batch, mask: Tensor | None) -> dict[str, Tensor]:
    """Recompute the tensors that are needed of the whole batch before its first update (old log-probs, reference
    log-probs, a critic's values), ``[B, T]`` each. The batch keeps those that an update reads.

    With one update per step text needs no old log-probs, unless importance weights are normalised: the update's forward
    pass is the old policy, and the ratio is 1. For pictures sampling recorded them; where the record is not
    exactly the old policy's (``StepContext.recomputes_old_log_probs``), the rule for text holds.
    """
    updates = context.recipe.train.updates_per_step
    reads_old = (updates > 1 or normalizes(context)) and "log_probs" in context.objective.needs
    kept = {"log_probs", "values"}
    wanted = prepared_by(context.objective) | (frozenset({"log_probs"}) if reads_old else frozenset())
    if context.policy.weights.stages is not None:  # pipeline stages: an update calls the model once
        wanted |= context.objective.needs & {"reference_log_probs"}
        kept |= {"reference_log_probs"}
    width = context.pipeline.entries(context.objective.kind) if mask is None else mask.shape[1]
    columns = {name: torch.zeros(len(batch.places), width) for name in wanted}
    for index, entries, new in recomputed(context, batch, wanted, updates) if wanted else ():
        at = torch.tensor(index).unsqueeze(1)
        for name in new:
            of = entries if mask is None else list(range(new[name].shape[1]))
            columns[name][at, torch.tensor(of)] = new[name]
    batch.prepared = {name: columns[name] for name in sorted(kept) if name in columns}
    return columns


def statistics(context: StepContext, objective: ComparesBatch, batch: Batch) -> dict[str, Tensor]:
    """The objective's statistics of the whole batch of all controllers, ``[B]`` each, from tensors that are recomputed
    without a graph."""
    columns = {name: torch.zeros(len(batch.places)) for name in objective.prepares}
    for index, _, new in recomputed(context, batch, objective.prepares, 1):
        for name in new:
            columns[name][index] = new[name]
    return objective.of_batch(columns, batch.weights, context.controller.total)


def recomputed(
    context: StepContext, batch: Batch, wanted: frozenset[str], updates: int
) -> Iterator[tuple[list[int], list[int], dict[str, Tensor]]]:
    """The tensors ``wanted`` of the whole batch in the slices of its updates: each with its rows of the batch and its
    entries."""
    devices = context.compute.devices
    for update in range(updates):
        micro_batches = slices(context, batch, rows_of_update(batch, update, updates))
        for made in devices.map_micro_batches(context, device_tasks.prepare, micro_batches, wanted):
            yield from made


def slices(context: StepContext, batch: Batch, rows: list[int]) -> Iterator[MicroBatch]:
    """The slices of an update over ``rows``: as many as other ranks have, where a forward pass is collective."""
    own = packed_rows(context, batch, rows)
    return micro_batches_of(context, batch, own, context.compute.devices.lockstep_count(context, len(own)))


def mask_of(batch: Batch) -> Tensor | None:
    """``[B, T]``: 1 for the response tokens of each row; None for pictures."""
    return batch.of_tokens("action_mask") if batch.texts else None


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
        batch.prepared = statistics(context, objective, batch)
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


def rows_by_source(slots: Sequence[Slot], size: int, labels: Sequence[str]) -> Mapping[str, list[int]]:
    """The rows of the groups of ``slots``, of ``size`` samples each, by the source of their prompts, if the data set is
    a mixture (``labels``)."""
    found = by_source([s.prompt for s in slots], labels)
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
    places = [(texts, i) for m, i in batch.places if (texts := batch.texts[m]).episodes is not None]
    told = sum(texts.responses[i] - texts.written[i] for texts, i in places)
    played = [texts.episodes[i] for texts, i in places if texts.episodes is not None]
    episodes = {**of_episodes(played), "episode/told_tokens": told / len(places)} if places else {}
    return {"text/length": mask.sum(1).mean().item(), "text/truncated": sum(cut) / len(cut), **episodes}


def truncated_rows(batch: Batch) -> list[bool]:
    """For each row of text whether the response was cut at the length limit."""
    truncated = [t.truncated.tolist() for t in batch.texts]
    return [truncated[m][i] for m, i in batch.places]

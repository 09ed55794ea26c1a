"""Divide an update into slices, so that only one slice's autograd graph is in memory at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from mmrl.controller.workload_balance import line_tokens, pack, pack_lines, padded
from mmrl.core.randomness import generator
from mmrl.core.trajectory import Rows, TextRows
from mmrl.core.transfer import to_device
from mmrl.data.buckets import by_size
from mmrl.models.protocol import Pipeline, of_text
from mmrl.step.batch import Batch, MicroBatch, chunks, gather, groups_of
from mmrl.step.step_context import StepContext


def packed_rows(context: StepContext, batch: Batch, mine: list[int]) -> list[list[int]]:
    """The rows ``mine`` of an optimizer step, divided into micro-batches of similar length, pictures of one size in
    each."""
    train, sizes = context.recipe.train, sizes_of(context.pipeline, batch)
    if (flat := in_lines(context.pipeline, batch)) is not None:
        lengths = [sum(sizes[n]) for n in mine]
        found = pack_lines(lengths, train.micro_batch_size, train.micro_batch_tokens, flat=flat)
        return [[mine[k] for k in of] for of in found]
    prompts = [batch.micro_batches[m].slots[i].prompt for m, i in (batch.places[n] for n in mine)]
    alike = [[mine[k] for k in of] for of in by_size(prompts, context.recipe.sampling)]
    return [index for of in alike for index in packed(of, sizes, train.micro_batch_size, train.micro_batch_tokens)]


def split_micro_batches(context: StepContext, batch: Batch, mine: list[int]) -> Iterator[MicroBatch]:
    """The slices of the rows ``mine`` where no other rank has to run as many."""
    own = packed_rows(context, batch, mine)
    return micro_batches_of(context, batch, own, len(own))


def micro_batches_of(context: StepContext, batch: Batch, own: list[list[int]], count: int) -> Iterator[MicroBatch]:
    """The slices of one optimizer step: its micro-batches of rows ``own``, and of each the denoising steps one by one
    or a few at once (``train.steps_per_forward``); all tokens of text.

    ``count``: the number of micro-batches that all ranks run (``Devices.lockstep_count``): the last one is repeated
    with weight 0 until there are as many.
    """
    device, sizes, flat = context.compute.device, sizes_of(context.pipeline, batch), in_lines(context.pipeline, batch)
    for n, index in enumerate(own + own[-1:] * (count - len(own))):
        rows = gather(batch.micro_batches, [batch.places[n] for n in index])
        groups = to_device(groups_of(rows), device)
        for entries in chunks(chosen(context, rows), context.recipe.train.at_once):
            columns = {"advantages": batch.advantages, "weights": batch.weights, **batch.prepared}
            of = slice(rows.width) if isinstance(rows, TextRows) else entries
            cut = {k: v[index] if v.ndim == 1 else v[index][:, of] for k, v in columns.items()}
            old = {name: to_device(value, device) for name, value in cut.items()} | {"groups": groups}
            old["weights"] = old["weights"] * (n < len(own))
            found = context.pipeline.recorded(rows, entries)
            found = drawn_before(found) if context.recomputes_old_log_probs else found
            known = old | {name: value for name, value in found.items() if name not in old}  # not what was recomputed
            tokens = sum(sum(sizes[n]) for n in index)
            of_rows = [sizes[n] for n in index]
            width = padded(of_rows) if flat is None else line_tokens([sum(of) for of in of_rows], flat=flat)
            yield MicroBatch(rows, entries, index, known, tokens, width)


def in_lines(pipeline: Pipeline, batch: Batch) -> bool | None:
    """None: the rows of a micro-batch are padded. Else ``flat`` of ``mmrl.controller.workload_balance.lines``."""
    way = of_text(pipeline).packing if batch.texts else None
    return None if way is None else way.flat


def sizes_of(pipeline: Pipeline, batch: Batch) -> list[tuple[int, ...]]:
    """``parts`` of each row of the batch."""
    found = [parts(pipeline, rows) for rows in batch.micro_batches]
    return [found[m][i] for m, i in batch.places]


def parts(pipeline: Pipeline, rows: Rows) -> list[tuple[int, ...]]:
    """Tokens of each row, by the parts that a micro-batch pads separately: the prompt, and what is behind it."""
    if isinstance(rows, TextRows):
        return list(zip(rows.prompts, rows.responses, strict=True))
    return [(n,) for n in pipeline.lengths(rows)]


def chosen(context: StepContext, rows: Rows) -> list[int]:
    """The numbers of the denoising steps or noise levels that an update trains on: all of them or, if the objective
    trains on fewer steps than were recorded, a random choice per training step, the same for all rows."""
    all_of = context.pipeline.entries(context.objective.kind)
    n = context.objective.entries or all_of
    if context.objective.kind != "policy_gradient" or n == all_of:
        return list(range(n))
    drawn = generator(context.recipe.seed, rows.ids[0].step, "trained steps")
    return sorted(torch.randperm(all_of, generator=drawn)[:n].tolist())


def drawn_before(own: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that sampling recorded, with the log-probs renamed to ``rollout_log_probs`` ``[B, 1]``, as for text:
    a policy that is not the trained one sampled (``StepContext.recomputes_old_log_probs``)."""
    if "log_probs" not in own:
        return own
    known = {name: value for name, value in own.items() if name != "log_probs"}
    return known | {"rollout_log_probs": own["log_probs"], "mask": torch.ones_like(own["log_probs"])}


def packed(rows: list[int], sizes: Sequence[Sequence[int]], most: int, tokens: int | None) -> Iterator[list[int]]:
    """Divide ``rows`` into micro-batches of at most ``most`` rows of similar length, and at most ``tokens`` tokens with
    padding (``mmrl.controller.workload_balance.pack``). ``sizes``: tokens of the parts of every row of the batch.

    Rows of one size keep their order, so that a micro-batch of pictures is updated as it was sampled.
    """
    for index in pack([sizes[n] for n in rows], most, tokens):
        yield [rows[i] for i in index]

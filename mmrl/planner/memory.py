"""Measure the memory and the operations of a step: the pipeline's own code runs on tensors without data.

Sampling, decoding, a training slice and the optimizer's step run as they do in training, but on fake tensors: shapes,
dtypes, autocast, gradient checkpointing and the autograd graph are real, the data is missing. ``LiveBytes`` observes
every operation and counts the live storages. It also counts a real step (``tests/planner/test_plan.py`` compares the
two).

Counted: every tensor that an operator returns. Not counted: memory that a kernel allocates and frees internally (matmul
and convolution workspaces), the allocator's slack, the accelerator's own context. Attention is counted as the flash
kernel computes it, on every device: without a [B, heads, S, S] matrix.
"""

from __future__ import annotations

import sys
from collections.abc import Generator, Hashable, Sequence
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import PyTree, tree_leaves, tree_map

from mmrl.algorithms.advantages import alone
from mmrl.algorithms.objective import Objective, compares_batch, copies_of, prepared_by, sampler
from mmrl.config.left_to_plan import with_values
from mmrl.config.schema import Recipe
from mmrl.core.trajectory import Prompt, Rows, SampleId, Slot, TextRows
from mmrl.models import context_parallel as context
from mmrl.models import sequence_parallel as sequence
from mmrl.models.description import Description
from mmrl.models.optimizers import bytes_in_8_bits
from mmrl.models.policy import Policy
from mmrl.models.protocol import Pipeline, of_pictures, recorded_steps
from mmrl.models.teachers import copy_name
from mmrl.planner.counts import Counts
from mmrl.planner.fake_tensors import KnownMasks, LiveBytes, fake, nbytes
from mmrl.planner.operations import Operations, Work, mean_of
from mmrl.step.update import recompute

_UNCUT = {"train.context_parallel": 1}


def known_masks(pipeline: Pipeline, live: LiveBytes) -> AbstractContextManager[object]:
    """``KnownMasks`` for text, whose models may take pictures. Most diffusion does not need it, and it costs time."""
    return KnownMasks(live) if pipeline.makes == "text" or of_pictures(pipeline).masks else nullcontext()


@dataclass(frozen=True)
class Measured:
    """The measured memory of a step, in bytes.

    ``features``: of a prompt. ``trajectory`` and ``picture`` (float32): kept per sample. ``encode`` (one prompt),
    ``sample`` and ``decode`` (a micro-batch), ``train`` (forward and backward of a slice) and ``optimizer``: the
    working memory of each phase, in addition to permanent tensors. ``adam``: the optimizer's state. ``trained``: the
    trained weights. ``train_token``: the growth of ``train`` per additional token in every row of the slice.
    ``train_step``: the growth per additional denoising step in a forward; 0 if it was not measured. ``whole``: what
    ``train`` would be on a device that shares no rows; ``tokens``: of a picture or clip that devices share, else 0.

    ``forwards`` and ``graph_forwards``: calls of the policy in a slice, without and with an autograd graph. ``guided``:
    whether a forward of sampling has twice the rows (classifier-free guidance); ``guided_loss``: the same for training.
    """

    features: int
    trajectory: int
    picture: int
    encode: int
    sample: int
    decode: int
    train: int
    optimizer: int
    adam: int
    trained: int
    forwards: int
    graph_forwards: int
    guided: bool
    guided_loss: bool
    operations: Operations
    train_token: float = 0.0
    train_step: int = 0
    whole: int = 0
    tokens: int = 0


def measure(
    description: Description,
    recipe: Recipe,
    objective: Objective,
    counts: Counts,
    prompt: Prompt,
    *,
    foreach: bool,
    others: Sequence[tuple[Prompt, float]] = (),
) -> Measured:
    """Run the parts of a step on fake tensors, for the largest micro-batch and slice; every row has ``prompt``.

    ``others``: prompts of other sizes, and the share of a step's rows that each has: the operations are the mean.
    ``foreach``: the optimizer updates all parameters at once, as on CUDA. The modules of ``description`` stay fake.
    """
    fake(component.module for component in description.components)
    pipeline = description.pipeline
    trained = _trained(description, recipe, objective, foreach)
    slots, ids = _rows(max(counts.batch, counts.slice_rows), prompt)
    budget, pipeline.features.budget_bytes = pipeline.features.budget_bytes, sys.maxsize  # keep fakes off the disk
    with LiveBytes() as live:
        keys = pipeline.encode(slots[:1])
    features, kinds = pipeline.features.bytes, len(pipeline.features)
    negative = len(keys) > 1 and pipeline.makes != "text"  # one slot: the negative prompt has features too
    encode = max(0, live.peak - features)  # outputs of the encoder that are kept are not counted twice
    trajectory, sample, picture, decode, drawn = _sampled(pipeline, recipe, objective, trained[0], counts, slots, ids)
    kept = nbytes(t for t in vars(trajectory).values() if isinstance(t, Tensor)) // len(trajectory)
    made = _slice(pipeline, recipe, objective, trained, trajectory, counts.slice_rows)
    whole, uncut = made, with_values(recipe, _UNCUT)
    if recipe != uncut:  # only the part of a row with the most memory is run
        whole = _slice(pipeline, uncut, objective, trained, trajectory, counts.slice_rows)
        if pipeline.makes != "text":
            drawn = _sampled(pipeline, uncut, objective, trained[0], counts, slots, ids)[-1]
    token, step = _growth(pipeline, recipe, objective, trained, trajectory, counts, made.bytes)
    optimizer, state, stepped = _optimizers(trained, recipe)
    largest = Operations(live.work, drawn.sample, drawn.decode, whole.work, whole.forward, stepped, drawn.token)
    work = [(largest, 1 - sum(share for _, share in others))]
    work += [(_work(pipeline, recipe, objective, trained, counts, other), share) for other, share in others]
    pipeline.features.budget_bytes = budget
    return Measured(
        features if pipeline.makes == "text" else features // kinds,
        kept,
        picture,
        encode,
        sample,
        decode,
        made.bytes,
        optimizer,
        state,
        nbytes(p for one in trained for p in one.trainable.values()),
        made.calls[False],
        made.calls[True],
        guided=negative and recipe.denoising.guidance_scale > 1,
        guided_loss=negative and recipe.algorithm.loss_guidance(recipe.denoising.guidance_scale) > 1,
        operations=mean_of(work),
        train_token=token,
        train_step=step,
        whole=whole.bytes,
        tokens=made.tokens,
    )


def _work(
    pipeline: Pipeline, recipe: Recipe, objective: Objective, trained: list[Policy], counts: Counts, prompt: Prompt
) -> Operations:
    """The operations of the parts of a step whose rows all have ``prompt``."""
    slots, ids = _rows(max(counts.batch, counts.slice_rows), prompt)
    with LiveBytes() as live:
        pipeline.encode(slots[:1])
    if recipe.train.context_parallel > 1:  # ranks that share samples divide these, too; the work is that of all
        _sampled(pipeline, recipe, objective, trained[0], counts, slots, ids)
        recipe = with_values(recipe, _UNCUT)
    trajectory, _, _, _, drawn = _sampled(pipeline, recipe, objective, trained[0], counts, slots, ids)
    made = _slice(pipeline, recipe, objective, trained, trajectory, counts.slice_rows)
    return Operations(live.work, drawn.sample, drawn.decode, made.work, made.forward, token=drawn.token)


def _part(pipeline: Pipeline, recipe: Recipe) -> AbstractContextManager[context.Cut | sequence.Cut | None]:
    """Inside, the policy computes what one of the devices does that share a row."""
    of, size = context if pipeline.makes == "text" else sequence, recipe.train.context_parallel
    return closing(of.Cut(pipeline.policy, context.Imagined(size))) if size > 1 else nullcontext()


def _trained(description: Description, recipe: Recipe, objective: Objective, foreach: bool) -> list[Policy]:
    """The policy with its copies, and the critic, if there is one."""
    total = recipe.train.steps * recipe.train.updates_per_step
    how = recipe.performance
    if how.optimizer == "adamw_8bit":  # its kernels do not support fake tensors
        how = how.model_copy(update={"optimizer": "adamw"})
    elif how.optimizer == "auto" and foreach:
        how = how.model_copy(update={"optimizer": "adamw_fused"})
    continues = recipe.model.continues_adapter
    policy = Policy(description.pipeline.policy, recipe.optim, total, performance=how, continues=continues)
    for name in kept_copies(recipe, objective):
        policy.keep(name)
    others = [c.module for c in description.components if c.role == "critic"]
    trained = [policy, *(Policy(module, recipe.optim, total, performance=how) for module in others)]
    for one in trained:
        for group in one.optimizer.param_groups:
            group["foreach"] = foreach and not group["fused"]
    return trained


def _optimizers(trained: Sequence[Policy], recipe: Recipe) -> tuple[int, int, Work]:
    """The peak working memory of an optimizer step, the size of the optimizers' state, in bytes, and its operators
    (of 8 bits none: its one kernel moves the state)."""
    most, kept, work = 0, 0, Work()
    for one in trained:
        with LiveBytes() as live:
            one.optimizer.step()
        with LiveBytes() as again:  # its state is there now, as in most steps
            one.optimizer.step()
        work.update(again.work)
        its = nbytes(t for s in one.optimizer.state.values() for t in s.values() if isinstance(t, Tensor))
        most, kept = max(most, live.peak - its), kept + its
    if recipe.performance.optimizer == "adamw_8bit":  # which works in place
        return 0, sum(bytes_in_8_bits(one.trainable.values()) for one in trained), Work()
    return most, kept, work


def _growth(
    pipeline: Pipeline,
    recipe: Recipe,
    objective: Objective,
    trained: list[Policy],
    trajectory: Rows,
    counts: Counts,
    train: int,
) -> tuple[float, int]:
    """The growth of a slice's ``train`` bytes per additional token in every row, and per additional denoising step in a
    forward; 0 if the recipe does not need it."""
    token, step = 0.0, 0
    if recipe.train.context_parallel > 1 and isinstance(trajectory, TextRows):
        less = trajectory.width // 2
        short = _shorter(trajectory, less)
        token = (train - _slice(pipeline, recipe, objective, trained, short, counts.slice_rows).bytes) / max(1, less)
    if recipe.train.steps_per_forward == "auto" and counts.entries > 1:
        two = with_values(recipe, {"train.steps_per_forward": 2})
        step = _slice(pipeline, two, objective, trained, trajectory, counts.slice_rows).bytes - train
    return token, step


def _shorter(rows: TextRows, less: int) -> TextRows:
    """``rows`` with so many tokens less behind their prompts."""
    if (times := len(rows.sequences) // len(rows)) > 1:  # of which all are equal
        return _shorter(rows.sequences.rows(range(0, len(rows.sequences), times)), less // times).repeated(times)
    kept = [n - less for n in rows.lengths]
    tokens, log_probs = (rows.column(name).split(rows.lengths) for name in ("tokens", "log_probs"))
    prompts = [(key, row[:n]) for key, row, n in zip(rows.features, tokens, rows.prompts, strict=True)]
    behind = [
        [row[n:most] for row, n, most in zip(column, rows.prompts, kept, strict=True)] for column in (tokens, log_probs)
    ]
    return TextRows.answers(rows.slots, rows.ids, prompts, behind[0], rows.truncated, behind[1])


def kept_copies(recipe: Recipe, objective: Objective) -> list[str]:
    """The copies of the trained weights that the objective keeps, and those that teachers are; with LoRA ``reference``
    is the base model, not a copy."""
    asks = any("reference" in name for name in objective.needs | prepared_by(objective))
    taught = [copy_name(n) for n, teacher in enumerate(recipe.teacher) if teacher.is_adapter]
    return [*sorted(copies_of(objective)), *(["reference"] if asks else []), *taught]


def _rows(n: int, prompt: Prompt) -> tuple[list[Slot], list[SampleId]]:
    """``n`` rows of groups of their own, which share no denoising steps: a micro-batch may have as many groups."""
    return [Slot(0, k, 0, prompt) for k in range(n)], [SampleId(0, k, 0, 0) for k in range(n)]


def _sampled(
    pipeline: Pipeline,
    recipe: Recipe,
    objective: Objective,
    policy: Policy,
    counts: Counts,
    slots: list[Slot],
    ids: list[SampleId],
) -> tuple[Rows, int, int, int, Drawn]:
    """A ``_micro_batch`` with the weights that sample and with the rows of a slice of training, which may be of
    several micro-batches; where nothing is sampled before the update, its rows without samples."""
    n = counts.slice_rows
    if not counts.micro_batches:
        return Rows(slots[:n], ids[:n]), 0, 0, 0, Drawn()
    with policy.using(sampler(objective, 0)):
        made = _micro_batch(pipeline, recipe, objective, slots[: counts.batch], ids[: counts.batch])
        if n > counts.batch:
            made = (_micro_batch(pipeline, recipe, objective, slots, ids)[0], *made[1:])
    return made


@torch.no_grad()
def _micro_batch(
    pipeline: Pipeline, recipe: Recipe, objective: Objective, slots: list[Slot], ids: list[SampleId]
) -> tuple[Rows, int, int, int, Drawn]:
    """Sample and decode a micro-batch. Returns its trajectory, the bytes of sampling, of a picture and of decoding, and
    the operators of sampling and decoding."""
    actions = recorded_steps(pipeline, 0) if "log_probs" in objective.needs else []
    with (
        nullcontext() if pipeline.makes == "text" else _part(pipeline, recipe),
        LiveBytes() as live,
        counted(pipeline.policy, live) as (_, spent),
        once(pipeline, live),
        known_masks(pipeline, live),
    ):
        trajectory = pipeline.sample(slots, ids, actions, recipe.seed)
    sample, work = live.peak - live.now, live.work
    token = spent[1].whole if pipeline.makes == "text" and len(spent) > 1 else Work()
    with LiveBytes() as live:
        made = pipeline.samples(trajectory, frozenset({"tensor"}))
    picture = 0 if made[0].tensor is None else made[0].tensor.nbytes
    return trajectory, sample, picture, live.peak, Drawn(work, live.work, token)


class Drawn(NamedTuple):
    """The operators of sampling and decoding a micro-batch; of text also of one token."""

    sample: Work = Work()
    decode: Work = Work()
    token: Work = Work()


class Spent(NamedTuple):
    """The operators of a forward of the policy, and ``whole``: with those since the forward before ended."""

    forward: Work
    whole: Work


class _Slice(NamedTuple):
    bytes: int
    calls: dict[bool, int]
    work: Work
    forward: Work
    """Operators of the first forward of the policy."""
    tokens: int
    """``Measured.tokens``."""


def _slice(
    pipeline: Pipeline, recipe: Recipe, objective: Objective, trained: list[Policy], trajectory: Rows, n: int
) -> _Slice:
    """Run forward and backward of a training slice of ``n`` rows; gradients of an earlier slice exist already.

    ``trained``: the policy, and the critic, if there is one.
    """
    policy = trained[0]
    for p in (p for one in trained for p in one.trainable.values()):
        p.grad = p.detach().clone()
    old = {"advantages": torch.zeros(n), "weights": torch.ones(n), "groups": torch.zeros(n, dtype=torch.long)}
    with (
        LiveBytes() as live,
        counted(pipeline.policy, live) as (calls, spent),
        known_masks(pipeline, live),
        _part(pipeline, recipe) as cut,
    ):
        rows = trajectory if n == len(trajectory) else trajectory.rows(list(range(n)))
        at_once = range(recipe.train.at_once)
        if objective.kind == "pathwise":
            with once(pipeline, live):
                path = objective.graph_steps(recipe.denoising.taken, 0.0)
                sampler = of_pictures(pipeline)
                new = sampler.generate(rows.slots, rows.ids, path, recipe.seed, objective.needs, policy.using)
            del new["latents"]
            rewards = new.pop("images").flatten(1).mean(1).view(-1, n)
            new["rewards"] = rewards.repeat(max(1, len(objective.phrases(0))), 1)
        else:
            new = recompute(pipeline, objective, rows, at_once, objective.needs, recipe.seed, policy.using)
        if objective.kind == "policy_gradient" or objective.kind == "offline":
            old |= pipeline.recorded(rows, at_once)
        if objective.kind == "policy_gradient" and pipeline.makes == "text":  # prepared as computed
            old |= {"log_probs": new["log_probs"].detach(), "returns": old["mask"]}
            old |= {"values": new["values"].detach()} if "values" in new else {}
        if compares_batch(objective):
            none = {name: torch.zeros(n) for name in objective.prepares}
            old |= objective.of_batch(none, torch.ones(n), alone)
        policy.backward(objective.loss(new, old, float(n)).value)
    return _Slice(
        live.peak,
        calls,
        live.work,
        spent[0].forward if spent else Work(),
        cut.tokens if isinstance(cut, sequence.Cut) else 0,
    )


@contextmanager
def counted(module: nn.Module, live: LiveBytes) -> Generator[tuple[dict[bool, int], list[Spent]]]:
    """Count the module's forwards inside the block, with and without gradients, and the operators of the first two.
    Recomputed forwards (gradient checkpointing) count again."""
    calls, spent, begun, before = {False: 0, True: 0}, list[Spent](), list[Work](), [Work()]

    def count(*_: object) -> None:
        calls[torch.is_grad_enabled()] += 1
        if len(spent) < 2:
            begun.append(Work(live.work))

    def ended(*_: object) -> None:
        if begun:
            spent.append(Spent(live.work.since(begun.pop()), live.work.since(before[-1])))
            before.append(Work(live.work))

    handles = module.register_forward_pre_hook(count), module.register_forward_hook(ended)
    try:
        yield calls, spent
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def once(pipeline: Pipeline, live: LiveBytes) -> Generator[None]:
    """Inside the block, a forward of the policy without gradients runs once for each set of shapes.

    The denoising steps of a sample take the same memory, so one of them runs on fake tensors and the rest return empty
    tensors of the right shapes. Text has no such steps.
    """
    if pipeline.makes == "text":
        yield
        return
    module = pipeline.policy
    original = module.forward
    seen: dict[tuple[Hashable, ...], tuple[PyTree, int, Work]] = {}

    def forward(*args: object, **kwargs: object) -> object:
        if torch.is_grad_enabled():
            return original(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        key = tuple((x.shape, x.dtype) if isinstance(x, Tensor) else repr(x) for x in leaves)
        if key not in seen:
            before, highest, work = live.now, live.peak, Work(live.work)
            live.peak = before
            out = original(*args, **kwargs)
            working = live.peak - before
            live.peak = max(highest, live.peak)
            blanks = tree_map(lambda x: partial(x.new_empty(0).new_empty, x.shape) if isinstance(x, Tensor) else x, out)
            seen[key] = blanks, working, live.work.since(work)
            return out
        blanks, working, work = seen[key]
        live.again(working, work)
        return tree_map(lambda x: x() if isinstance(x, partial) else x, blanks)

    module.forward = forward
    try:
        yield
    finally:
        module.forward = original

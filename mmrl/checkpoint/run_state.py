"""Save the state of a run into a checkpoint and restore it, part by part, without knowing any part by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mmrl.checkpoint.writer import Saver
from mmrl.core import checkpoint_reader as reader
from mmrl.core.checkpoint_reader import Checkpoint, Saved, Stateful
from mmrl.core.json_types import Json
from mmrl.step.step_context import StepContext


def of_run(context: StepContext, step: int, others: Mapping[str, Stateful] | None = None, **state: Json) -> Checkpoint:
    """Everything that a run needs to continue after ``step`` finished steps: the trained models, the parts of the step,
    ``others``, and ``state``."""
    tensors: dict[str, dict[str, Tensor]] = {}
    numbers: dict[str, Json] = dict(state)
    own: set[str] = set()
    for name, part in {**context.trained, **context.rollout.parts, **(others or {})}.items():
        kept = part.state_dict()
        numbers[name] = kept.numbers
        tensors |= {file: dict(of) for file, of in kept.tensors.items()}
        if name in context.rollout.parts and context.rollout.parts[name].own:
            own |= kept.tensors.keys()
    return Checkpoint(step, tensors, numbers, frozenset(own))


def restore(context: StepContext, saved: Saved, others: Mapping[str, Stateful] | None = None) -> None:
    """Restore ``context`` and ``others`` from a checkpoint; a part that the checkpoint lacks starts from the beginning.

    Raises ``UserError`` if the checkpoint is of a different run.
    """
    restore_trained(context, saved)
    for name, part in context.rollout.parts.items():
        if name in saved.state:
            saved.into(name, lambda numbers, found, part=part: part.load_state_dict(numbers, found, context))
    for name, other in (others or {}).items():
        if name in saved.state:
            saved.into(name, other.load_state_dict)


def restore_trained(context: StepContext, saved: Saved) -> None:
    """Restore only the trained models, which every trainer has."""
    for name, policy in context.trained.items():
        saved.into(name, policy.load_state_dict)


def load_checkpoint(context: StepContext, checkpoints: Path, step: int) -> None:
    """Device task: load the checkpoint of ``step``, which the controller has checked."""
    restore_trained(context, reader.load(checkpoints, step))


def saver_of(context: StepContext, folder: Path) -> Saver:
    """The ``Saver`` of ``context`` into ``folder``. All ranks must call it together."""
    ranks = context.controller.peers.again("gloo") if context.policy.weights.in_shards else None
    each = context.controller.size > 1 and any(part.own for part in context.rollout.parts.values())
    gather = context.controller.gather if each else None
    return Saver(folder, context.recipe.checkpoint.keep, ranks, leads=context.controller.leads, gather=gather)

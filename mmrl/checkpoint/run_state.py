"""Save the state of a run into a checkpoint and restore it, part by part, without knowing any part by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from mmrl.checkpoint import reader
from mmrl.checkpoint.reader import Checkpoint, Saved, Stateful
from mmrl.checkpoint.writer import Saver
from mmrl.training.step_context import StepContext


def of_run(run: StepContext, step: int, others: Mapping[str, Stateful] | None = None, **state: Any) -> Checkpoint:
    """All that going on after ``step`` finished steps needs: what is trained, the parts of the step, ``others``, and
    ``state``."""
    tensors: dict[str, dict[str, Tensor]] = {}
    own: set[str] = set()
    for name, part in {**run.trained, **run.parts, **(others or {})}.items():
        kept = part.state_dict()
        state[name] = kept.numbers
        tensors |= {file: dict(of) for file, of in kept.tensors.items()}
        if name in run.parts and run.parts[name].own:
            own |= kept.tensors.keys()
    return Checkpoint(step, tensors, state, frozenset(own))


def restore(run: StepContext, saved: Saved, others: Mapping[str, Stateful] | None = None) -> None:
    """Bring ``run`` and ``others`` to where ``of_run`` left them; a part that the checkpoint does not know begins anew.

    Raises ``UserError`` where the checkpoint is of another run.
    """
    restore_trained(run, saved)
    for name, part in run.parts.items():
        if name in saved.state:
            part.load_state_dict(saved.state[name], saved, run)
    for name, other in (others or {}).items():
        if name in saved.state:
            other.load_state_dict(saved.state[name], saved)


def restore_trained(run: StepContext, saved: Saved) -> None:
    """As ``restore``, of what every device that trains has."""
    for name, policy in run.trained.items():
        policy.load_state_dict(saved.state[name], saved)


def take_up(run: StepContext, checkpoints: Path, step: int) -> None:
    """A device's task: take up the checkpoint of ``step``, which the controller found whole."""
    restore_trained(run, reader.load(checkpoints, step))


def saver_of(run: StepContext, folder: Path) -> Saver:
    """What saves ``run`` into ``folder``. All ranks must call it together."""
    ranks = run.controller.peers.again("gloo") if run.policy.weights.in_shards else None
    each = run.controller.size > 1 and any(part.own for part in run.parts.values())
    gather = run.controller.gather if each else None
    return Saver(folder, run.recipe.checkpoint.keep, ranks, run.controller.leads, gather)

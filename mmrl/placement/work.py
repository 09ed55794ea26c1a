"""What a device is asked to do, whichever process it is in: functions of the run as it stands there.

Samples and slices are computed by the same calls wherever they are computed; only who computes which differs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmrl.batch import Piece, Run
from mmrl.errors import NotFiniteError
from mmrl.out_of_memory import in_parts, in_phase
from mmrl.placement.utilisation import of_gpu
from mmrl.report.clock import Clock
from mmrl.rewards.calling import Answer
from mmrl.trajectory import Sample, SampleId, Slot, Trajectory

if TYPE_CHECKING:
    from mmrl.engines.policy import Version
    from mmrl.tally import Sums


@dataclass(frozen=True)
class Drawing:
    """How the micro-batches of a phase are sampled: ``actions`` as in ``Pipeline.sample``, under the copy ``weights``
    of the policy; ``inputs`` are what rewards see of a sample. ``step`` and ``round``: of training, that they are for;
    -1 outside it."""

    actions: Sequence[int]
    weights: str
    seed: int
    inputs: frozenset[str]
    evaluate: bool = False
    step: int = -1
    round: int = 0


def sample(
    run: Run, slots: Sequence[Slot], ids: Sequence[SampleId], how: Drawing, clock: Clock | None = None
) -> tuple[Trajectory, list[Sample]]:
    """Sample a micro-batch and decode it."""
    clock = clock or Clock(torch.device("cpu"))
    with run.policy.using(how.weights), torch.no_grad():
        with clock("sample"):
            run.pipeline.sync(run.policy)

            def drawn(rows: range) -> Trajectory:
                of = slots[rows.start : rows.stop], ids[rows.start : rows.stop]
                return run.pipeline.sample(*of, how.actions, how.seed, how.evaluate)

            parts = in_parts(run.at_once, "sample", len(ids), drawn, _begin_with_fewer(run))
            trajectory = parts[0] if len(parts) == 1 else Trajectory.join(parts)
        with clock("decode"):

            def shown(rows: range) -> list[Sample]:
                part = trajectory if len(rows) == len(trajectory) else trajectory.rows(list(rows))
                return run.pipeline.samples(part, how.inputs)

            shown_parts = in_parts(run.at_once, "decode", len(ids), shown, "sampling.batch_size={} begins so")
            return trajectory, [sample for part in shown_parts for sample in part]


def _begin_with_fewer(run: Run) -> str:
    """The edit that has sampling begin with the rows that there is memory for."""
    edit = "sampling.batch_size={} begins so"
    if run.recipe.model.dtype == "float32" or run.objective.kind != "policy_gradient":
        return edit
    dtype = run.recipe.model.dtype
    return f"{edit}; {dtype} rounds otherwise in training's larger batch, so lower train.micro_batch_size as well"


def go_on(run: Run, trajectory: Trajectory, most: int, how: Drawing) -> Trajectory:
    """Draw at most ``most`` further tokens for every row, all of them under way."""
    with run.policy.using(how.weights):
        run.pipeline.sync(run.policy)
        return run.pipeline.go_on(trajectory, most, how.seed)


def enter(run: Run, weights: str) -> None:
    """Begin a phase in which this device computes without the others, under the copy ``weights`` of the policy."""
    run.phase.enter_context(apart(run, weights))


@contextmanager
def apart(run: Run, weights: str) -> Iterator[None]:
    """Such a phase. Shards are gathered for it; where an engine samples it is given them one by one, and nothing stays
    gathered. All devices of all controllers enter and leave it together."""
    policy = run.policy
    if run.recipe.rollout.engine == "transformers" or not policy.weights.in_shards:
        with policy.alone(weights):
            yield
    else:
        with policy.using(weights):
            run.pipeline.sync(policy)
            yield


def leave(run: Run) -> None:
    """End that phase."""
    run.phase.close()


def score(run: Run, label: str, samples: Sequence[Sample], step: int) -> Answer:
    """One reward's answer for a batch, from its model on this device."""
    return run.rewards.answer(label, samples, step)


def prepare(
    run: Run, pieces: Iterable[Piece], wanted: frozenset[str]
) -> list[tuple[list[int], list[int], dict[str, Tensor]]]:
    """What is recomputed before the first update, with the rows of the batch and the entries that it is of."""
    pieces = list(pieces)
    calls = [wanted] if run.policy.weights.stages is None else [frozenset({name}) for name in sorted(wanted)]
    out = []
    with torch.no_grad():
        for names in calls:

            def made(piece: Piece, names: frozenset[str] = names) -> tuple[list[int], list[int], dict[str, Tensor]]:
                new = run.pipeline.replay(piece.rows, piece.entries, names, run.policy.using)
                kept = torch.stack([new[name] for name in names]).cpu()  # one wait for all
                return piece.index, piece.entries, dict(zip(names, kept, strict=True))

            out += run.policy.each(pieces, made)
    return out


def backward(run: Run, pieces: Iterable[Piece], total: float, step: int, first: bool) -> Sums:
    """The gradients of some slices of an update, added to those of this device."""
    from mmrl.loop import backward as slices_of_update

    return slices_of_update(run, pieces, total, step, first)


def apply(run: Run, spent: float) -> dict[str, float]:
    """The optimizer step, with the gradients of all devices of all controllers; ``spent`` as ``train_step`` has it."""
    run.policy.spent = spent
    metrics = run.policy.apply()
    if run.critic is None:
        return metrics
    run.critic.spent = spent
    try:
        return metrics | renamed(run.critic.apply())
    except NotFiniteError as error:
        raise NotFiniteError(f"the critic: {error}") from error


def move(run: Run, step: int) -> None:
    """The policy's copies, after the updates of a step."""
    for name, decay in run.objective.copies.items():
        if run.ahead is not None:
            run.policy.age(name, run.ahead.staleness)
        run.policy.move(name, decay(step))


def restore(run: Run, checkpoints: Path, step: int) -> None:
    """Take up the checkpoint of ``step``, which the controller found whole."""
    from mmrl import checkpoint

    found = checkpoint.load(checkpoints, step)
    assert found is not None
    checkpoint.restore_trained(run, found)


def version(run: Run, name: str, first: bool) -> Version | None:
    """The policy's copy ``name`` as it is now, of the ``first`` device that trains; the others do their part."""
    found = run.policy.version(name) if first or run.policy.weights.in_shards else None
    return found if first else None


def become(run: Run, version: Version) -> None:
    """Have the policy's weights of then, to sample with them."""
    run.policy.become(version)


def turn(run: Run, role: str, sleep: bool) -> bool:
    """Have ready on this device what ``role`` needs: the models that judge, or the engine that samples.

    ``sleep``: put the rest to sleep first. Returns whether something was started for good, which is no measure of what
    the next turn takes.
    """
    if sleep:
        if role != "judge":
            run.rewards.sleep()
        if role != "rollout":
            run.pipeline.sleep()
        if run.device.type == "cuda":
            torch.cuda.empty_cache()  # what is woken asks the driver for its memory, not torch
    if role == "judge":
        return run.rewards.wake()
    return role == "rollout" and run.pipeline.wake()


def ready(run: Run, role: str) -> None:
    """Nothing: the device has turned to ``role`` for it."""


def cpu_seconds(run: Run) -> float:
    """CPU time of this process so far."""
    return time.process_time()


def gpu(run: Run) -> float | None:
    """Share of the time since the last call in which this GPU computed; None where that is not known."""
    return of_gpu(run.device)


def renamed(critic: dict[str, float]) -> dict[str, float]:
    """The critic's metrics under names of their own."""
    return {name.replace("optim/", "value/"): value for name, value in critic.items()}


def perform(run: Run, name: str, arguments: tuple[Any, ...]) -> Any:
    """Call the function ``name`` of this module. Raises ``KeyError`` for another."""
    known = (
        sample,
        go_on,
        enter,
        leave,
        score,
        prepare,
        backward,
        apply,
        move,
        restore,
        version,
        become,
        turn,
        ready,
        cpu_seconds,
        gpu,
    )
    with in_phase(_PHASES.get(name, name)):
        return {f.__name__: f for f in known}[name](run, *arguments)


_PHASES = {"go_on": "sample", "enter": "sample", "score": "judge", "backward": "train", "apply": "optimizer"}
"""What the plan calls a phase in which a function is called, where that is not its name."""

"""Lend a device that trains: while it waits for the samples of a step, it samples or judges for that step itself.

It samples with the version of the weights that the step's other samples have. Its own weights, gradients and optimizer
stay where they are: for the time of a task the model's parameters point to the borrowed version, and back to their own
weights after it, also if the task fails.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from typing import Any

from mmrl.core.json_types import JsonObject, as_integer, as_number
from mmrl.models.policy import Version
from mmrl.placement import device_tasks
from mmrl.placement.device_shares import all_of
from mmrl.placement.scheduler import Scheduler
from mmrl.placement.task_queue import Task, TaskQueue
from mmrl.placement.tasks import LENT
from mmrl.step.step_context import StepContext

_DID = (("rollout", "sampled", "micro-batch", "micro-batches"), ("judge", "judged", "call", "calls"))


def borrow(context: StepContext, version: Version) -> None:
    """Have ``version`` on this device, beside its own weights, until ``give_back``; nothing is copied if they are the
    same."""
    policy = context.policy
    same = version.tag == policy.tag
    context.compute.local.borrowed = (
        None if same else (version.tag, {k: version.tensors[k].to(p.device) for k, p in policy.trainable.items()})
    )


def lent(context: StepContext, call: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    """Run a device task with the borrowed weights."""
    with _as_borrowed(context):
        return device_tasks.perform(context, call, arguments)


@contextmanager
def _as_borrowed(context: StepContext) -> Generator[None]:
    borrowed, policy = context.compute.local.borrowed, context.policy
    if borrowed is None:
        yield
        return
    tag, tensors = borrowed
    own = policy.tag
    policy.weights.swap(tensors)
    policy.updates, policy.active = tag
    try:
        yield
    finally:
        policy.weights.swap(tensors)
        policy.updates, policy.active = own


def give_back(context: StepContext) -> None:
    """Free the borrowed weights: the device trains next."""
    context.compute.local.borrowed = None


def for_lent(task: Task) -> Task:
    """``task`` as a device that trains runs it."""
    return Task(task.role, lent, (task.call, task.arguments), task.features)


def decision(step: int, lines: Sequence[JsonObject], trainers: int, scheduler: Scheduler[Any]) -> JsonObject:
    """A line of placement.jsonl: what the devices that train did while they waited for ``step`` (from 1).

    With it go the prices of a move in this process, by direction. ``lines``: of all controllers' devices in the step.
    """
    mine: dict[str, list[JsonObject]] = {role: [] for role in (*LENT, "wake")}
    for line in lines:
        if as_integer(line.get("device", trainers)) < trainers and line["role"] in mine:
            mine[str(line["role"])].append(line)
    devices = {(line["controller"], line["device"]) for role in LENT for line in mine[role]}
    did = [
        f"{verb} {len(mine[role])} {one if len(mine[role]) == 1 else several}"
        for role, verb, one, several in _DID
        if mine[role]
    ]
    why = "no device that trains was lent: none waited, or no move was worth its price"
    if did:
        plural = "s that train" if len(devices) > 1 else " that trains"
        why = f"{len(devices)} device{plural} {' and '.join(did)} while waiting"
    spent = {role: sum(as_number(line["ended"]) - as_number(line["began"]) for line in of) for role, of in mine.items()}
    numbers = {
        "sampling": spent["rollout"],
        "judging": spent["judge"],
        "moving": spent["wake"],
        "price_to_sample": scheduler.price("rollout"),
        "price_to_judge": scheduler.price("judge"),
        "price_back": scheduler.price("train"),
    }
    return {"step": step, "decision": why, "numbers": {name: round(value, 4) for name, value in numbers.items()}}


@contextmanager
def window(board: TaskQueue, step: int, trainers: range) -> Generator[None]:
    """Inside, the ``trainers`` may do what ``step`` waits for. Leaving it waits until all are back, with their own
    weights, whatever happened inside: a checkpoint may be saved next. Raises the error of a device that is lost."""
    board.tell(board.scheduler.lend, step)
    back: list[Future[Any]] = []
    try:
        yield
    finally:
        board.tell(board.scheduler.recall)
        back += [board.put(Task("train", give_back, (), device=device)) for device in trainers]
        wait(back)
    all_of(back)

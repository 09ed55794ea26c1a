"""Sample micro-batches that a controller's several devices claim one after another (``train.balance: moving``)."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from mmrl.core.clock import Clock
from mmrl.placement import device_tasks
from mmrl.placement.device_shares import features_of
from mmrl.placement.portions import ahead
from mmrl.placement.task_queue import Task, TaskQueue
from mmrl.step.step_context import ComingChunks, Drawn, SamplingSpec, StepContext


def drawn(
    board: TaskQueue, context: StepContext, coming: ComingChunks, how: SamplingSpec, clock: Clock
) -> Iterator[Drawn]:
    """Claim as many as the devices of ``board`` can work on, and more whenever something is sampled or judged; yields
    them as they finish."""
    running: dict[Future[Any], int] = {}
    number = 0
    while True:
        seen = board.finished
        coming.tell(*board.open_work())
        while len(running) < ahead(len(board.scheduler.roles)) and (chunk := next(coming, None)) is not None:
            answer = board.put(Task("rollout", device_tasks.sample, (chunk, how), features_of(context, chunk.slots)))
            answer.add_done_callback(lambda _: board.hear())
            running[answer] = number
            number += 1
            board.tell(board.scheduler.comes, coming.left)
            coming.tell(*board.open_work())
        board.tell(board.scheduler.comes, coming.left)
        ended = [answer for answer in running if answer.done()]
        for answer in ended:
            yield running.pop(answer), *answer.result()
        if ended:
            continue
        if not running and (coming.over or not board.at_work):
            return
        with clock("sample"):
            board.wait(seen)

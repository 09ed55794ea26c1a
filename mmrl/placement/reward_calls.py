"""How a controller of several devices calls the rewards: on devices that judge, or outside of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from mmrl.placement import device_tasks
from mmrl.placement.task_queue import Task, TaskQueue
from mmrl.placement.tasks import Call
from mmrl.rewards.calling import Calls
from mmrl.rewards.contract import Context
from mmrl.rewards.returned import Answer
from mmrl.trajectory import Sample

For = Callable[[Context], tuple[int, int] | None]
"""The step and round that samples are judged for, if that may be later than the step in training."""
_SHORT_S = 0.01
"""A shorter call is not recorded: it delays nothing."""


class OnDevices:
    """Final class: sends the calls of the reward ``label`` to the devices that judge."""

    def __init__(self, board: TaskQueue, label: str, of: For) -> None:
        self._board, self._label, self._for = board, label, of

    def submit(self, samples: Sequence[Sample], context: Context) -> Future[Answer]:
        asked = (self._label, list(samples), context.step)
        task = Task("judge", device_tasks.score, asked, of=self._for(context), judge=self._label)
        answer = self._board.put(task)
        answer.add_done_callback(lambda done: context.sent.update(_sent(done)))
        return answer

    def close(self) -> None:
        pass


class Outside:
    """Final class: the calls of a reward that computes outside of the devices, for example a judge behind HTTP. Each is
    recorded, so that the placement and the simulator know how long the samples wait for it."""

    def __init__(self, board: TaskQueue, calls: Calls, of: For) -> None:
        self._board, self._calls, self._for = board, calls, of

    def submit(self, samples: Sequence[Sample], context: Context) -> Future[Answer]:
        answer = self._calls.submit(samples, context)
        answer.add_done_callback(lambda done: self._record(done, context))
        return answer

    def close(self) -> None:
        self._calls.close()

    def _record(self, done: Future[Answer], context: Context) -> None:
        if done.cancelled() or done.exception():
            return
        answer, asked = done.result(), done.result().asked
        if answer.ended - answer.began >= _SHORT_S:
            call = Call(context.label, asked.requests, asked.seconds, asked.at_once)
            self._board.called(call, answer.began, answer.ended, self._for(context))


def _sent(answer: Future[Answer]) -> Counter[str]:
    return Counter() if answer.cancelled() or answer.exception() else answer.result().sent

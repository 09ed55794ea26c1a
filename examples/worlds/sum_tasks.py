"""A taskset of verifiers 0.4: sums, scored by the number behind ``answer:``."""

import random
import re
from collections.abc import Iterator

import verifiers.v1 as vf


class Sum(vf.TaskData):
    total: int


class Right(vf.Task[Sum, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(re.findall(r"answer: (-?\d+)", trace.last_reply)[-1:] == [str(self.data.total)])

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class Sums(vf.Taskset[Right, vf.TasksetConfig]):
    """As many as are asked for, the same in each process."""

    def load(self) -> Iterator[Right]:
        for n in range(10_000):
            numbers = random.Random(n).choices(range(2, 100), k=4)
            yield Right(Sum(prompt=f"Compute {'+'.join(map(str, numbers))}", total=sum(numbers)), self.config.task)

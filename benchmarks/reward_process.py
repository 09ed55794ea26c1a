"""Launches of small operators while a reward computes in Python: in a thread of this process, and in one of its own.

    python benchmarks/reward_process.py [--reward jpeg:compressibility] [--seconds 5] [--repeats 5]

What launches kernels on a GPU is one thread of Python, here a loop of small operators on the CPU. Prints their number
per second without a reward, with the reward as it is, and with ``process: true``: medians and quartiles of runs that
take turns. Also the batches that the reward scores meanwhile.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import torch
from PIL import Image
from stepping import quartiles

from mmrl.config.schema import Reward
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.scoring import RewardSet

PICTURES, SIZE = 16, 512


def samples() -> list[Sample]:
    """Pictures of noise, which take long to compress."""
    draw = torch.Generator().manual_seed(0)
    found = []
    for n in range(PICTURES):
        noise = torch.randint(256, (SIZE, SIZE, 3), generator=draw, dtype=torch.uint8)
        found.append(Sample(Prompt("p", "noise"), SampleId(0, 0, 0, n), image=Image.fromarray(noise.numpy()), text="a"))
    return found


def rate(seconds: float, rewards: RewardSet | None, given: list[Sample]) -> tuple[float, int]:
    """Operators a second, and the batches scored meanwhile."""
    ended, scored = threading.Event(), 0

    def score() -> None:
        nonlocal scored
        assert rewards is not None
        (caller,) = rewards._here.values()  # pyright: ignore[reportPrivateUsage]
        while not ended.is_set():
            answer = caller.one(given, Context(step=0, label="reward"))
            assert answer.error is None, answer.error
            scored += 1

    thread = threading.Thread(target=score)
    if rewards is not None:
        thread.start()
        time.sleep(0.5)
    one, before, count, began = torch.zeros(8), scored, 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        for _ in range(100):
            one.add_(1)
        count += 100
    took, batches = time.perf_counter() - began, scored - before
    ended.set()
    if rewards is not None:
        thread.join()
    return count / took, batches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reward", default="jpeg:compressibility")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    given = samples()
    ways = {"no reward": None, "in a thread": False, "in a process": True}
    sets = {k: None if v is None else RewardSet([Reward(name=asked.reward, process=v)]) for k, v in ways.items()}
    found: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
    for rewards in sets.values():  # once unmeasured: a process starts
        rate(1.0, rewards, given)
    for _ in range(asked.repeats):
        for name, rewards in sets.items():
            found[name].append(rate(asked.seconds, rewards, given))
    base = statistics.median(launches for launches, _ in found["no reward"])
    for name, rows in found.items():
        of = quartiles([launches for launches, _ in rows])
        low, middle, high = of["q1"], of["median"], of["q3"]
        batches = statistics.median(count for _, count in rows)
        print(
            f"{name:13} {middle:11,.0f} launches/s ({low:,.0f} to {high:,.0f}), {middle / base:.2f} of those without; "
            f"{batches:g} batches of {PICTURES}"
        )
    for rewards in sets.values():
        if rewards is not None:
            rewards.close()


if __name__ == "__main__":
    main()

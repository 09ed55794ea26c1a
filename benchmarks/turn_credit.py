"""Credit for turns beside credit for episodes: four digits to repeat, each turn with a reward of its own.

    python benchmarks/turn_credit.py --out DIR [--seeds 1 2 3] [--steps 20]

Both arms sample equally many episodes at the learning rate of the recipe ``sums``. Every turn asks for another
digit, which is its state, and nothing that a turn does changes those after it.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import time
from pathlib import Path

import mmrl
from mmrl.core.episode import Action, Observation
from mmrl.core.trajectory import Prompt

TURNS = 4


class Quiz:
    """Four numbers to repeat, one after another. A turn that begins with its number is given 1/4."""

    def reset(self, prompt: Prompt, seed: int) -> str:
        self.asked = random.Random(seed).sample(range(10), TURNS)
        self.at = 0
        return f"Compute {self.asked[0]}"

    def step(self, action: Action) -> Observation:
        found = re.match(r"\d+", action.text)
        reward = (found is not None and found[0] == str(self.asked[self.at])) / TURNS
        self.at += 1
        if self.at == TURNS:
            return Observation(reward=reward, done=True)
        return Observation(f"Compute {self.asked[self.at]}", reward=reward)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--arms", nargs="+", default=["credit: episode", "credit: turn"])
    arguments = parser.parse_args()
    for seed in arguments.seeds:
        for arm in arguments.arms:
            out = arguments.out / f"{re.sub('[^a-z0-9.]+', '-', arm)}-{seed}"
            began = time.process_time()
            mmrl.train("sums", changes=_changes(arm, seed, arguments.steps), out=out)
            took = time.process_time() - began
            rows = [json.loads(line) for line in (out / "heldout.jsonl").read_text().splitlines()]
            print(
                arm, seed, [round(row["reward/environment"], 3) for row in rows], f"{took:.0f} CPU-seconds", flush=True
            )


def _changes(arm: str, seed: int, steps: int) -> list[str]:
    return [
        f"environment={{name: {__file__}:Quiz, role: user, max_turns: {TURNS}, max_tokens: 96}}",
        "rewards=[{name: environment}]",
        "data={name: sums, train: {count: 600, operations: 1}, heldout: {count: 64, operations: 1}}",
        f"algorithm={{type: grpo, aggregation: token_mean, clip_high: 0.28, kl_coef: 0.0, {arm}}}",
        f"seed={seed}",
        f"train.steps={steps}",
        "train.prompts_per_step=12",
        "train.group_size=8",
        "sampling.max_new_tokens=4",
        f"eval={{every: {max(1, steps // 3)}, samples: 64}}",
        "optim.schedule=constant",
    ]


if __name__ == "__main__":
    main()

"""The cost in groups and the gain in rounds of several attempts at once: simulated dynamic sampling, no model.

    python benchmarks/dynamic_sampling.py

Each attempt's rewards differ with the chance ``valid``. ``one by one`` tries one attempt of every flat slot in a round;
``ahead`` is ``mmrl.rollout.dynamic_sampling`` once it has learned ``valid``; ``at once`` tries 1 / valid attempts of
every slot already in the first round, and of the flat ones after it. Means over the steps: rounds, and groups sampled
per slot.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable

from mmrl.rollout.dynamic_sampling import DynamicSampling

MOST = 10
Rule = Callable[[int, int], int]
"""How many attempts to try of a flat slot after so many rounds and attempts."""


def step(slots: int, valid: float, first: int, ahead: Rule, chance: random.Random) -> tuple[int, int]:
    """Rounds and groups of one step."""
    flat, rounds, groups, tried, more = slots, 0, 0, 0, first
    while flat and more:
        rounds += 1
        groups += flat * more
        tried += more
        flat = sum(all(chance.random() >= valid for _ in range(more)) for _ in range(flat))
        more = ahead(rounds, tried)
    return rounds, groups


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    print(f"{'valid':>5}  {'one by one':>14}  {'ahead':>14}  {'at once':>14}   (rounds, groups per slot)")
    for valid in (0.9, 0.7, 0.5, 0.35, 0.25, 0.1):
        attempts = DynamicSampling(MOST)
        attempts.valid = valid
        together = min(MOST, round(1 / valid))
        rules: list[tuple[int, Rule]] = [
            (1, lambda _, tried: min(1, MOST - tried)),
            (1, attempts.ahead),
            (together, lambda _, tried, together=together: min(together, MOST - tried)),
        ]
        line = f"{valid:5.2f}"
        for first, rule in rules:
            chance = random.Random(0)
            seen = [step(given.slots, valid, first, rule, chance) for _ in range(given.steps)]
            rounds, groups = (sum(column) / len(seen) for column in zip(*seen, strict=True))
            line += f"  {rounds:7.1f} {groups / given.slots:6.2f}"
        print(line)


if __name__ == "__main__":
    main()

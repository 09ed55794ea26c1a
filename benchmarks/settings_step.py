"""Measure the cost or gain of settings: whole steps of one recipe as given, and with overrides, in turn.

    OMP_NUM_THREADS=1 python benchmarks/settings_step.py shapes-full model.dtype=float32 \\
        --arm compiled performance.compile=true --arm "guided" sampling.guidance_scale=3.5 [--repeats 7]

``--arm NAME OVERRIDE ...``, as many as wanted, each a run of its own in one process. The first step of each is timed by
itself and left out of the figures, for it encodes, and compiles what is compiled. Ratios are taken within a repeat.
Rewards are the size of a JPEG, which takes no time, unless the overrides say otherwise.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Mapping, Sequence

from stepping import CPU, JPEG, Arm, Row, measure, say, spread

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core.clock import Clock
from mmrl.training.loop import train_step

GIVEN = "as given"


def steps_of(recipe: str, overrides: Sequence[str], metrics: list[dict[str, float]]) -> Arm:
    """Makes whole steps of the recipe and leaves their metrics; the first of all is number 0."""
    loaded = load_recipe([recipe], [JPEG, *overrides])
    run = build(loaded.recipe)

    def iterate(step: int, clock: Clock) -> None:
        metrics.append(train_step(run, len(metrics), clock)[0])

    return iterate


def lines(times: Mapping[str, list[Row]], metrics: Mapping[str, list[dict[str, float]]]) -> list[str]:
    """A line for each arm and phase: seconds, and over those as given."""
    made = []
    for name, rows in times.items():
        for phase in ("sample", "train", "total", "cpu"):
            over = [row[phase] / plain[phase] for row, plain in zip(rows, times[GIVEN], strict=True)]
            made.append(f"{name}, {phase}: {spread([row[phase] for row in rows])} s, {spread(over)} of those as given")
        norms, first = [row["optim/grad_norm"] for row in metrics[name]], metrics[name][0]
        made.append(f"{name}, gradient norms: {', '.join(f'{norm:.6g}' for norm in norms)}")
        if "policy/first_ratio_max_dev" in first:
            off = max(row["policy/first_ratio_max_dev"] for row in metrics[name])
            made.append(f"{name}, first ratios: off by at most {off:.1e}")
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", help="of all arms")
    parser.add_argument("--arm", nargs="+", action="append", default=[], metavar=("NAME", "OVERRIDE"))
    parser.add_argument("--repeats", type=int, default=7)
    given = parser.parse_args()
    words: dict[str, list[str]] = {GIVEN: [], **{name: more for name, *more in given.arm}}
    metrics: dict[str, list[dict[str, float]]] = {name: [] for name in words}
    arms = {name: steps_of(given.recipe, [*given.overrides, *more], metrics[name]) for name, more in words.items()}
    for name, arm in arms.items():
        started = time.perf_counter()
        arm(0, Clock(CPU))
        say(f"first step {name}: {time.perf_counter() - started:.1f} s")
    print("\n".join(lines(measure(arms, given.repeats), metrics)))


if __name__ == "__main__":
    main()

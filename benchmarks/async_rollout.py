"""Compare real steps that sample ahead with steps that sample and train in turn, and with the simulator.

    python benchmarks/async_rollout.py --json benchmarks/results/ahead_run.json

One controller with two devices trains ``sums`` and ``shapes-lora`` through ``mmrl train``: with ``colocate`` both
sample and then both train, with ``disaggregated`` one trains while the other samples. Whole runs take turns, since
samples of one step are drawn in another; the first steps of each, in which the pipeline fills, are left out. Rewards
are rules, so that two devices are enough: more than there are cores would take time from one another.

The prediction is the simulator's, of the work that the ``colocate`` run before recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from stepping import quartiles, say, spread

from mmrl.logging.environment import environment
from mmrl.logging.metrics import read
from mmrl.planner.simulator.simulate import Cluster, disaggregated
from mmrl.planner.simulator.trace_from_run import read_run

COMMON = ["devices_per_controller=2", "eval.every=null", "checkpoint.every=100", "train.max_cpu_seconds=null"]
RECIPES = {
    "sums": ["train.prompts_per_step=16", "train.group_size=8", "train.micro_batch_size=16", "sampling.batch_size=16"],
    "shapes-lora": ["train.prompts_per_step=8", "train.group_size=8", "train.micro_batch_size=8"],
}
PLACEMENTS = ("colocate", "disaggregated")
WARM = 3


def train(recipe: str, placement: str, steps: int, out: Path) -> list[float]:
    """Seconds of the steps of one run that are counted."""
    words = [recipe, *RECIPES[recipe], *COMMON, f"placement={placement}", f"train.steps={steps}", "--out", str(out)]
    command = [sys.executable, "-m", "mmrl.cli", "train", *words]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found = [row["time/step"] for row in read(out / "metrics.jsonl")]
    return found[WARM : steps - 1]  # in the last one nothing is sampled ahead


def benchmark(recipe: str, repeats: int, steps: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in PLACEMENTS}
    ratios, predictions = [], []
    for repeat in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            outs = {name: Path(folder) / name for name in PLACEMENTS}
            times = {name: train(recipe, name, steps, outs[name]) for name in PLACEMENTS}
            guess = disaggregated(read_run(outs["colocate"]).trace, Cluster(1, 2), 1, 0, 1).steps[WARM : steps - 1]
        medians = {name: quartiles(found)["median"] for name, found in times.items()}
        ratios.append(medians["disaggregated"] / medians["colocate"])
        predictions.append(quartiles(guess)["median"] / medians["disaggregated"])
        for name in PLACEMENTS:
            seconds[name] += times[name]
        say(f"{recipe}, repeat {repeat + 1} of {repeats}: {medians}")
    return {"seconds": seconds, "over colocate": ratios, "predicted over measured": predictions}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(RECIPES))
    parser.add_argument("--repeats", type=int, default=7, help="runs of each placement")
    parser.add_argument("--steps", type=int, default=10, help="of a run")
    parser.add_argument("--json", type=Path, help="write every single figure here")
    arguments = parser.parse_args(given)
    if len(os.sched_getaffinity(0)) < 2:
        parser.error("two devices need two cores")
    command = shlex.join(["python", "benchmarks/async_rollout.py", *(sys.argv[1:] if given is None else given)])
    result: dict[str, Any] = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "command": command}
    result["environment"] = environment()
    print(f"{result['date']}, `{command}`\n")
    print("| recipe | colocate, seconds a step | disaggregated | over colocate | predicted over measured |")
    print("|---|---|---|---|---|")
    for recipe in arguments.recipes:
        found = result[recipe] = benchmark(recipe, arguments.repeats, arguments.steps)
        cells = [spread(found["seconds"][name]) for name in PLACEMENTS]
        cells += [spread(found[key]) for key in ("over colocate", "predicted over measured")]
        print(f"| {recipe} | {' | '.join(cells)} |", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

"""Measure a reward that is hacked, with each guard: several seeds, held-out prompts.

    python benchmarks/reward_hacking.py --seeds 0 1 2 --jobs 2 --json benchmarks/results/reward_hacking.json

``shapes-draft`` follows a reward of a picture's mean colour alone, back-propagated through the sampler. ``success`` is
the verdict of the pixels' verifier on the same held-out samples, which training never asks: is it what the prompt said?

- naive: the recipe as it is.
- kl: ``algorithm.kl_coef``, the distance to the base model's velocity in the loss, at two weights.
- early stopping: ``eval.early_stopping`` on the verifier; the figures are those of the checkpoint it kept.
- hybrid: ``eval.tuned_fraction``, the last sampling steps by the base model; training is the naive run's.

Every run is resumable: what is finished is not done again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean
from typing import Any

from proof_shapes import train

from mmrl.logging.environment import environment
from mmrl.logging.metrics import read

ALL = ["eval.every=10", "eval.samples=128", "eval.grid=8", "checkpoint.keep=1"]
METRIC = "reward/shapes/success"
ARMS: dict[str, list[str]] = {
    "naive": [],
    "kl 0.005": ["algorithm.kl_coef=0.005"],
    "kl 0.02": ["algorithm.kl_coef=0.02"],
    "early stopping": [f"eval.early_stopping={{metric: {METRIC}, patience: 2}}"],
    "hybrid 0.8": ["eval.tuned_fraction=0.8"],
    "hybrid 0.5": ["eval.tuned_fraction=0.5"],
}


def trained(arm: str, seed: int, folder: Path, words: list[str]) -> dict[str, Any]:
    """What a run came to at both ends; of early stopping the end is its best checkpoint."""
    out = folder / f"{arm.replace(' ', '-')}-{seed}"
    if not (out / "report.html").exists():
        train("shapes-draft", seed, out, [*ALL, *ARMS[arm], *words])
        print(f"{out.name}: trained", file=sys.stderr, flush=True)
    rows, steps = read(out / "heldout.jsonl"), read(out / "metrics.jsonl")
    last = max(rows, key=lambda row: row[METRIC]) if arm == "early stopping" else rows[-1]
    return {
        "step": last["step"],
        "trained_steps": len(steps),
        "target": (rows[0]["reward/target"], last["reward/target"]),
        "success": (rows[0][METRIC], last[METRIC]),
        "cpu_seconds": steps[-1]["perf/cpu_seconds"],
    }


def table(found: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each arm: means over the seeds."""
    lines = [
        "| | reward before | reward after | success before | success after | of each seed | steps trained | CPU-s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for arm, runs in found.items():
        ends = [mean(run[key][end] for run in runs) for key in ("target", "success") for end in (0, 1)]
        each = ", ".join(f"{run['success'][1]:.3f}" for run in runs)
        steps, seconds = (mean(run[key] for run in runs) for key in ("trained_steps", "cpu_seconds"))
        lines.append(f"| {arm} | {' | '.join(f'{v:.3f}' for v in ends)} | {each} | {steps:.0f} | {seconds:.0f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="a.b=c, after those of the benchmark")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1)), help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/reward_hacking"), help="folder of the runs")
    parser.add_argument("--json", type=Path, help="write every single figure here")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    jobs = [(arm, seed) for seed in given.seeds for arm in given.arms]
    with ThreadPoolExecutor(given.jobs) as pool:
        results = dict(
            zip(jobs, pool.map(lambda job: trained(job[0], job[1], given.out, given.overrides), jobs), strict=True)
        )
    print(table({arm: [results[arm, seed] for seed in given.seeds] for arm in given.arms}))
    if given.json:
        rows = [{"arm": arm, "seed": seed, **run} for (arm, seed), run in results.items()]
        head = {"command": " ".join(sys.argv), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        given.json.write_text(json.dumps({**head, "environment": environment(), "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

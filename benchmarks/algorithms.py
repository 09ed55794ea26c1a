"""Compare every algorithm for pictures on the small model, with equal CPU-seconds, on held-out prompts.

    python benchmarks/algorithms.py --seeds 0 1 2 --jobs 2 --json benchmarks/results/algorithms.json

Trains all weights of ``shapes-full``'s model with ``mmrl train``, 120 CPU-seconds a run, in processes of their own, and
prints a table for each reward: ``verifier``, the strict verdict of the pixels' verifier, and ``colour``, which is
differentiable, so that pathwise algorithms can follow it too. A figure is of held-out prompts, which RL never samples.
What loses is shown as losing. ``--json`` gets each run's row as it ends, with its curve and the processor it ran on,
and runs that stand there are not done again: a command that was stopped goes on, elsewhere too, also with more seeds
or arms. Seeds are done one after another, each with every arm, so that what is compared ran on one machine. ``--png``
draws the curves.

Settings are the ones listed here and no paper's: on a model this small nobody has published any. The learning
rate is the recipe's for all; none was searched for. A step has the recipe's 144 pictures (pathwise: 16), for a gradient
of fewer is mostly noise, in float32, which any processor multiplies about equally well.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from threading import Lock
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from proof_shapes import train

from mmrl.logging.environment import environment
from mmrl.logging.metrics import read
from mmrl.report.curve import panel

ALL = [
    *("train.steps=400", "optim.schedule=constant", "optim.ema_decay=0.9", "model.dtype=float32"),
    *("train.prompts_per_step=12", "train.group_size=12", "train.micro_batch_size=48"),
    *("eval.every=6", "eval.samples=256", "eval.grid=4", "checkpoint.every=6", "checkpoint.keep=1"),
]
FAST = ["sampling.window={size: 2, last: 2}"]
CLEAN = ["sampling.window=null", "sampling.same_initial_noise=false"]
PATHWISE = [*CLEAN, "train.group_size=1", "train.prompts_per_step=16", "train.micro_batch_size=16", "eval.every=20"]


def stepwise(kind: str, *more: str) -> list[str]:
    """Overrides of a policy gradient over denoising steps."""
    return [f"algorithm={{type: {kind}, kl_coef: 0.0}}", *more]


ARMS: dict[str, list[str]] = {
    "flow_grpo, a window of 2": stepwise("flow_grpo", *FAST, "algorithm.clip_range=1e-3"),
    "flow_grpo, every step": stepwise("flow_grpo", "sampling.window=null", "algorithm.clip_range=1e-3"),
    "flow_grpo, CPS": stepwise("flow_grpo", *FAST, "algorithm.clip_range=1e-3", "sampling.sde={kind: cps}"),
    "DanceGRPO": stepwise(
        "flow_grpo",
        *("sampling.window=null", "sampling.sde={kind: dance, noise_level: 0.6}"),
        *("algorithm.trained_steps=4", "algorithm.clip_range=1e-3"),
    ),
    "DDPO, 4 of its steps": stepwise(
        "flow_grpo",
        *("sampling.window={size: 6, last: 6}", "sampling.sde={kind: ddim, noise_level: 1.0}"),
        *("sampling.same_initial_noise=false", "algorithm.trained_steps=4"),
        *("algorithm.clip_range=1e-3", "algorithm.advantage_std=group"),
    ),
    "MixGRPO": stepwise(
        "flow_grpo", "sampling.window={size: 2, strategy: progressive, every: 4}", "algorithm.clip_range=1e-3"
    ),
    "TempFlow weights": stepwise("flow_grpo", *FAST, "algorithm.clip_range=1e-3", "algorithm.step_weight=tempflow"),
    "Flash weights": stepwise("flow_grpo", *FAST, "algorithm.clip_range=1e-3", "algorithm.step_weight=flash"),
    "flow_grpo, 12 of 24 kept": stepwise(
        "flow_grpo", *FAST, "algorithm.clip_range=1e-3", "midway={step: 3, group_size: 24}"
    ),
    "flow_grpo, 6 of 12 kept": stepwise(
        "flow_grpo", *FAST, "algorithm.clip_range=1e-3", "midway={step: 3, group_size: 12}", "train.group_size=6"
    ),
    "grpo_guard": stepwise("grpo_guard", *FAST, "algorithm.clip_range=1e-3"),
    "stepwise_flow_grpo": stepwise("stepwise_flow_grpo", *FAST, "algorithm.clip_range=1e-3", "algorithm.centre=step"),
    "flow_dppo": stepwise("flow_dppo", *FAST),
    "diffusion_nft": ["algorithm={type: diffusion_nft, noise_levels: 2}", *CLEAN],
    "diffusion_nft, 12 of 24 kept": [
        *("algorithm={type: diffusion_nft, noise_levels: 2}", *CLEAN, "midway={step: 3, group_size: 24}"),
    ],
    "awm": ["algorithm={type: awm, noise_levels: 2}", *CLEAN],
    "dgpo": ["algorithm={type: dgpo, noise_levels: 2}", *CLEAN],
    "v_grpo": ["algorithm={type: v_grpo, noise_levels: 2}", *CLEAN],
    "crd": ["algorithm={type: crd, noise_levels: 2}", *CLEAN],
    "diffusion_dpo": ["algorithm={type: diffusion_dpo, noise_levels: 2}", *CLEAN],
    "rwr": ["algorithm={type: rwr, noise_levels: 2}", *CLEAN],
    "draft, last step": ["algorithm={type: draft}", *PATHWISE],
    "draft, last 2 steps": ["algorithm={type: draft, last_steps: 2}", *PATHWISE],
    "DRaFT-LV": ["algorithm={type: draft, renoise: 2}", *PATHWISE],
    "refl": ["algorithm={type: refl}", *PATHWISE],
    "alignprop": ["algorithm={type: alignprop}", *PATHWISE],
    "srpo": ["algorithm={type: srpo}", *PATHWISE],
}
REWARDS = {
    "verifier": ("shapes/success", []),
    "colour": (
        "target",
        ["rewards=[{name: 'colour:target', options: {rgb: [60, 95, 235]}}]", "eval.rewards=[{name: shapes}]"],
    ),
}
"""The held-out metric after ``reward/``, and the overrides."""


def overrides(arm: str, reward: str, seconds: float, more: list[str]) -> list[str]:
    """The words of ``mmrl train shapes-full`` for this arm."""
    return [*ALL, f"train.max_cpu_seconds={seconds:g}", *ARMS[arm], *REWARDS[reward][1], *more]


def trained(arm: str, reward: str, seed: int, folder: Path, words: list[str]) -> dict[str, Any]:
    """What a run came to, trained as far as it was not: steps, seconds, and the held-out figures along the way."""
    out = folder / f"{reward}-{arm.replace(',', '').replace(' ', '-')}-{seed}"
    if not (out / "report.html").exists():
        train("shapes-full", seed, out, words)
        print(f"{out.name}: trained", file=sys.stderr, flush=True)
    key, steps, rows = f"reward/{REWARDS[reward][0]}", read(out / "metrics.jsonl"), read(out / "heldout.jsonl")
    spent = {0: 0.0} | {row["step"]: row["perf/cpu_seconds"] for row in steps}
    return {
        "before": rows[0][key],
        "after": rows[-1][key],
        "verifier": (rows[0]["reward/shapes/success"], rows[-1]["reward/shapes/success"]),
        "curve": [(row["step"], spent[row["step"]], row[key], row["reward/shapes/success"]) for row in rows],
        "steps": len(steps),
        "cpu_seconds": steps[-1]["perf/cpu_seconds"],
        "machine": machine(),
    }


def machine() -> dict[str, Any]:
    """What CPU-seconds are of."""
    full: Any = environment()
    return {"cpu": full["cpu"]["name"], "torch": full["versions"]["torch"], "git": full["git"]}


class Rows:
    """Final class: the rows of runs that ended, kept in a file of JSON as each ends; ``path`` None: nowhere."""

    def __init__(self, path: Path | None) -> None:
        self.path, self._lock = path, Lock()
        self.known: list[dict[str, Any]] = json.loads(path.read_text())["runs"] if path and path.exists() else []

    def get(self, arm: str, reward: str, seed: int, words: list[str]) -> dict[str, Any] | None:
        """The row of this very run."""
        wanted = {"arm": arm, "reward": reward, "seed": seed, "words": words}
        return next((row for row in self.known if {k: row[k] for k in wanted} == wanted), None)

    def add(self, row: dict[str, Any]) -> None:
        with self._lock:
            self.known.append(row)
            if self.path is not None:
                head = {"command": " ".join(sys.argv), "date": datetime.now(UTC).isoformat(timespec="seconds")}
                self.path.write_text(json.dumps({**head, "runs": self.known}, indent=1) + "\n")


def table(reward: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """A row for each arm, those that rose most first."""
    lines = [
        f"## {reward}: held-out `{REWARDS[reward][0]}`",
        "",
        "| algorithm | before | after, mean (std over seeds) | rise | of each seed | verifier after | steps | CPU-s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    rises = {arm: [run["after"] - run["before"] for run in runs] for arm, runs in found.items()}
    for arm in sorted(found, key=lambda arm: -mean(rises[arm])):
        runs, after = found[arm], [run["after"] for run in found[arm]]
        spread = f" ({stdev(after):.3f})" if len(after) > 1 else ""
        each = ", ".join(f"{rise:+.3f}" for rise in rises[arm])
        lines.append(
            f"| {arm} | {mean(r['before'] for r in runs):.3f} | {mean(after):.3f}{spread} | {mean(rises[arm]):+.3f} | "
            f"{each} | {mean(r['verifier'][1] for r in runs):.3f} | {mean(r['steps'] for r in runs):.0f} | "
            f"{mean(r['cpu_seconds'] for r in runs):.0f} |"
        )
    return "\n".join(lines)


def mean_curve(curves: list[dict[float, float]]) -> dict[float, float]:
    """The mean at equal shares of each curve's seconds, so that it ends with the mean of their ends."""
    ends, made = [max(curve) for curve in curves], {}
    for share in (0, 0.25, 0.5, 0.75, 1):
        at = [float(np.interp(share * end, list(c), list(c.values()))) for c, end in zip(curves, ends, strict=True)]
        made[share * mean(ends)] = mean(at)
    return made


def grid_png(by_reward: dict[str, dict[str, list[dict[str, Any]]]], out: Path) -> None:
    """A panel for each arm under each reward over CPU-seconds, its seeds thin and their mean bold; one scale for each
    reward, those that rose most first."""
    (width, height), across, head, parts = (300, 190), 4, 44, []
    for reward, found in by_reward.items():
        curves = {arm: [{spent: value for _, spent, value, _ in run["curve"]} for run in r] for arm, r in found.items()}
        values = [value for runs in curves.values() for curve in runs for value in curve.values()]
        rises = {arm: mean(run["after"] - run["before"] for run in runs) for arm, runs in found.items()}
        part = Image.new("RGB", (width * across, head + height * -(-len(curves) // across)), "#fafaf8")
        title = f"{reward}: held-out {REWARDS[reward][0]} over CPU-seconds of training"
        ImageDraw.Draw(part).text((16, 16), title, fill="#1c1c1e", font=ImageFont.load_default(size=18))
        for n, arm in enumerate(sorted(curves, key=lambda arm: -rises[arm])):
            drawn = panel(curves[arm], mean_curve(curves[arm]), arm, (width, height), (min(values), max(values)))
            part.paste(drawn, (n % across * width, head + n // across * height))
        parts.append(part)
    sheet = Image.new("RGB", (width * across, sum(part.height for part in parts)))
    for n, part in enumerate(parts):
        sheet.paste(part, (0, sum(above.height for above in parts[:n])))
    sheet.save(out, optimize=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="a.b=c, after those of the benchmark")
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=120.0, help="CPU-seconds of a run")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1)), help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"), help="folder of the runs")
    parser.add_argument(
        "--json", type=Path, help="keep every single figure here, and do not run again what stands there"
    )
    parser.add_argument("--png", type=Path, help="draw the curves here")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    jobs = [
        (arm, reward, seed)
        for seed in given.seeds
        for reward in given.rewards
        for arm in given.arms
        if reward == "colour" or ARMS[arm][-len(PATHWISE) :] != PATHWISE
    ]

    kept = Rows(given.json)

    def one(job: tuple[str, str, int]) -> dict[str, Any] | None:
        words = overrides(*job[:2], given.seconds, given.overrides)
        if (row := kept.get(*job, words)) is None:
            try:
                found = trained(*job, given.out, words)
            except subprocess.CalledProcessError:  # the others go on
                print(f"{', '.join(map(str, job))}: failed, see its log under {given.out}", file=sys.stderr, flush=True)
                return None
            row = {"arm": job[0], "reward": job[1], "seed": job[2], "words": words, **found}
            kept.add(row)
        return row

    with ThreadPoolExecutor(given.jobs) as pool:
        found = dict(zip(jobs, pool.map(one, jobs), strict=True))
    results = {job: row for job, row in found.items() if row is not None}
    if len(results) < len(jobs):
        raise SystemExit(f"{len(jobs) - len(results)} of {len(jobs)} runs failed; the same command tries them again")
    by_reward = {
        reward: {
            arm: [results[arm, reward, seed] for seed in given.seeds]
            for arm in given.arms
            if (arm, reward, given.seeds[0]) in results
        }
        for reward in given.rewards
    }
    for reward, found in by_reward.items():
        print(table(reward, found), end="\n\n")
    if given.png:
        grid_png(by_reward, given.png)


if __name__ == "__main__":
    main()

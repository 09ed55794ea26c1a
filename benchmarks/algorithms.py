"""Every algorithm for pictures on the small model, the same CPU-seconds each: what each one makes of held-out prompts.

    python benchmarks/algorithms.py --seeds 0 1 2 --jobs 2 --json benchmarks/results/algorithms.json

Trains all weights of ``shapes-full``'s model with ``mmrl train``, 120 CPU-seconds a run, in processes of their own, and
prints a table for each reward: ``verifier``, the strict verdict of the pixels' verifier, and ``colour``, which is
differentiable, so that pathwise algorithms can follow it too. A figure is of held-out prompts, which RL never samples.
What loses is shown as losing. A command that was stopped goes on where it was, also with more seeds or arms.

Settings are the ones listed here and no paper's: on a model this small nobody has published any. Learning rates are
those of the recipes, one for each kind of objective; none was searched for.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from proof_shapes import train

from mmrl.report.environment import environment
from mmrl.report.metrics import read

ALL = [
    *("train.steps=400", "optim.schedule=constant", "optim.ema_decay=0.9"),
    *("eval.every=400", "eval.samples=512", "eval.grid=4", "checkpoint.every=20", "checkpoint.keep=1"),
]
FAST = ["sampling.window={size: 2, last: 2}"]
CLEAN = ["sampling.window=null", "sampling.same_initial_noise=false"]
PATHWISE = [*CLEAN, "train.group_size=1", "train.prompts_per_step=16", "train.micro_batch_size=16"]


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
    "MixGRPO": stepwise(
        "flow_grpo", "sampling.window={size: 2, strategy: progressive, every: 4}", "algorithm.clip_range=1e-3"
    ),
    "TempFlow weights": stepwise("flow_grpo", *FAST, "algorithm.clip_range=1e-3", "algorithm.step_weight=tempflow"),
    "Flash weights": stepwise("flow_grpo", *FAST, "algorithm.clip_range=1e-3", "algorithm.step_weight=flash"),
    "grpo_guard": stepwise("grpo_guard", *FAST, "algorithm.clip_range=1e-3"),
    "flow_dppo": stepwise("flow_dppo", *FAST),
    "diffusion_nft": ["algorithm={type: diffusion_nft, noise_levels: 2}", *CLEAN],
    "awm": ["algorithm={type: awm, noise_levels: 2}", *CLEAN],
    "dgpo": ["algorithm={type: dgpo, noise_levels: 2}", *CLEAN],
    "diffusion_dpo": ["algorithm={type: diffusion_dpo, noise_levels: 2}", *CLEAN],
    "rwr": ["algorithm={type: rwr, noise_levels: 2}", *CLEAN],
    "draft, last step": ["algorithm={type: draft}", *PATHWISE],
    "draft, last 2 steps": ["algorithm={type: draft, last_steps: 2}", *PATHWISE],
    "DRaFT-LV": ["algorithm={type: draft, renoise: 2}", *PATHWISE],
    "refl": ["algorithm={type: refl}", *PATHWISE],
    "alignprop": ["algorithm={type: alignprop}", *PATHWISE],
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
    """What a run came to, trained as far as it was not: steps, seconds, and the held-out figure at both ends."""
    out = folder / f"{reward}-{arm.replace(',', '').replace(' ', '-')}-{seed}"
    rows = read(out / "heldout.jsonl") if (out / "heldout.jsonl").exists() else []
    if len(rows) < 2:
        train("shapes-full", seed, out, words)
        rows = read(out / "heldout.jsonl")
        print(f"{out.name}: trained", file=sys.stderr, flush=True)
    key, steps = f"reward/{REWARDS[reward][0]}", read(out / "metrics.jsonl")
    return {
        "before": rows[0][key],
        "after": rows[-1][key],
        "verifier": (rows[0]["reward/shapes/success"], rows[-1]["reward/shapes/success"]),
        "steps": len(steps),
        "cpu_seconds": steps[-1]["perf/cpu_seconds"],
    }


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="a.b=c, after those of the benchmark")
    parser.add_argument("--rewards", nargs="+", choices=REWARDS, default=list(REWARDS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=120.0, help="CPU-seconds of a run")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1)), help="runs at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/algorithms"), help="folder of the runs")
    parser.add_argument("--json", type=Path, help="write every single figure here")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    jobs = [
        (arm, reward, seed)
        for seed in given.seeds
        for reward in given.rewards
        for arm in given.arms
        if reward == "colour" or ARMS[arm][-len(PATHWISE) :] != PATHWISE
    ]

    def one(job: tuple[str, str, int]) -> dict[str, Any]:
        return trained(*job, given.out, overrides(*job[:2], given.seconds, given.overrides))

    with ThreadPoolExecutor(given.jobs) as pool:
        results = dict(zip(jobs, pool.map(one, jobs), strict=True))
    for reward in given.rewards:
        arms = [arm for arm in given.arms if (arm, reward, given.seeds[0]) in results]
        print(table(reward, {arm: [results[arm, reward, seed] for seed in given.seeds] for arm in arms}), end="\n\n")
    if given.json:
        rows = [{"arm": a, "reward": r, "seed": s, **run} for (a, r, s), run in results.items()]
        head = {"command": " ".join(sys.argv), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        given.json.write_text(json.dumps({**head, "environment": environment(), "runs": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

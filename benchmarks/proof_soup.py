"""Is a Bone Soup a better slider between two rewards than Rewarded Soup, and what does it cost beside one training?

    python benchmarks/proof_soup.py --job sums --seeds 0 1 2 --json benchmarks/results/proof_soup.json

Jobs, each a shipped recipe with small steps: ``sums`` (the language model that calculates: right against short),
``scenes`` (the model that answers questions about pictures: right against brief) and ``shapes`` (the picture model: the
verifier against red). Of each seed five runs are trained, with the same steps,
rate, prompts and noise: two backbones of a Bone Soup (``--beta``), two of a Rewarded Soup (beta 1), and one on the
equal mix. Then merges for the preferences 0, 0.25, 0.5, 0.75 and 1 of the first reward are measured, on the same
held-out prompts with the same noise:

- bone soup: lambda = B^-1 mu; bone soup, inside: the same with ``--no-extrapolate``.
- rewarded soup: the backbones of beta 1 with lambda = mu.
- mix: the one run, whatever is preferred; backbone of R: one backbone of the Bone Soup; base: the untrained model.

The weight of a reward in the job is its unit, chosen so that both spread alike among samples of the base model: with
equal weights ``short`` is too small to change what a backbone learns. All measures are in units.

Hypervolume: above one point for all models of a seed, the worst value of each reward among them. Controllability: the
share of neighbouring preferences whose rewards move as asked. Sparsity: the mean squared gap on the front. Utility: the
mean over the preferences of ``mu r``, which is what Theorem 1 of the paper compares.

Every run is resumable: what is finished is not done again. ``--json`` gets each seed as it is measured.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
REWARDS = ROOT / "benchmarks/soup_rewards.py"
POINTS = (0.0, 0.25, 0.5, 0.75, 1.0)
BONE, INSIDE, REWARDED, MIX, BASE = "bone soup", "bone soup, inside", "rewarded soup", "mix", "base"
JOBS: Mapping[str, tuple[str, ...]] = {
    "sums": (
        "sums",
        "rewards=[{name: answer:number, label: right, options: {after: 'answer:'}}, "
        f"{{name: '{REWARDS}:short', weight: 4}}]",
        "train.prompts_per_step=16",
        "train.group_size=8",
        "train.micro_batch_size=128",
        "train.steps=16",
        "optim.schedule=constant",
        "optim.lr=2e-4",
    ),
    "scenes": (
        "scenes",
        f"rewards=[{{name: 'answer:exact', label: right}}, {{name: '{REWARDS}:brief', weight: 2}}]",
        "train.prompts_per_step=16",
        "train.group_size=8",
        "train.micro_batch_size=64",
        "train.steps=24",
        "optim.schedule=constant",
        "optim.lr=2e-4",
    ),
    "shapes": (
        "shapes-lora",
        f"rewards=[{{name: shapes}}, {{name: '{REWARDS}:red', weight: 8}}]",
        "sampling.steps=6",
        "train.prompts_per_step=8",
        "train.group_size=8",
        "train.micro_batch_size=64",
        "train.steps=18",
        "optim.schedule=constant",
        "optim.ema_decay=null",
    ),
}
SAMPLES = {"sums": 384, "scenes": 512, "shapes": 192}


# -- runs --------------------------------------------------------------------------------------------------------------


def trained(given: argparse.Namespace, seed: int) -> dict[str, Path]:
    """The two soups and the run on the mix of a seed; what is not finished is trained, in processes of their own."""
    work = given.work.resolve() / given.job
    work.mkdir(parents=True, exist_ok=True)
    recipe, *own = JOBS[given.job]
    changes = [*own, f"seed={seed}", "eval.every=null", "checkpoint.every=10000", "train.max_cpu_seconds=null"]
    changes += given.overrides
    found = {"bone": work / f"bone-{given.beta:g}-{seed}", "rewarded": work / f"rewarded-{seed}"}
    for name, beta in (("bone", given.beta), ("rewarded", 1.0)):
        resume = ["--resume"] if (found[name] / "soup.json").exists() else []
        words = ["soup", "train", recipe, *changes, "--out", str(found[name]), "--beta", str(beta), *resume]
        command(words, work / f"{found[name].name}.log")
    found["mix"] = work / f"mix-{seed}"
    units = json.loads((found["bone"] / "soup.json").read_text())["units"]
    resume = ["--resume"] if (found["mix"] / "resolved.json").exists() else []
    halves = [f"rewards[{i}].weight={unit / 2:g}" for i, unit in enumerate(units)]
    command(["train", recipe, *changes, *halves, "--out", str(found["mix"]), *resume], work / f"mix-{seed}.log")
    return found


def command(words: Sequence[str], log: Path) -> None:
    """``mmrl`` in a process of its own, one thread."""
    with log.open("a") as file:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "mmrl.cli", *words], check=True, stdout=file, stderr=file, env=env)


def measured(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """All models of a seed, with their held-out rewards."""
    from mmrl.logging.metrics import read
    from mmrl.studies.soup.evaluation import measuring
    from mmrl.studies.soup.formulas import merging_weights
    from mmrl.studies.soup.record import read_soup

    paths = trained(given, seed)
    samples = given.samples or SAMPLES[given.job]
    models = []

    def add(arm: str, mu: float | None, rewards: Sequence[float], weights: Sequence[float] | None = None) -> None:
        models.append({"arm": arm, "mu": mu, "lambda": weights, "rewards": list(rewards)})

    bone, rewarded = read_soup(paths["bone"]), read_soup(paths["rewarded"])
    with measuring(bone, samples) as measure:
        for arm, outside in ((BONE, True), (INSIDE, False)):
            for mu in POINTS:
                weights = merging_weights(bone.matrix, (mu, 1 - mu), extrapolate=outside)
                add(arm, mu, measure((mu, 1 - mu), weights).rewards, weights)
        for label, weights in zip(bone.rewards, ((1.0, 0.0), (0.0, 1.0)), strict=True):
            add(f"backbone of {label}", None, measure(weights, weights).rewards)
    with measuring(rewarded, samples) as measure:
        for mu in POINTS:
            weights = merging_weights(rewarded.matrix, (mu, 1 - mu))
            add(REWARDED, mu, measure((mu, 1 - mu), weights).rewards, weights)
    for arm, which in ((MIX, "latest"), (BASE, "base")):
        add(arm, None, alone(paths["mix"], which, bone.rewards, samples))
    runs = [*bone.backbones, *rewarded.backbones, paths["mix"]]
    rows = [read(run / "metrics.jsonl")[-1] for run in runs]
    return {
        "rewards": bone.rewards,
        "units": bone.units,
        "samples": samples,
        "steps": [len(read(run / "metrics.jsonl")) for run in runs],
        "cpu_seconds": [round(row["perf/cpu_seconds"], 1) for row in rows],
        "models": models,
    }


def alone(out: Path, which: str, labels: Sequence[str], samples: int) -> tuple[float, float]:
    """The rewards of a checkpoint of an ordinary run."""
    from mmrl.app.build import restored
    from mmrl.data.loading import load_prompts
    from mmrl.studies.soup.evaluation import rewards_of
    from mmrl.training.evaluation import Evaluator

    run, _, _ = restored(out, which)
    try:
        return rewards_of(Evaluator(run, load_prompts(run.recipe, "heldout")), labels, samples)
    finally:
        run.pipeline.close()
        run.compute.devices.close()


# -- the table ---------------------------------------------------------------------------------------------------------


def figures(seed: Mapping[str, Any]) -> dict[str, dict[str, float | None]]:
    """The measures of each arm of a seed, by arm; null where one model has none."""
    from mmrl.studies.soup.formulas import controllability, hypervolume, sparsity

    models, units = seed["models"], seed["units"]
    points = [(units[0] * one["rewards"][0], units[1] * one["rewards"][1]) for one in models]
    reference = min(p[0] for p in points), min(p[1] for p in points)
    found = {}
    for arm in dict.fromkeys(one["arm"] for one in models):
        own = [(one["mu"], p) for one, p in zip(models, points, strict=True) if one["arm"] == arm]
        asked = own if own[0][0] is not None else [(mu, own[0][1]) for mu in POINTS]
        front = [p for _, p in own]
        row = {
            "hypervolume": hypervolume(front, reference),
            "controllability": controllability(front),
            "sparsity": sparsity(front),
            "utility": mean(mu * x + (1 - mu) * y for mu, (x, y) in asked),
        }
        found[arm] = {name: value if math.isfinite(value) else None for name, value in row.items()}
    return found


def table(seeds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table: a row for each arm, with the mean over the seeds, their least and their most."""
    rows = [figures(one) for one in seeds]
    names = list(next(iter(rows[0].values())))
    lines = [f"| | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    lines += [f"| {arm} | {' | '.join(cell([of[arm][name] for of in rows]) for name in names)} |" for arm in rows[0]]
    return lines


def cell(values: Sequence[float | None]) -> str:
    """The mean, with the least and the most of several; a dash where there is no value."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    spread = f" ({min(known):.4g} to {max(known):.4g})" if len(known) > 1 else ""
    return f"{mean(known):.4g}{spread}"


def rewards(seeds: Sequence[Mapping[str, Any]]) -> list[str]:
    """Lines of a table: the mean rewards of each model over the seeds."""
    lines = [f"| model | preference | {' | '.join(seeds[0]['rewards'])} |", "|---|---|---|---|"]
    for row in zip(*(one["models"] for one in seeds), strict=True):
        cells = [cell([one["rewards"][i] for one in row]) for i in (0, 1)]
        mu = "-" if row[0]["mu"] is None else f"{row[0]['mu']:g}"
        lines.append(f"| {row[0]['arm']} | {mu} | {' | '.join(cells)} |")
    return lines


def of(given: argparse.Namespace, seed: int) -> dict[str, Any]:
    """The result of a seed, from the file or, where it is not there, measured now."""
    rows = json.loads(given.json.read_text()) if given.json.exists() else {}
    key = ", ".join([f"{given.job}, seed {seed}, beta {given.beta:g}", *given.overrides])
    if key not in rows:
        rows[key] = measured(given, seed)
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps(rows, indent=1) + "\n")
    return rows[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="a.b=c, after those of the job; give --work another folder too")
    parser.add_argument("--job", choices=JOBS, default="sums")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--beta", type=float, default=0.7)
    parser.add_argument("--samples", type=int, help="held-out samples of each model; sums 384, shapes 192")
    parser.add_argument("--work", type=Path, default=Path("runs/proof_soup"), help="where runs are kept")
    parser.add_argument("--json", type=Path, required=True, help="where results are kept")
    given = parser.parse_intermixed_args()
    found = [of(given, seed) for seed in given.seeds]
    print("\n".join([*table(found), "", *rewards(found)]))


if __name__ == "__main__":
    main()

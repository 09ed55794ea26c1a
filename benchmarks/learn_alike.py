"""Compare learning curves of two controllers with two devices each with those of one device, over seeds.

    python benchmarks/learn_alike.py --json benchmarks/results/learn_alike.json

Trains each recipe in both forms with ``mmrl train``, in processes of their own, and compares what is measured on
held-out prompts, which RL never samples, at every evaluation. A seed has the same prompts and noise in both forms;
floats part in the last digits, and after some updates samples with them. Printed are

- the difference of the forms, mean over seeds and its standard error, beside the standard deviation over seeds,
- whether the largest mean difference lies within the seeds' spread: the standard deviation over seeds, root mean square
  over both forms and all evaluations past the first; and beside it by how much two means of as many seeds of one form
  differ by chance (1.96 standard errors), for the largest of several differences passes a standard deviation easily,
- the rise over the run with its standard error, and what the judge itself says of the held-out samples.

A command that was stopped goes on where it was, also with more seeds: what is finished under ``--out`` is not done
again. Seeds come one after another, and the tables and the JSON are written after each.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise, takewhile
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from proof_shapes import train

from mmrl.logging.environment import environment
from mmrl.logging.metrics import read
from mmrl.logging.rundir import RunDir

Curve = dict[int, float]
"""A held-out figure by training step."""


@dataclass(frozen=True)
class Job:
    """What is compared of a recipe: held-out metrics after ``reward/``, and the overrides of both forms."""

    measure: str
    judge: str
    asks: str
    """What RL asks for, as the table says it."""
    overrides: tuple[str, ...]


ALL = ("train.max_cpu_seconds=null", "eval.grid=4", "checkpoint.every=10", "checkpoint.keep=1")
JOBS = {
    "shapes-judge": Job(
        "shapes/success",
        "judge",
        "the judge alone; the verifier of the pixels is never asked",
        (
            *("train.steps=40", "optim.schedule=constant", "optim.ema_decay=0.9"),
            *("train.micro_batch_size=36", "rewards.0.batch_size=36", "eval.every=10", "eval.samples=256"),
        ),
    ),
    "sums-capo": Job(
        "number/correct",
        "judge/right",
        "the verifier of the answer, and the judge for which steps are wrong",
        ("train.steps=12", "sampling.batch_size=128", "rewards.1.batch_size=128", "eval.every=3", "eval.samples=512"),
    ),
    "scenes-judge": Job(
        "exact/correct",
        "judge",
        "the judge alone; the verifier of the answer is never asked",
        ("train.steps=24", "sampling.batch_size=64", "rewards.0.batch_size=64", "eval.every=6", "eval.samples=512"),
    ),
}
"""Batches are small enough for every device of both controllers to have some. The shipped diffusion recipe averages its
weights over longer than this run lasts: here the average is shorter, and the learning rate does not fall."""
FORMS = {"one": (), "several": ("controllers=2", "devices_per_controller=2", "placement=adaptive")}


# -- runs --------------------------------------------------------------------------------------------------------------


def trained(recipe: str, form: str, seed: int, folder: Path, overrides: Sequence[str]) -> Path:
    """The directory of a finished run, trained here as far as it was not. Raises ``SystemExit`` where there is a run
    with other overrides."""
    out = folder / f"{recipe}-{form}-{seed}"
    words = [*ALL, *JOBS[recipe].overrides, *overrides, *FORMS[form]]
    kept = RunDir(out)
    if kept.recipe.exists() and kept.overrides() != [f"seed={seed}", *words]:
        raise SystemExit(f"{out} is a run with other overrides ({shlex.join(kept.overrides())}); remove it, or --out")
    if not whole(out):
        train(recipe, seed, out, words)
        if not whole(out):
            raise SystemExit(f"{out} was stopped; the same command goes on from there")
        print(f"{out.name}: trained", file=sys.stderr, flush=True)
    return out


def whole(out: Path) -> bool:
    """Whether a run has its last evaluation."""
    if not (out / "resolved.json").exists():
        return False
    steps = json.loads((out / "resolved.json").read_text())["train"]["steps"]
    return any(row["step"] == steps for row in read(out / "heldout.jsonl"))


def both_forms(recipes: Sequence[str], seed: int, folder: Path, overrides: Sequence[str], jobs: int) -> None:
    """Train every recipe in both forms: runs of one device ``jobs`` at a time, the others one after another."""
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda recipe: trained(recipe, "one", seed, folder, overrides), recipes))
    for recipe in recipes:
        trained(recipe, "several", seed, folder, overrides)


def curve(out: Path, key: str) -> Curve:
    return {row["step"]: row[f"reward/{key}"] for row in read(out / "heldout.jsonl")}


def devices_of(out: Path) -> dict[str, Any]:
    """What the devices of a run did: how many judged, how often roles moved, and the splits that were decided."""
    lines, rows = read(out / "placement.jsonl"), read(out / "metrics.jsonl")
    judged = {(line["controller"], line["device"]) for line in lines if line.get("role") == "judge"}
    return {
        "judged": len(judged),
        "moves": sum(row["placement/moves"] for row in rows),
        "splits": [[line["rollout"], line["judge"]] for line in lines if "decision" in line],
        "idle": mean(row["placement/idle"] for row in rows),
    }


def equal_steps(one: Path, several: Path) -> int:
    """How many steps from the first on have the same mean reward in both forms, within 1e-3 of it."""
    means = [[row["reward/mean"] for row in read(out / "metrics.jsonl")] for out in (one, several)]
    same = takewhile(lambda pair: math.isclose(*pair, rel_tol=1e-3), zip(*means, strict=True))
    return sum(1 for _ in same)


# -- figures -----------------------------------------------------------------------------------------------------------


def deviation(values: Sequence[float]) -> float:
    """The standard deviation; NaN of a single value."""
    return stdev(values) if len(values) > 1 else math.nan


def error(values: Sequence[float]) -> float:
    """The standard error of the mean."""
    return deviation(values) / math.sqrt(len(values))


def compare(one: Sequence[Curve], several: Sequence[Curve]) -> dict[str, Any]:
    """Curves of the same seeds in both forms, in the same order, compared at every evaluation.

    Raises ``ValueError`` where they were not evaluated at the same steps.
    """
    steps = sorted(one[0])
    if any(sorted(found) != steps for found in (*one, *several)):
        raise ValueError("the runs were not evaluated after the same steps")
    rows: list[dict[str, Any]] = []
    for step in steps:
        a, b = [found[step] for found in one], [found[step] for found in several]
        apart = [y - x for x, y in zip(a, b, strict=True)]
        row = {"step": step, "one": mean(a), "one_std": deviation(a), "several": mean(b), "several_std": deviation(b)}
        rows.append(row | {"difference": mean(apart), "error": error(apart), "by_seed": apart})
    after = [row for row in rows if row["step"] > 0]
    spread = math.sqrt(mean(row[f"{form}_std"] ** 2 for row in after for form in FORMS))
    largest = max(after, key=lambda row: abs(row["difference"]))
    rises = {form: [c[steps[-1]] - c[steps[0]] for c in of] for form, of in (("one", one), ("several", several))}
    return {
        "evaluations": rows,
        "spread": spread,
        "chance": 1.96 * spread * math.sqrt(2 / len(one)),
        "largest": {"step": largest["step"], "difference": largest["difference"], "error": largest["error"]},
        "within": None if math.isnan(spread) else abs(largest["difference"]) <= spread,
        "rise": {form: {"mean": mean(of), "error": error(of), "by_seed": of} for form, of in rises.items()},
    }


def figures(recipe: str, seeds: Sequence[int], folder: Path) -> dict[str, Any]:
    """What both forms of a recipe learned over the seeds that are finished."""
    job = JOBS[recipe]
    outs = {form: [folder / f"{recipe}-{form}-{seed}" for seed in seeds] for form in FORMS}
    curves = {
        key: {form: [curve(out, key) for out in of] for form, of in outs.items()} for key in (job.measure, job.judge)
    }
    return {
        "asks": job.asks,
        "seeds": list(seeds),
        "overrides": RunDir(outs["one"][0]).overrides()[1:],
        "samples": min(row["samples"] for of in outs.values() for out in of for row in read(out / "heldout.jsonl")),
        "measure": job.measure,
        "compared": compare(**curves[job.measure]),
        "judge": job.judge,
        "judge_compared": compare(**curves[job.judge]),
        "equal_steps": [equal_steps(*pair) for pair in zip(*outs.values(), strict=True)],
        "devices": [devices_of(out) for out in outs["several"]],
        "cpu_seconds": {
            form: [read(o / "metrics.jsonl")[-1]["perf/cpu_seconds"] for o in of] for form, of in outs.items()
        },
        "curves": curves,
    }


# -- tables ------------------------------------------------------------------------------------------------------------


def table(recipe: str, found: Mapping[str, Any]) -> str:
    """The evaluations of a recipe, a row each, and what follows from them."""
    compared, judged, largest = found["compared"], found["judge_compared"], found["compared"]["largest"]
    lines = [
        f"### {recipe}: held-out `{found['measure']}`, {found['samples']} samples, seeds {found['seeds']}",
        "",
        f"RL asks for {found['asks']}. `{shlex.join(found['overrides'])}`",
        "",
        "| step | one device, mean (std over seeds) | 2 x 2 | difference +- its standard error | of each seed |",
        "|---|---|---|---|---|",
    ]
    for row in compared["evaluations"]:
        forms = [f"{row[form]:.3f} ({row[f'{form}_std']:.3f})" for form in FORMS]
        apart = ", ".join(f"{value:+.3f}" for value in row["by_seed"])
        lines.append(
            f"| {row['step']} | {' | '.join(forms)} | {row['difference']:+.3f} +- {row['error']:.3f} | {apart} |"
        )
    says = {True: "within it", False: "BEYOND it", None: "one seed has no spread"}[compared["within"]]
    own = [f"{judged['evaluations'][0][form]:.3f} to {judged['evaluations'][-1][form]:.3f}" for form in FORMS]
    did = {key: [run[key] for run in found["devices"]] for key in ("judged", "moves", "splits")}
    lines += [
        "",
        f"- largest mean difference {largest['difference']:+.3f} +- {largest['error']:.3f} (step {largest['step']}), "
        f"the seeds' spread {compared['spread']:.3f}: {says}; two means of {len(found['seeds'])} seeds of one form "
        f"differ by up to {compared['chance']:.3f} by chance",
        f"- training begins with so many steps of the same mean reward, within 1e-3 of it: {found['equal_steps']}",
        "- rise: " + "; ".join(f"{form} {rise(of)}" for form, of in compared["rise"].items()),
        f"- the judge's own figure (`{found['judge']}`): one {own[0]}; several {own[1]}; largest mean difference "
        f"{judged['largest']['difference']:+.3f}, spread {judged['spread']:.3f}",
        f"- of 4 devices judged {did['judged']}; moves inside steps {did['moves']}; changes of the split "
        f"{[changes(splits) for splits in did['splits']]}",
        "- CPU-seconds of training, mean: "
        + ", ".join(f"{f} {mean(of):.0f}" for f, of in found["cpu_seconds"].items()),
    ]
    return "\n".join(lines)


def rise(of: Mapping[str, float]) -> str:
    return f"{of['mean']:+.3f} +- {of['error']:.3f}"


def changes(splits: Sequence[Sequence[int]]) -> int:
    """How often the split changed from one step to the next."""
    return sum(a != b for a, b in pairwise(splits))


def summary(recipes: Mapping[str, Mapping[str, Any]]) -> str:
    lines = [
        "| recipe | held-out | rise, one device | rise, 2 x 2 | largest difference | spread | within | by chance |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for recipe, found in recipes.items():
        of = found["compared"]
        cells = [recipe, found["measure"], *(rise(of["rise"][form]) for form in FORMS)]
        cells += [f"{of['largest']['difference']:+.3f}", f"{of['spread']:.3f}"]
        cells += [{True: "yes", False: "no", None: ""}[of["within"]], f"{of['chance']:.3f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def finite(tree: Any) -> Any:
    """The same with null for what is not a number, as JSON has it."""
    if isinstance(tree, dict):
        return {key: finite(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [finite(value) for value in tree]
    return None if isinstance(tree, float) and not math.isfinite(tree) else tree


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=list(JOBS), default=list(JOBS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs of one device at a time")
    parser.add_argument("--out", type=Path, default=Path("runs/alike"), help="folder of the runs")
    parser.add_argument("--json", type=Path, help="write every single figure here")
    parser.add_argument("overrides", nargs="*", help="a.b=c, after those of the benchmark")
    arguments = parser.parse_args(given)
    arguments.out.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", "benchmarks/learn_alike.py", *(sys.argv[1:] if given is None else given)])
    result: dict[str, Any] = {"command": command, "environment": environment()}
    cpu = result["environment"]["cpu"]
    print(f"`{command}`, {cpu['usable']} cores of {cpu['name']}", flush=True)
    for n, seed in enumerate(arguments.seeds, 1):
        both_forms(arguments.recipes, seed, arguments.out, arguments.overrides, arguments.jobs)
        result["date"] = datetime.now(UTC).isoformat(timespec="seconds")
        result["recipes"] = {name: figures(name, arguments.seeds[:n], arguments.out) for name in arguments.recipes}
        tables = [table(*item) for item in result["recipes"].items()]
        print("", f"## {result['date']}", *tables, summary(result["recipes"]), sep="\n\n", flush=True)
        if arguments.json:
            arguments.json.write_text(json.dumps(finite(result), indent=1))


if __name__ == "__main__":
    main()

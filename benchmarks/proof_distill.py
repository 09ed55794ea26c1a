"""RL with a judge, with a student distilled from it, and with both: gain, calls of the judge, drift of the student.

    python benchmarks/proof_distill.py --recipe shapes-judge --truth shapes/success --seeds 0 --samples 3000 --steps 40

The students are distilled once (``mmrl distill RECIPE``, ``--samples`` verdicts). Arms, each of ``--steps`` steps at a
constant learning rate:

- judge: the recipe's judge is asked about every sample.
- student: the student alone.
- cascade: the student, and the judge about the fifth of the samples of which it is least sure (``judge_below`` as
  ``mmrl distill`` printed it, on held-out samples of the policy before RL).
- refreshed: the student alone; after half of the steps it is distilled again, with ``--samples`` / 4 new verdicts
  about what the policy makes then, beside the old ones.

``gain``: of ``--truth``, a held-out measure that no arm trains on. ``calls``: verdicts of the judge that training used;
with ``distilling`` those that made the students. ``drift``: how well the student that an arm ended with agrees with the
judge on ``--drift`` new samples of the trained policy. Every run is resumable: what is finished is not done again.
Where ``mmrl distill`` refuses its students (none is better than chance) that is printed, and only ``judge`` is run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from mmrl.distill.collection import collect, open_policy
from mmrl.distill.distilling import judge_of
from mmrl.distill.folder import NAME, load_students
from mmrl.distill.measuring import agreement
from mmrl.distill.sides import VERDICTS, sides_of
from mmrl.distill.training import scores, table_of
from mmrl.judge.store import TRANSCRIPTS, rows_of
from mmrl.report.metrics import read
from mmrl.run import open_run

REFUSED = "refused"
ARMS = ("judge", "student", "cascade", "refreshed")


def command(*words: str, log: Path) -> None:
    """``mmrl`` in a process of its own, one thread."""
    with log.open("a") as file:
        subprocess.run(
            [sys.executable, "-m", "mmrl.cli", *words],
            check=True,
            stdout=file,
            stderr=file,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )


def distilled(given: argparse.Namespace, seed: int) -> Path | None:
    """The folder of a seed's students; None where they were refused."""
    folder = given.out / f"students-{seed}"
    words = [given.recipe, f"seed={seed}", *given.overrides, "--seed", str(seed), "--samples", str(given.samples)]
    words += ["--reward", given.reward] if given.reward else []
    distil(words, folder, given.out / f"students-{seed}.log")
    return folder if (folder / NAME).exists() else None


def distil(words: list[str], folder: Path, log: Path) -> None:
    """Make ``folder``. Where no student is good enough it has the verdicts, and the reason in the file ``refused``."""
    if folder.exists():
        return
    try:
        command("distill", *words, "--out", str(folder), log=log)
    except subprocess.CalledProcessError:
        if not (folder / VERDICTS).exists():
            raise
        (folder / REFUSED).write_text(log.read_text().strip().splitlines()[-1])


def train(given: argparse.Namespace, arm: str, seed: int, students: Path | None) -> Path:
    """The finished run of an arm."""
    out = given.out / f"{arm}-{seed}"
    own = given.out / f"{arm}-{seed}-students"
    changes = [f"seed={seed}", "optim.schedule=constant", f"eval.every={given.steps}", f"eval.samples={given.heldout}"]
    changes += [f"checkpoint.every={max(1, given.steps // 2)}", "train.max_cpu_seconds=null", *given.overrides]
    if arm != "judge":
        assert students is not None
        if not own.exists():
            shutil.copytree(students, own)
        below = json.loads((own / NAME).read_text())["figures"]["judge_below"][1]["judge_below"]
        asks = f", judge_below: {below}" if arm == "cascade" else ""
        changes.append(f"rewards=[{{name: distilled, batch_size: 144, options: {{path: {own}{asks}}}}}]")

    def steps(count: int) -> None:
        resume = ["--resume"] if (out / "resolved.json").exists() else []
        words = ["train", given.recipe, *changes, f"train.steps={count}", "--out", str(out), *resume]
        command(*words, log=given.out / f"{arm}-{seed}.log")

    if arm == "refreshed" and not (own / "refreshed").exists():
        steps(given.steps // 2)
        fresh = given.out / f"{arm}-{seed}-fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        words = [str(out), "--samples", str(given.samples // 4), "--also", str(students)]
        distil(words, fresh, given.out / f"{arm}-{seed}.log")
        if (fresh / NAME).exists():  # otherwise it goes on with the students of before
            shutil.copytree(fresh, own, dirs_exist_ok=True)
        (own / "refreshed").touch()
    steps(given.steps)
    return out


def drift(given: argparse.Namespace, arm: str, run: Path, students: Path) -> dict[str, Any]:
    """The agreement of a student with the judge on new samples of a run's policy."""
    kept = run / "drift.json"
    if kept.exists():
        return json.loads(kept.read_text())
    recipe = open_run(run)[0]
    judge, _ = judge_of(recipe, run, given.reward if arm.startswith("judge") else None)
    context = open_policy(recipe, run, judge, run, "latest")
    try:
        made = collect(context, given.drift, given.out / f"{arm}-drift", start=100_000)
    finally:
        context.rewards.close()
        context.pipeline.close()
        context.compute.devices.close()
    record, module = load_students(students)
    table = table_of(*sides_of(made.samples), made.values, made.groups, record.shape)
    logits = dict(zip(("dual", "interaction"), scores(module, table), strict=True))[record.student]
    said = record.verdicts(logits, record.student)
    found = agreement(said, table.verdicts, made.groups, table.of_prompt.tolist()).as_json()
    found |= {"student": float(said.mean()), "judge": float(table.verdicts.mean())}
    kept.write_text(json.dumps(found))
    return found


def measured(given: argparse.Namespace, arm: str, seed: int, students: Path | None) -> dict[str, Any]:
    """An arm's result; its drift only where there are students."""
    run = train(given, arm, seed, students)
    rows, key = read(run / "heldout.jsonl"), f"reward/{given.truth}"
    calls = sum(1 for row in rows_of(run / TRANSCRIPTS) if int(str(row["step"])) >= 0)
    own = students if arm == "judge" else given.out / f"{arm}-{seed}-students"
    making = 0 if arm == "judge" else given.samples + (given.samples // 4 if arm == "refreshed" else 0)
    result = {"arm": arm, "seed": seed, "before": rows[0][key], "after": rows[-1][key], "calls": calls}
    result |= {"distilling": making, "cpu_seconds": read(run / "metrics.jsonl")[-1]["perf/cpu_seconds"]}
    return result | {"drift": None if own is None else drift(given, f"{arm}-{seed}", run, own)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="a.b=c, after those of the benchmark")
    parser.add_argument("--recipe", default="shapes-judge")
    parser.add_argument("--truth", default="shapes/success")
    parser.add_argument("--reward", help="label of the judge, where the recipe has several")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--samples", type=int, default=3000, help="verdicts that make the students")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--heldout", type=int, default=256)
    parser.add_argument("--drift", type=int, default=240)
    parser.add_argument("--out", type=Path, default=Path("runs/proof_distill"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out = given.out.resolve()  # a path in a recipe is seen from the recipe's folder
    given.out.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        students = distilled(given, seed)
        if students is None:
            refused = (given.out / f"students-{seed}" / REFUSED).read_text()
            print(json.dumps({"seed": seed, "samples": given.samples, "refused": refused}), flush=True)
        else:
            figures = json.loads((students / NAME).read_text())["figures"]
            said = {name: figures[name] for name in ("student", "heldout", "judge_below")}
            print(json.dumps({"seed": seed, "samples": given.samples, **said}), flush=True)
        for arm in given.arms:
            if arm == "judge" or students is not None:
                print(json.dumps(measured(given, arm, seed, students)), flush=True)


if __name__ == "__main__":
    main()

"""RL with a judge, with a student distilled from it, and with both: gain, calls of the judge, drift of the student.

    python benchmarks/proof_distill.py --recipe scenes-judge --truth exact/correct --heldout 1024
    python benchmarks/proof_distill.py --recipe shapes-judge --truth shapes/success --heldout 512

Arms, each of ``--steps`` steps at a constant learning rate. ``judge`` asks the recipe's judge about every sample. The
others may call it ``--share`` as often, all calls counted:

- student: all of them make the students (``mmrl distill RECIPE``), and RL asks a student alone.
- cascade: half of them make students; RL asks the judge about those samples of which the student is least sure
  (``judge_below`` as ``mmrl distill`` printed it, on held-out samples of the policy before RL: how often it is asked
  then is measured).
- refreshed: half of them make students; after half of the steps the other half, about what the policy makes then, and
  the old ones make new students.

``gain``: of ``--truth``, a held-out measure that no arm trains on. ``calls``: verdicts of the judge that RL asked for;
``distilling``: those that made the students. ``drift``: how well the student that an arm ended with agrees with the
judge on ``--drift`` new samples of the trained policy. ``seen`` (with ``--seen``): ``--truth`` before and after RL on
the prompts that were trained on. The last line of a seed has each arm's share of the judge's gain
and calls; the last line of all their means over seeds. Every run is resumable: what is finished is not done again.
Where ``mmrl distill`` refuses its students (none is better than chance) that is printed, and the arm is not run.
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

from mmrl.app.build import open_run, restored
from mmrl.config.loader import load_recipe
from mmrl.core.lines import rows_of
from mmrl.data.loading import load_prompts
from mmrl.logging.metrics import read
from mmrl.rewards.judging.store import TRANSCRIPTS
from mmrl.rewards.learned.distilled.folder import NAME, load_encoder, load_students
from mmrl.rewards.learned.distilled.sides import VERDICTS, sides_of
from mmrl.studies.distill.distilling import agreement, collect, judge_of, open_policy
from mmrl.studies.distill.training import scores, table_of
from mmrl.training.evaluation import Evaluator

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


def distilled(given: argparse.Namespace, samples: int, seed: int) -> Path | None:
    """The folder of students of so many verdicts; None where they were refused."""
    name = f"students-{samples}-{seed}"
    folder = given.out / name
    words = [given.recipe, f"seed={seed}", *given.overrides, "--seed", str(seed), "--samples", str(samples)]
    words += ["--reward", given.reward] if given.reward else []
    words += ["--backbone", given.backbone, "--passes", str(given.passes)]
    distil(words, folder, given.out / f"{name}.log")
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


def threshold(students: Path, share: float) -> float:
    """The ``judge_below`` with which at most ``share`` of the samples are asked, as ``mmrl distill`` printed it."""
    rows = json.loads((students / NAME).read_text())["figures"]["judge_below"]
    fitting = [row["judge_below"] for row in rows if row["asked"] <= share + 0.01]
    return max(fitting, default=0.0)


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
        asks = f", judge_below: {threshold(own, given.share / 2)}" if arm == "cascade" else ""
        changes.append(f"rewards=[{{name: distilled, batch_size: 144, options: {{path: {own}{asks}}}}}]")

    def steps(count: int) -> None:
        resume = ["--resume"] if (out / "resolved.json").exists() else []
        words = ["train", given.recipe, *changes, f"train.steps={count}", "--out", str(out), *resume]
        command(*words, log=given.out / f"{arm}-{seed}.log")

    if arm == "refreshed" and not (own / "refreshed").exists():
        steps(given.steps // 2)
        fresh = given.out / f"{arm}-{seed}-fresh"
        shutil.rmtree(fresh, ignore_errors=True)
        words = [str(out), "--samples", str(given.budget // 2), "--also", str(students)]
        words += ["--backbone", given.backbone, "--passes", str(given.passes)]
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
    judge = judge_of(recipe, given.reward if arm.startswith("judge") else None)
    context = open_policy(recipe, judge, run, "latest")
    try:
        made = collect(context, given.drift, given.out / f"{arm}-drift", start=100_000)
    finally:
        context.rewards.close()
        context.pipeline.close()
        context.compute.devices.close()
    record, module = load_students(students)
    table = table_of(*sides_of(made.samples), made.values, made.groups, load_encoder(students))
    logits = dict(zip(("dual", "interaction"), scores(module, table), strict=True))[record.student]
    said = record.verdicts(logits, record.student)
    found = agreement(said, table.verdicts, made.groups, table.of_prompt.tolist()).as_json()
    found |= {"student": float(said.mean()), "judge": float(table.verdicts.mean())}
    kept.write_text(json.dumps(found))
    return found


def seen(given: argparse.Namespace, run: Path) -> list[float]:
    """``--truth`` on the prompts that were trained on, sampled as held-out ones are, before and after the training."""
    kept = run / "seen.json"
    if not kept.exists():
        found = []
        for which in ("base", "latest"):
            context, _, _ = restored(run, which)
            prompts = load_prompts(context.recipe, "train")
            found.append(Evaluator(context, prompts).score(given.heldout)[0][f"reward/{given.truth}"])
            context.pipeline.close()
            context.compute.devices.close()
        kept.write_text(json.dumps(found))
    return json.loads(kept.read_text())


def measured(given: argparse.Namespace, arm: str, seed: int, students: Path | None) -> dict[str, Any]:
    """An arm's result; its drift only where there are students."""
    run = train(given, arm, seed, students)
    rows, key = read(run / "heldout.jsonl"), f"reward/{given.truth}"
    calls = sum(1 for row in rows_of(run / TRANSCRIPTS) if int(str(row["step"])) >= 0)
    own = students if arm == "judge" else given.out / f"{arm}-{seed}-students"
    result = {"arm": arm, "seed": seed, "before": rows[0][key], "after": rows[-1][key]}
    result |= {"gain": rows[-1][key] - rows[0][key], "calls": calls, "distilling": making(given, arm)}
    result |= {"cpu_seconds": read(run / "metrics.jsonl")[-1]["perf/cpu_seconds"]}
    if given.seen:
        result |= {"seen": seen(given, run)}
    return result | {"drift": None if own is None else drift(given, f"{arm}-{seed}", run, own)}


def making(given: argparse.Namespace, arm: str) -> int:
    """How many verdicts an arm's students are made of."""
    return {"judge": 0, "cascade": given.budget // 2, "refreshed": given.budget // 2 * 2}.get(arm, given.budget)


def ratios(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Of each arm beside ``judge``: its share of the judge's gain and of the judge's calls, sums over seeds."""
    found = {}
    sums = {
        arm: {key: sum(row[key] for row in results if row["arm"] == arm) for key in ("gain", "calls", "distilling")}
        for arm in dict.fromkeys(row["arm"] for row in results)
    }
    whole = sums.get("judge")
    for arm, own in sums.items():
        if whole is not None and arm != "judge":
            calls = (own["calls"] + own["distilling"]) / whole["calls"]
            found[arm] = {"gain": round(own["gain"] / whole["gain"], 3), "calls": round(calls, 3)}
    return found


def of_seed(given: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """The results of all arms that can be run, each printed."""
    results = []
    for arm in given.arms:
        samples = given.budget if arm in ("judge", "student") else given.budget // 2
        wanted = arm != "judge" or "student" in given.arms
        students = distilled(given, samples, seed) if wanted else None
        if wanted and students is None and arm != "judge":
            refused = (given.out / f"students-{samples}-{seed}" / REFUSED).read_text()
            print(json.dumps({"arm": arm, "seed": seed, "samples": samples, "refused": refused}), flush=True)
            continue
        if students is not None and arm != "judge":
            figures = json.loads((students / NAME).read_text())["figures"]
            said = {name: figures[name] for name in ("student", "heldout", "judge_below")}
            print(json.dumps({"seed": seed, "samples": samples, **said}), flush=True)
        results.append(measured(given, arm, seed, students))
        print(json.dumps(results[-1]), flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="a.b=c, after those of the benchmark")
    parser.add_argument("--recipe", default="shapes-judge")
    parser.add_argument("--truth", default="shapes/success")
    parser.add_argument("--reward", help="label of the judge, where the recipe has several")
    parser.add_argument("--backbone", default="policy", choices=("policy", "none"))
    parser.add_argument("--passes", type=int, default=40, help="over the verdicts, that train the students")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS), metavar="ARM")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--share", type=float, default=0.2, help="of the judge's calls that other arms may use")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--heldout", type=int, default=256)
    parser.add_argument("--seen", action="store_true", help="measure the truth on the trained prompts too")
    parser.add_argument("--drift", type=int, default=240)
    parser.add_argument("--out", type=Path, default=Path("runs/proof_distill"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    given.out = given.out.resolve()  # a path in a recipe is seen from the recipe's folder
    given.out.mkdir(parents=True, exist_ok=True)
    train_ = load_recipe([given.recipe], given.overrides).recipe.train
    given.budget = round(given.share * given.steps * train_.prompts_per_step * train_.group_size)
    results = [row for seed in given.seeds for row in of_seed(given, seed)]
    for seed in given.seeds:
        print(json.dumps({"seed": seed, "shares": ratios([row for row in results if row["seed"] == seed])}))
    print(json.dumps({"seeds": given.seeds, "shares": ratios(results)}))


if __name__ == "__main__":
    main()

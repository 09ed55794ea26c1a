"""Several teachers in one student, beside training on the mix of their rewards; several seeds.

    python benchmarks/proof_teacher.py --job text --seeds 0 1 2
    python benchmarks/proof_teacher.py --job pictures --seeds 0 1 2

The prompts are three sources (``benchmarks/teacher_tasks.py``), and each pays for something else. ``text``, the model
of ``sums``: an answer at once, right or wrong; a right answer; or right steps of one operation each. ``pictures``, the
model of ``shapes-lora``: bright, red or blue, whatever is asked for. From the same model, with a LoRA each:

- a teacher for each source: RL on its prompts and its reward, for ``--seconds`` of CPU time;
- ``taught``: on all prompts, without a reward, each source taught by its teacher (reverse), for as long as the teachers
  together; a teacher says something of each token or step, so that one sample of a prompt is enough;
- ``mix``: RL on all prompts and rewards, for as long.

All are measured on the same held-out prompts of each source, which no run samples, with the same random numbers. A
share is ``(student - before) / (teacher - before)`` of a source. Every run is resumable; the JSON file has all figures.
Overrides at the end change the student alone, to choose its settings on another seed: with ``--name`` its runs lie
beside the others.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from proof_shapes import train

TASKS = Path(__file__).resolve().parent / "teacher_tasks.py"
Scores = dict[str, float]


class Job(NamedTuple):
    """``recipe``, changed by ``common`` in all runs and by ``student`` in that one."""

    recipe: str
    kinds: tuple[str, str, str]
    prompts: str
    reward: str
    heldout: dict[str, int]
    common: list[str]
    student: list[str]

    def mixture(self, kinds: Sequence[str]) -> str:
        """The section of the sources ``kinds``."""
        name = f"{TASKS}:{self.prompts}"
        sources = [
            {"name": name, "label": k, "train": {"kind": k}, "heldout": {"kind": k, **self.heldout}} for k in kinds
        ]
        return "data.mixture=" + json.dumps(sources)

    def paid(self, weight: float) -> str:
        return f"rewards=[{{name: '{TASKS}:{self.reward}', label: own, weight: {weight}}}]"


LORA = "model.lora={rank: 16, alpha: 32}"
EVERY_RUN = [LORA, "train.steps=2000", "optim.schedule=linear", "eval.every=null", "checkpoint={every: 20, keep: 1}"]
JOBS = {
    "text": Job(
        "sums",
        ("brief", "right", "stepwise"),
        "prompts",
        "own",
        {"count": 700},
        [*EVERY_RUN, "train.prompts_per_step=24", "train.group_size=8", "optim.lr=2e-3"],
        ["train.prompts_per_step=36", "train.group_size=1"],
    ),
    "pictures": Job(
        "shapes-lora",
        ("bright", "red", "blue"),
        "captions",
        "shown",
        {},
        [
            *EVERY_RUN,
            "sampling.steps=6",
            "train.prompts_per_step=8",
            "train.group_size=8",
            "train.micro_batch_size=64",
            "optim.lr=1e-3",
            "optim.ema_decay=null",
            "algorithm.advantage_std=group",
        ],
        ["train.prompts_per_step=36", "train.group_size=1"],
    ),
}


class Runs(NamedTuple):
    """The runs of a job in the folder ``out``; ``samples``: of a measure, over all sources."""

    job: Job
    out: Path
    samples: int

    def run(self, name: str, seed: int, seconds: float, kinds: Sequence[str], *more: str) -> Path:
        """The run ``name``, trained for so many CPU-seconds on ``kinds``."""
        out = self.out / f"{name}-{seed}"
        if not (out / "ended.json").exists():
            limit = f"train.max_cpu_seconds={seconds}"
            train(self.job.recipe, seed, out, [*self.job.common, self.job.mixture(kinds), limit, *more])
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        print(f"seed {seed}, {name}: {len(rows)} steps, {rows[-1]['perf/cpu_seconds']:.0f} s", flush=True)
        return out

    def measure(self, *of: Path) -> list[Scores]:
        """The held-out reward of each source of runs, kept in their folders; ``base`` is the model that a
        run began with."""
        if lacking := [str(one) for one in of if not self.kept(one).exists()]:
            job = next(name for name, job in JOBS.items() if job is self.job)
            command = [sys.executable, __file__, "--job", job, "--samples", str(self.samples), "--measure", *lacking]
            subprocess.run(command, check=True, env=alone())
        return [json.loads(self.kept(one).read_text()) for one in of]

    def kept(self, of: Path) -> Path:
        folder, which = (of.parent, "base") if of.name == "base" else (of, "latest")
        return folder / f"proof-{which}-{self.samples}.json"

    def measure_here(self, *of: Path) -> None:
        """The work of ``measure``, in this process."""
        from mmrl.app.build import build, find_checkpoint, open_run
        from mmrl.config.loader import load_recipe
        from mmrl.data.loading import load_prompts
        from mmrl.training.evaluation import Evaluator

        edits = [*self.job.common, self.job.mixture(self.job.kinds), self.job.paid(1)]
        recipe = load_recipe([self.job.recipe], [*edits, "train.micro_batch_size=256"]).recipe
        context = build(recipe)
        heldout = Evaluator(context, load_prompts(recipe, "heldout"))
        for one in of:
            if one.name != "base":
                found = find_checkpoint(open_run(one)[1], "latest")
                assert found is not None
                found.into("policy", context.policy.load_state_dict)
            row = heldout.score(self.samples)[0]
            self.kept(one).write_text(json.dumps({kind: row[f"source/{kind}/reward/own"] for kind in self.job.kinds}))


def alone() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def mmrl(words: Sequence[str], log: Path) -> None:
    """``mmrl`` in a process of its own."""
    with log.open("a") as file:
        subprocess.run([sys.executable, "-m", "mmrl.cli", *words], check=True, stdout=file, stderr=file, env=alone())


def exported(of: Path) -> Path:
    """The LoRA of a run, as peft writes it."""
    out = of.with_name(f"{of.name}-lora")
    if not (out / "adapter_config.json").exists():
        mmrl(["export", str(of), "--what", "lora", "--out", str(out)], of.with_name(f"{of.name}.log"))
    return out


def of_seed(runs: Runs, seed: int, asked: argparse.Namespace) -> dict[str, Scores]:
    """The held-out rewards of each arm by source; ``teachers`` has each teacher's on its own."""
    job, seconds = runs.job, asked.seconds
    teachers = {kind: runs.run(kind, seed, seconds, [kind], job.paid(1)) for kind in job.kinds}
    before, *theirs = runs.measure(teachers[job.kinds[0]] / "base", *teachers.values())
    found = {"before": before, "teachers": {kind: own[kind] for kind, own in zip(teachers, theirs, strict=True)}}
    together = seconds * len(teachers)
    for arm in asked.arms:
        if arm == "taught":
            listed = [{"model": str(exported(of)), "prompts": kind} for kind, of in teachers.items()]
            lessons = [job.paid(0), f"teacher={json.dumps(listed)}", *job.student, *asked.overrides]
            made = runs.run(asked.name, seed, together, job.kinds, *lessons)
        else:
            made = runs.run(arm, seed, together, job.kinds, job.paid(1))
        (found[arm],) = runs.measure(made)
        print(f"seed {seed}, {arm}: {found[arm]}, shares {shares(found, arm)}", flush=True)
    return found


def shares(found: dict[str, Scores], arm: str) -> Scores:
    """How much of each teacher's held-out gain ``arm`` has."""
    before, teachers = found["before"], found["teachers"]
    return {kind: round((found[arm][kind] - before[kind]) / (of - before[kind]), 3) for kind, of in teachers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=list(JOBS), default="text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=40, help="CPU-seconds of each teacher")
    parser.add_argument("--samples", type=int, default=1536, help="held-out samples of a measure, over all sources")
    parser.add_argument("--arms", nargs="+", choices=["taught", "mix"], default=["taught", "mix"])
    parser.add_argument("--name", default="taught", help="what the runs of the student are called")
    parser.add_argument("--out", type=Path, default=Path("runs/proof_teacher"))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/proof_teacher.json"))
    parser.add_argument("--measure", type=Path, nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="a.b=c of the student")
    asked = parser.parse_intermixed_args()
    runs = Runs(JOBS[asked.job], asked.out / asked.job, asked.samples)
    if asked.measure:
        runs.measure_here(*asked.measure)
        return
    runs.out.mkdir(parents=True, exist_ok=True)
    made = {seed: of_seed(runs, seed, asked) for seed in asked.seeds}
    keep(asked, made)
    print("\n".join(table(made, runs.job.kinds, asked.arms)))


def keep(asked: argparse.Namespace, made: dict[int, dict[str, Scores]]) -> None:
    """Write the figures of these seeds and arms beside others of the same job and settings."""
    kept = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    settings, before = {"seconds": asked.seconds, "samples": asked.samples}, kept.get(asked.job, {})
    seeds = before["seeds"] if settings.items() <= before.items() else {}
    for seed, found in made.items():
        seeds[str(seed)] = {**seeds.get(str(seed), {}), **found}
    kept[asked.job] = {**settings, "seeds": seeds}
    asked.json.write_text(json.dumps(kept, indent=1) + "\n")


def table(made: dict[int, dict[str, Scores]], kinds: Sequence[str], arms: Sequence[str]) -> list[str]:
    """A row for each arm: means (and standard deviations) over the seeds, the mean share and the least one."""
    lines = ["| arm | " + " | ".join(kinds) + " | share of the teacher's gain | of each source | least of all |"]
    lines.append("|---" * (len(kinds) + 4) + "|")
    for arm in ("before", "teachers", *arms):
        each = [shares(found, arm) for found in made.values()]
        rewards = [said([found[arm][kind] for found in made.values()]) for kind in kinds]
        of_source = ", ".join(f"{mean(one[kind] for one in each):.3f}" for kind in kinds)
        figures = [*rewards, said([mean(one.values()) for one in each]), of_source]
        lines.append(f"| {arm} | {' | '.join(figures)} | {min(min(one.values()) for one in each):.3f} |")
    return lines


def said(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" + (f" ({stdev(values):.3f})" if len(values) > 1 else "")


if __name__ == "__main__":
    main()

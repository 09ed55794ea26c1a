"""Several teachers in one student, beside a Bone Soup and training on the mix of their rewards; several seeds.

    python benchmarks/proof_teacher.py --job text --seeds 0 1 2
    python benchmarks/proof_teacher.py --job pictures --seeds 0 1 2

The prompts are three sources (``benchmarks/teacher_tasks.py``), and each pays for something else. ``text``, the model
of ``sums``: an answer at once, right or wrong; a right answer; or right steps of one operation each. ``pictures``, the
model of ``shapes-lora``: bright, brighter on the left, or brighter on the right, whatever is asked for. From the same
model, with a LoRA each:

- a teacher for each source: RL on its prompts and its reward, for ``--seconds`` of CPU time;
- ``taught``: on all prompts, without a reward, each source taught by its teacher (texts: reverse; pictures: the
  velocities of all steps but the last), for as long as the teachers together, or ``--times`` that; a teacher says
  something of each token or step, so that one sample of a prompt is enough;
- ``mix``: RL on all prompts and rewards, for as long;
- ``bone soup``: a backbone for each source, on all prompts, whose own reward counts beta 0.7 and each other one 0.15
  (divided by the standard deviation of the batch: that of a group would undo the weights), for ``--seconds`` each; the
  merge for equal preferences, as far beyond the backbones as is best on training prompts
  (``mmrl soup merge --beyond auto``), which takes time of its own; ``bone soup, inside``: the merge without that.

All are measured on the same held-out prompts of each source, which no run samples, with the same random numbers. A
share is ``(student - before) / (teacher - before)`` of a source. Its standard error is of the samples alone, all three
models on the same ones: ``std(d) / sqrt(n) / (teacher - before)``, where ``d`` is a sample's
``(student - before) - share * (teacher - before)``. Every run is resumable; the JSON file has all figures.
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
Rewards = dict[str, list[float]]
"""Of each source, the rewards of its samples."""


class Seed(NamedTuple):
    """What is found with a seed: rewards by arm and source, and standard errors of the shares."""

    rewards: dict[str, Scores]
    errors: dict[str, Scores]


class Job(NamedTuple):
    """``recipe``, changed by ``common`` in all runs and by ``student`` in that one. ``tried``: samples that say how
    far a soup goes beyond its backbones."""

    recipe: str
    kinds: tuple[str, str, str]
    prompts: str
    reward: str
    heldout: dict[str, int]
    common: list[str]
    student: list[str]
    tried: int

    def mixture(self, kinds: Sequence[str]) -> str:
        """The section of the sources ``kinds``."""
        name = f"{TASKS}:{self.prompts}"
        sources = [
            {"name": name, "label": k, "train": {"kind": k}, "heldout": {"kind": k, **self.heldout}} for k in kinds
        ]
        return "data.mixture=" + json.dumps(sources)

    def paid(self, weight: float) -> str:
        return f"rewards=[{{name: '{TASKS}:{self.reward}', label: own, weight: {weight}}}]"

    @property
    def apart(self) -> str:
        """A reward for each source, which pays its prompts alone."""
        name = f"{TASKS}:{self.reward}"
        return "rewards=" + json.dumps([{"name": name, "label": k, "options": {"only": k}} for k in self.kinds])


INSIDE = "bone soup, inside"
ARMS = ["taught", "mix", "bone soup", INSIDE]
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
        384,
    ),
    "pictures": Job(
        "shapes-lora",
        ("bright", "leftward", "rightward"),
        "captions",
        "shown",
        {},
        [
            *EVERY_RUN,
            "sampling.steps=6",
            "train.prompts_per_step=6",
            "train.group_size=8",
            "train.micro_batch_size=64",
            "optim.lr=3e-3",
            "optim.ema_decay=null",
            "algorithm.advantage_std=group",
        ],
        [
            "train.prompts_per_step=6",
            "train.group_size=1",
            "sampling.window={size: 5, last: null}",
            "sampling.sde.noise_level=0.3",
            *(f"teacher[{n}].divergence=velocity" for n in range(3)),
        ],
        99,
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
        if not finished(out):
            self.kept(out).unlink(missing_ok=True)
            limit = f"train.max_cpu_seconds={seconds}"
            train(self.job.recipe, seed, out, [*self.job.common, self.job.mixture(kinds), limit, *more])
            if not finished(out):
                sys.exit(f"{out} is not finished: {out}.log says why; the same command goes on with it")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        print(f"seed {seed}, {name}: {len(rows)} steps, {rows[-1]['perf/cpu_seconds']:.0f} s", flush=True)
        return out

    def soup(self, seed: int, seconds: float) -> Path:
        """The folder of a Bone Soup of the three rewards."""
        out, job = self.out / f"soup-{seed}", self.job
        own = ["algorithm.advantage_std=batch", f"eval.samples={job.tried}"]
        changes = [*job.common, job.mixture(job.kinds), job.apart, *own]
        words = ["soup", "train", job.recipe, *changes, f"seed={seed}", f"train.max_cpu_seconds={seconds}"]
        mmrl([*words, "--out", str(out), *(["--resume"] if (out / "soup.json").exists() else [])], out)
        if not all(finished(out / f"backbone-{n}") for n in range(1, len(job.kinds) + 1)):
            sys.exit(f"{out} is not finished: {out}.log says why; the same command goes on with it")
        return out

    def merged(self, soup: Path, name: str, *more: str) -> Path:
        """The merge of a soup for equal preferences, as an adapter."""
        out = soup.with_name(f"{soup.name}-{name}")
        if not out.exists():
            equal = ",".join(f"{1 / len(self.job.kinds):.9f}" for _ in self.job.kinds)
            mmrl(["soup", "merge", str(soup), "--weights", equal, "--what", "lora", "--out", str(out), *more], out)
        return out

    def measure(self, *of: Path) -> list[Rewards]:
        """The held-out rewards of each source's samples of runs or adapters, kept in their folders; ``base`` is the
        model that all runs began with."""
        if lacking := [str(one) for one in of if not self.kept(one).exists()]:
            job = next(name for name, job in JOBS.items() if job is self.job)
            command = [sys.executable, __file__, "--job", job, "--samples", str(self.samples), "--measure", *lacking]
            subprocess.run(command, check=True, env=alone())
        return [json.loads(self.kept(one).read_text()) for one in of]

    def kept(self, of: Path) -> Path:
        folder, which = (of.parent, "base") if of.name == "base" else (of, "latest")
        return folder / f"proof-{which}-{self.samples}.json"

    def measure_here(self, *of: Path) -> None:
        """The work of ``measure``, in this process; adapters one at a time."""
        from mmrl.app.build import build, find_checkpoint, open_run
        from mmrl.config.loader import load_recipe
        from mmrl.data.loading import load_prompts
        from mmrl.training.evaluation import Evaluator

        adapter = (of[0] / "adapter_config.json").exists()
        lora = [f"model.lora={{path: {of[0]}}}"] if adapter else []
        edits = [*self.job.common, *lora, self.job.mixture(self.job.kinds), self.job.paid(1)]
        recipe = load_recipe([self.job.recipe], [*edits, "train.micro_batch_size=256"]).recipe
        context = build(recipe)
        heldout = Evaluator(context, load_prompts(recipe, "heldout"))
        for one in of:
            if one.name != "base" and not adapter:
                found = find_checkpoint(open_run(one)[1], "latest")
                assert found is not None
                found.into("policy", context.policy.load_state_dict)
            made, own = heldout.score(self.samples)[1], {kind: list[float]() for kind in self.job.kinds}
            for sample, scores in zip(made.samples, made.scores, strict=True):
                own[sample.prompt.meta["data_source"]].append(scores["own"])
            self.kept(one).write_text(json.dumps(own))


def alone() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def finished(run: Path) -> bool:
    """A run that was stopped has ``ended.json`` as well."""
    ended = run / "ended.json"
    return ended.exists() and json.loads(ended.read_text())["how"] == "finished"


def mmrl(words: Sequence[str], out: Path) -> None:
    """``mmrl`` in a process of its own, with a log beside ``out``."""
    with out.with_name(f"{out.name}.log").open("a") as file:
        subprocess.run([sys.executable, "-m", "mmrl.cli", *words], check=True, stdout=file, stderr=file, env=alone())


def exported(of: Path) -> Path:
    """The LoRA of a run, as peft writes it."""
    out = of.with_name(f"{of.name}-lora")
    if not (out / "adapter_config.json").exists():
        mmrl(["export", str(of), "--what", "lora", "--out", str(out)], of)
    return out


def of_seed(runs: Runs, seed: int, asked: argparse.Namespace) -> Seed:
    """The held-out rewards of each arm by source, and its shares' standard errors; ``teachers`` has each teacher's on
    its own."""
    job, seconds = runs.job, asked.seconds
    teachers = {kind: runs.run(kind, seed, seconds, [kind], job.paid(1)) for kind in job.kinds}
    before, *theirs = runs.measure(runs.out / "base", *teachers.values())
    taught = {kind: own[kind] for kind, own in zip(teachers, theirs, strict=True)}
    found, errors = {"before": means(before), "teachers": means(taught)}, dict[str, Scores]()
    for arm in asked.arms:
        (made,) = runs.measure(trained(arm, runs, seed, teachers, asked))
        found[arm], errors[arm] = means(made), {k: error(before[k], taught[k], made[k]) for k in job.kinds}
        print(f"seed {seed}, {arm}: {found[arm]}, shares {shares(found, arm)}, errors {errors[arm]}", flush=True)
    return Seed(found, errors)


def trained(arm: str, runs: Runs, seed: int, teachers: dict[str, Path], asked: argparse.Namespace) -> Path:
    """The run or the adapter of ``arm``."""
    job, together = runs.job, asked.seconds * len(teachers) * asked.times
    if arm == "taught":
        listed = [{"model": str(exported(of)), "prompts": kind} for kind, of in teachers.items()]
        lessons = [job.paid(0), f"teacher={json.dumps(listed)}", *job.student, *asked.overrides]
        return runs.run(asked.name, seed, together, job.kinds, *lessons)
    if arm == "mix":
        return runs.run(arm, seed, together, job.kinds, job.paid(1))
    soup = runs.soup(seed, asked.seconds)
    return runs.merged(soup, "inside") if arm == INSIDE else runs.merged(soup, "beyond", "--beyond", "auto")


def means(rewards: Rewards) -> Scores:
    return {kind: mean(of) for kind, of in rewards.items()}


def error(before: Sequence[float], teacher: Sequence[float], student: Sequence[float]) -> float:
    """The standard error of a share: see the top."""
    gain = mean(teacher) - mean(before)
    share = (mean(student) - mean(before)) / gain
    rest = [s - b - share * (t - b) for b, t, s in zip(before, teacher, student, strict=True)]
    return round(stdev(rest) / len(rest) ** 0.5 / abs(gain), 4)


def shares(found: dict[str, Scores], arm: str) -> Scores:
    """How much of each teacher's held-out gain ``arm`` has."""
    before, teachers = found["before"], found["teachers"]
    return {kind: round((found[arm][kind] - before[kind]) / (of - before[kind]), 3) for kind, of in teachers.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", choices=list(JOBS), default="text")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=40, help="CPU-seconds of each teacher")
    parser.add_argument(
        "--times", type=float, default=1, help="CPU-seconds of the student and of the mix, in those of all teachers"
    )
    parser.add_argument("--samples", type=int, default=1536, help="held-out samples of a measure, over all sources")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
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
    made = dict[int, Seed]()
    for seed in asked.seeds:
        made[seed] = of_seed(runs, seed, asked)
        keep(asked, made)
    print("\n".join(table(made, runs.job.kinds, asked.arms)))
    errors = [found.errors[arm][kind] for found in made.values() for arm in asked.arms for kind in runs.job.kinds]
    print(f"standard errors of the shares: {mean(errors):.3f} in the mean, {max(errors):.3f} at most")


def keep(asked: argparse.Namespace, made: dict[int, Seed]) -> None:
    """Write the figures of these seeds and arms beside others of the same job and settings."""
    kept = json.loads(asked.json.read_text()) if asked.json.exists() else {}
    settings = {"seconds": asked.seconds, "times": asked.times, "samples": asked.samples}
    before = kept.get(asked.job, {})
    seeds = before["seeds"] if settings.items() <= before.items() else {}
    for seed, found in made.items():
        had = seeds.get(str(seed), {})
        seeds[str(seed)] = {**had, **found.rewards, "errors": {**had.get("errors", {}), **found.errors}}
    kept[asked.job] = {**settings, "seeds": seeds}
    asked.json.write_text(json.dumps(kept, indent=1) + "\n")


def table(made: dict[int, Seed], kinds: Sequence[str], arms: Sequence[str]) -> list[str]:
    """A row for each arm: means (and standard deviations) over the seeds, the mean share and the least one with its
    standard error."""
    lines = [
        "| arm | " + " | ".join(kinds) + " | share of the teacher's gain | of each source | least of all (error) |"
    ]
    for arm in ("before", "teachers", *arms):
        each = {seed: shares(found.rewards, arm) for seed, found in made.items()}
        rewards = [said([found.rewards[arm][kind] for found in made.values()]) for kind in kinds]
        of_source = ", ".join(f"{mean(one[kind] for one in each.values()):.3f}" for kind in kinds)
        least, seed, kind = min((one[kind], seed, kind) for seed, one in each.items() for kind in kinds)
        errors = made[seed].errors.get(arm)
        worst = f"{least:.3f}" + (f" ({errors[kind]:.3f})" if errors else "")
        figures = [*rewards, said([mean(one.values()) for one in each.values()]), of_source, worst]
        lines.append(f"| {arm} | {' | '.join(figures)} |")
    return lines


def said(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" + (f" ({stdev(values):.3f})" if len(values) > 1 else "")


if __name__ == "__main__":
    main()

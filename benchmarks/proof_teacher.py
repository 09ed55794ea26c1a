"""Several teachers in one student, beside training on the mix of their rewards: sums of three sorts, several seeds.

    python benchmarks/proof_teacher.py --seeds 0 1 2 --seconds 60

The prompts are three sources (``benchmarks/teacher_tasks.py``), told apart by their first number, and each pays for
something else: an answer at once, right or wrong; a right answer; or right steps of one operation each. From the
model of ``sums``, with a LoRA each:

- a teacher for each source: GRPO on its prompts and its reward, for ``--seconds`` of CPU time;
- ``taught``: on all prompts, without a reward, each source taught by its teacher (reverse KL over the vocabulary), for
  as long; a teacher says something of each token, so that a sample of each of 36 prompts is a step;
- ``mix``: GRPO on all prompts and rewards, for as long as the student, and ``mix 4``: for four times as long, which is
  what the teachers and the student took together.

All are measured on the same held-out prompts of each source, which no run samples, with the same random numbers. A
share is ``(student - before) / (teacher - before)`` of a source. Every run is resumable; the JSON file has all figures.
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

from proof_shapes import train

TASKS = Path(__file__).resolve().parent / "teacher_tasks.py"
KINDS = ("brief", "right", "stepwise")
COMMON = [
    "model.lora={rank: 16, alpha: 32}",
    "train.prompts_per_step=24",
    "train.group_size=8",
    "train.steps=2000",
    "optim.lr=2e-3",
    "optim.schedule=linear",
    "eval.every=null",
    "checkpoint={every: 20, keep: 1}",
]


def mixture(kinds: Sequence[str]) -> str:
    """The section of the sources ``kinds``."""
    return "data.mixture=" + json.dumps(
        [
            {"name": f"{TASKS}:prompts", "label": k, "train": {"kind": k}, "heldout": {"kind": k, "count": 700}}
            for k in kinds
        ]
    )


def paid(weight: float) -> str:
    return f"rewards=[{{name: '{TASKS}:own', weight: {weight}}}]"


def run(out: Path, seed: int, seconds: float, kinds: Sequence[str], *more: str) -> Path:
    """The run in ``out``, trained for so many CPU-seconds on ``kinds``."""
    if not (out / "ended.json").exists():
        train("sums", seed, out, [*COMMON, mixture(kinds), f"train.max_cpu_seconds={seconds}", *more])
    return out


def exported(of: Path) -> Path:
    """The LoRA of a run, as peft writes it."""
    out = of.with_name(f"{of.name}-lora")
    if not (out / "adapter_config.json").exists():
        command = [sys.executable, "-m", "mmrl.cli", "export", str(of), "--what", "lora", "--out", str(out)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return out


def measure(of: Path, which: str, samples: int) -> dict[str, float]:
    """The held-out reward of each source; kept in the run's folder."""
    kept = of / f"proof-{which}-{samples}.json"
    if not kept.exists():
        command = [sys.executable, __file__, "--measure", str(of), which, "--samples", str(samples)]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return json.loads(kept.read_text())


def measure_here(of: Path, which: str, samples: int) -> None:
    """The work of ``measure``, in this process."""
    from mmrl.app.build import build, find_checkpoint, open_run
    from mmrl.config.loader import load_recipe
    from mmrl.data.loading import load_prompts
    from mmrl.training.evaluation import Evaluator

    recipe = load_recipe(["sums"], [*COMMON, mixture(KINDS), paid(1), "train.micro_batch_size=256"]).recipe
    context, found = build(recipe), find_checkpoint(open_run(of)[1], which)
    if found is not None:
        found.into("policy", context.policy.load_state_dict)
    row = Evaluator(context, load_prompts(recipe, "heldout")).score(samples)[0]
    made = {kind: row[f"source/{kind}/reward/own"] for kind in KINDS}
    (of / f"proof-{which}-{samples}.json").write_text(json.dumps(made))


def of_seed(out: Path, seed: int, seconds: float, samples: int, arms: Sequence[str]) -> dict[str, dict[str, float]]:
    """The held-out rewards of each arm by source; ``teachers`` has each teacher's on its own."""
    teachers = {kind: run(out / f"{kind}-{seed}", seed, seconds, [kind], paid(1)) for kind in KINDS}
    listed = [{"model": str(exported(of)), "prompts": kind} for kind, of in teachers.items()]
    found = {"before": measure(teachers["right"], "base", samples)}
    found["teachers"] = {kind: measure(of, "latest", samples)[kind] for kind, of in teachers.items()}
    lessons = [paid(0), f"teacher={json.dumps(listed)}", "train.prompts_per_step=36", "train.group_size=1"]
    runs = {"taught": (1, lessons), "mix": (1, [paid(1)]), "mix 4": (4, [paid(1)])}
    for arm in arms:
        times, more = runs[arm]
        made = run(out / f"{arm.replace(' ', '')}-{seed}", seed, times * seconds, KINDS, *more)
        found[arm] = measure(made, "latest", samples)
        rows = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
        print(f"seed {seed}, {arm}: {len(rows)} steps, {rows[-1]['perf/cpu_seconds']:.0f} s", flush=True)
    print(f"seed {seed}: {found}", flush=True)
    return found


def shares(found: dict[str, dict[str, float]], arm: str) -> dict[str, float]:
    """How much of each teacher's held-out gain ``arm`` has."""
    before, teachers = found["before"], found["teachers"]
    return {kind: (found[arm][kind] - before[kind]) / (teachers[kind] - before[kind]) for kind in KINDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--seconds", type=float, default=60, help="CPU-seconds of each teacher and of the student")
    parser.add_argument("--samples", type=int, default=1536, help="held-out samples of a measure, over all sources")
    parser.add_argument("--arms", nargs="+", default=["taught", "mix", "mix 4"])
    parser.add_argument("--out", type=Path, default=Path("runs/proof_teacher"))
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/proof_teacher.json"))
    parser.add_argument("--measure", nargs=2, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.measure:
        measure_here(Path(asked.measure[0]), asked.measure[1], asked.samples)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    made = {seed: of_seed(asked.out, seed, asked.seconds, asked.samples, asked.arms) for seed in asked.seeds}
    asked.json.write_text(json.dumps({"seconds": asked.seconds, "samples": asked.samples, "seeds": made}, indent=1))
    print("| arm | " + " | ".join(KINDS) + " | share of the teacher's gain |\n|---|---|---|---|---|")
    for arm in ("before", "teachers", *asked.arms):
        cells = [[found[arm][kind] for found in made.values()] for kind in KINDS]
        kept = [mean(shares(found, arm).values()) for found in made.values()]
        figures = [*(said(cell) for cell in cells), said(kept)]
        print(f"| {arm} | {' | '.join(figures)} |")


def said(values: Sequence[float]) -> str:
    return f"{mean(values):.3f}" + (f" ({stdev(values):.3f})" if len(values) > 1 else "")


if __name__ == "__main__":
    main()

"""What a GPU can show in minutes: a recipe learns, by held-out prompts that training never samples.

    python benchmarks/gpu_proof.py shapes                       # 5 minutes, nothing to fetch
    python benchmarks/gpu_proof.py sd35                         # 30 minutes, SD3.5 Medium with PickScore
    python benchmarks/gpu_proof.py qwen25-vl                    # 30 minutes, Qwen2.5-VL-3B with a judge
    python benchmarks/gpu_proof.py sd35 --check                 # only the plan for --gpu: memory and time
    python benchmarks/gpu_proof.py sd35 model.path=DIR          # overrides of the recipe

Each compares with the untrained model: held-out prompts and noise are the same at every evaluation, and the interval of
the rise is that of a paired bootstrap over prompts. ``sd35`` needs the checkpoints of Stable Diffusion 3.5 Medium and
PickScore, ``qwen25-vl`` those of Qwen2.5-VL 3B and 7B, all under the names of the hub or as overrides. Training stops
after its minutes of step time; evaluations come on top. ``--resume`` goes on where a run was stopped. The curve is
written into ``benchmarks/results/gpu/`` (on the CPU only where ``--results`` names a folder).
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from checks import RESULTS, Predicted, device_name
from smoke_place import MissedError, Place

import mmrl
from mmrl.core.json_types import finite
from mmrl.logging.environment import environment
from mmrl.logging.metrics import read
from mmrl.logging.rundir import RunDir
from mmrl.report.heldout import change_of, level, measure_of, read_samples
from mmrl.report.recorded import read_run
from mmrl.training.callbacks import Metrics, Training

LEAST = 0.78
"""Held-out success of ``shapes``, written down before a GPU has run it; 0.80 is the goal."""
PREDICTED: dict[str, Predicted] = {"held-out at the end": (LEAST, 0.9), "s a step": (1.9, 1.9)}


@dataclass(frozen=True)
class Job:
    """``words``: overrides of the recipe. ``minutes``: of training. ``beside``: what the curve is compared with."""

    recipe: str
    words: Sequence[str]
    minutes: float
    beside: str


JOBS = {
    "shapes": Job(
        "shapes-full",
        [
            "train.prompts_per_step=48",
            "train.group_size=24",
            "train.micro_batch_size=192",  # fewer launches: the model is small
            "train.steps=120",
            "train.max_cpu_seconds=null",
            "optim.lr=3.0e-4",  # twice the recipe's, of eight times the samples
            "eval.every=30",
            "eval.samples=1024",
            "checkpoint.every=60",
        ],
        4.5,
        "the untrained model; 0.69 of the recipe itself on an H100 (12 x 12 samples, 125 steps)",
    ),
    "sd35": Job(
        "sd35-medium",
        [
            "train.prompts_per_step=8",
            "train.group_size=16",
            "sampling.window={size: 2, last: 5}",  # two trained steps of ten, as Flow-GRPO-Fast
            "train.updates_per_step=1",
            "train.steps=400",
            "eval.every=10",
            "eval.samples=32",
            "eval.steps=20",
            "checkpoint.every=20",
        ],
        30,
        "the untrained model",
    ),
    "qwen25-vl": Job(
        "qwen25-vl-3b",
        [
            "train.prompts_per_step=32",
            "train.group_size=8",
            "train.micro_batch_size=32",
            "train.steps=400",
            "sampling.max_new_tokens=32",
            "optim.lr=1.0e-5",
            "rewards=[{name: judge, on_failure: drop, options: {model: Qwen/Qwen2.5-VL-7B-Instruct, rubric: "
            '"{{ media }}{{ prompt_text }} Is this answer right? {{ response }}"}}]',
            "eval.rewards=[{name: 'answer:exact'}]",  # measured, never trained on
            "eval.every=10",
            "eval.samples=350",
        ],
        30,
        "the untrained model, and the verifier answer:exact, which training never asks",
    ),
}


class Minutes(mmrl.Callback):
    """Ends training after so many minutes of step time, those before a resumption included."""

    def __init__(self, minutes: float) -> None:
        self.seconds = 60 * minutes

    def on_step(self, training: Training, metrics: Metrics) -> None:
        rows = read(RunDir(training.directory).metrics)
        spent = sum(row["time/step"] for row in rows if row["step"] < training.step) + metrics["time/step"]
        if spent >= self.seconds:
            training.stop(f"{self.seconds / 60:g} minutes of training")


def trained(job: Job, words: Sequence[str], out: Path, *, minutes: float, resume: bool = False) -> dict[str, Any]:
    """Train the job's recipe into ``out``; its ``curve``."""
    mmrl.train(job.recipe, [*job.words, *words], out=out, callbacks=[Minutes(minutes)], resume=resume)
    return curve(out)


def curve(out: Path) -> dict[str, Any]:
    """The held-out curves of a run, with intervals of 95 %: of each evaluation over its prompts, and of the rise."""
    run, samples = read_run(out), read_samples(out)
    steps = read(RunDir(out).metrics)
    seconds = [row["time/step"] for row in steps]
    measure = measure_of(run)
    others = [f"reward/{label}" for label in run.labels if label not in run.trained]
    found: dict[str, Any] = {"steps": len(steps), "minutes of training": round(sum(seconds) / 60, 2)}
    found["s a step"] = round(statistics.median(seconds), 3) if seconds else None
    for key in filter(None, dict.fromkeys([measure, *others])):
        points = {}
        for row in run.heldout:
            of = level(samples.get(row["step"], {}).get(key, {}))
            points[row["step"]] = None if of is None else [round(n, 4) for n in (of.value, of.low, of.high)]
        change = change_of(run, samples, key)
        rise = None if change is None else [finite(of) for of in (change.value, change.low, change.high)]
        found[key] = {"points": points, "rise": rise and [None if n is None else round(n, 4) for n in rise]}
    return found | {"measure": measure}


def shapes(place: Place) -> dict[str, Any]:
    """The check of ``gpu_limits.py``: at least ``LEAST`` held-out success in less than five minutes."""
    job = JOBS["shapes"]
    words = [f"device={place.device}", *(SMALL_SHAPES if place.small else ())]
    found = trained(job, words, place.folder / "run", minutes=job.minutes)
    points, rise = found[found["measure"]]["points"], found[found["measure"]]["rise"]
    figures = {f"held-out at {step}": value and value[0] for step, value in points.items()}
    last = next(value for value in reversed(points.values()) if value is not None)
    figures["held-out at the end"], figures["its interval"] = last[0], f"{last[1]:.3f} to {last[2]:.3f}"
    figures |= {"rise, low, high": rise, "s a step": found["s a step"], "steps": found["steps"]}
    figures["minutes of training"] = found["minutes of training"]
    if last[0] < LEAST and not place.small:
        raise MissedError(f"held-out success is below {LEAST}", figures)
    return figures


SMALL_SHAPES = ["train.prompts_per_step=2", "train.group_size=4", "train.micro_batch_size=8", "train.steps=2"]
SMALL_SHAPES += ["eval.every=1", "eval.samples=8", "eval.grid=2", "checkpoint.every=2", "model.dtype=float32"]


def checked(job: Job, words: Sequence[str], name: str) -> int:
    """Print the plan for the GPU called ``name``; 1 where the recipe does not fit."""
    from mmrl.config.loader import load_recipe
    from mmrl.planner.gpus import gpu_of
    from mmrl.planner.plan import plan

    found = plan(load_recipe([job.recipe], [*job.words, *words]), gpu=gpu_of(name))
    for problem in found.problems:
        print(f"problem: {problem}")
    if found.peak is not None:
        print(f"{job.recipe} on {name}: {found.peak.total / 2**30:.1f} GiB at most, by the plan")
    if found.time is not None and found.time.step:
        low, high = found.time.interval
        between = f"a step of {low:.0f} to {high:.0f} s by the plan, not measured"
        print(
            f"{between}: {60 * job.minutes / high:.0f} to {60 * job.minutes / low:.0f} steps in {job.minutes:g} minutes"
        )
    return int(bool(found.problems))


def main(given: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if given is None else given
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=list(JOBS))
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    parser.add_argument("--check", action="store_true", help="only plan")
    parser.add_argument("--gpu", default="h100-80g", help="of the plan (default: h100-80g)")
    parser.add_argument("--minutes", type=float, help="of training, in place of the job's")
    parser.add_argument("--out", type=Path, help="the run's folder (default: runs/proof-JOB)")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    parser.add_argument("--results", metavar="FOLDER", type=Path, help="where the curve goes")
    asked = parser.parse_intermixed_args(given)
    job = JOBS[asked.job]
    if asked.check:
        return checked(job, asked.overrides, asked.gpu)
    out = asked.out or Path("runs") / f"proof-{asked.job}"
    found = trained(job, asked.overrides, out, minutes=asked.minutes or job.minutes, resume=asked.resume)
    device = str(read_run(out).setting("device"))
    command = shlex.join(["python", "benchmarks/gpu_proof.py", *given])
    now = datetime.now(UTC)
    about = {"date": f"{now:%Y-%m-%d %H:%M} UTC", "device": device_name(device), "command": command}
    text = json.dumps(about | {"compared with": job.beside} | found | {"environment": environment()}, indent=1)
    print(json.dumps(about | {"compared with": job.beside} | found, indent=1))
    folder = asked.results or (RESULTS if device.startswith("cuda") else None)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"proof_{asked.job}_{now:%Y-%m-%d_%H%M}.json"
        file.write_text(text + "\n")
        print(file)
    return 0


if __name__ == "__main__":
    sys.exit(main())

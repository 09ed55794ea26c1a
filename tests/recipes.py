"""Small runs of the shipped model for tests: the command line, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SMALL = [
    "train.prompts_per_step=2",
    "train.group_size=4",
    "train.micro_batch_size=8",
    "sampling.steps=4",
    "sampling.window={size: 2}",
    "eval.samples=4",
    "eval.grid=4",
    "eval.every=2",
    "checkpoint.every=2",
]


def command(out, *overrides):
    return [sys.executable, "-m", "mmrl.cli", "train", "shapes-lora", *SMALL, *overrides, "--out", str(out)]


def train(out, *overrides, timeout=240, **more):
    """Run ``mmrl train`` and return the finished process."""
    return subprocess.run(command(out, *overrides), capture_output=True, text=True, timeout=timeout, cwd=ROOT, **more)


def start(out, *overrides):
    """Start ``mmrl train`` and return the running process."""
    return subprocess.Popen(
        command(out, *overrides), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT, env=os.environ
    )


def metrics(out):
    """The rows of a run without times and machine figures: what must be equal."""
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "features/"))} for row in rows]


def heldout(out):
    return [json.loads(line) for line in (Path(out) / "heldout.jsonl").read_text().splitlines()]

"""Small runs of the shipped model for tests: the command line, in a process of its own."""

import json
import subprocess
from pathlib import Path

from tests.support.ranks import Command

ROOT = Path(__file__).resolve().parents[2]
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


def start(out, *overrides, apart=False):
    """Start ``mmrl train`` and return the running process; ``apart``: with a ``stderr`` of its own."""
    return Command("mmrl.cli", ["train", "shapes-lora", *SMALL, *overrides, "--out", out], ROOT, apart=apart)


def train(out, *overrides, timeout=240):
    """Run ``mmrl train`` and return the finished process."""
    process = start(out, *overrides, apart=True)
    said = process.communicate(timeout)
    return subprocess.CompletedProcess(["mmrl", "train", *overrides], process.returncode, *said)


def metrics(out):
    """The rows of a run without times and machine figures: what must be equal."""
    rows = [json.loads(line) for line in (Path(out) / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "plan/", "features/"))} for row in rows
    ]


def heldout(out):
    return [json.loads(line) for line in (Path(out) / "heldout.jsonl").read_text().splitlines()]

"""Runs of `mmrl train` in processes of their own, for tests that start, kill and read them."""

import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest

from mmrl.config.loader import load_recipe
from tests.support.ranks import Command, free_port

ROOT = Path(__file__).resolve().parents[2]
UNHURRIED = """
import time
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    time.sleep(0.4)  # so that there is time to stop, kill and freeze
    return [float(len(sample.text or "") % 2) for sample in samples]
"""
SMALL = [
    "train.steps=4",
    "train.prompts_per_step=4",
    "train.group_size=4",
    "train.micro_batch_size=4",
    "eval.every=2",
    "eval.samples=8",
    "checkpoint.every=1",
]
JUDGED = [
    "train.steps=3",
    "train.prompts_per_step=5",
    "train.group_size=4",
    "train.micro_batch_size=4",
    "eval.every=3",
    "eval.samples=8",
    "checkpoint.every=1",
    "rewards.0.batch_size=4",
]


def start(out, *overrides):
    reward = out.parent / "unhurried.py"
    reward.write_text(UNHURRIED)
    return train("sums", out, *SMALL, f'rewards=[{{name: "{reward}:score"}}]', *overrides)


def train(recipe, out, *words):
    return Command("mmrl.cli", ["train", recipe, *words, "--out", out], ROOT)


def ended(process, timeout=300):
    """The exit status and what the process printed."""
    try:
        said, _ = process.communicate(timeout=timeout)
    finally:
        for child in children(process.pid):
            child.kill()
        process.kill()
    return process.returncode, said


def children(pid):
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def actors(process):
    return [c for c in children(process.pid) if "ray::Actor" in " ".join(c.cmdline())]


def rows(out, name="metrics.jsonl"):
    return [json.loads(line) for line in (out / name).read_text().splitlines()] if (out / name).exists() else []


def learned(out):
    """Of every step what must be equal; floats part in the last digits after updates."""
    return [(row["step"], round(row["reward/mean"], 6), round(row["optim/grad_norm"], 4)) for row in rows(out)]


def wait_for(process, out, steps, timeout=600):
    deadline = time.monotonic() + timeout
    while len(rows(out)) < steps:
        assert time.monotonic() < deadline, "no progress"
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.05)


def lose_one(out, how, *overrides):
    """Start a run and lose its last process after the first step: that must be found, and the run end by itself."""
    process = start(out, *overrides)
    wait_for(process, out, 1)
    victim = actors(process)[-1]
    victim.send_signal(how)
    began = time.monotonic()
    while victim.is_running() and victim.status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() - began < 300, "the lost process was not ended"
        time.sleep(0.1)
    code, said = ended(process)
    assert code == 0, said
    assert "all controllers start again after step" in said
    if how == signal.SIGKILL:
        assert "died" in said
    else:
        assert int(re.findall(r"has given no sign of life for (\d+) s; it is stopped", said)[0]) >= 10


def run(recipe, out, *overrides):
    """A whole run; returns what it printed. Processes of several devices are started as Slurm starts them: forked from
    one that has imported all, they begin in a fraction of the time of Ray's, and compute the same."""
    first, *others = tasks(recipe, out, *overrides)
    try:
        code, said = ended(first)
    finally:
        found = [ended(one) for one in others]
    assert code == 0, said
    assert [code for code, _ in found] == [0] * len(found), found
    return said


def tasks(recipe, out, *words, size=None, each=(), vary=(), **more):
    """The processes of a run as Slurm would start them, ``size`` or as many as its devices. ``each``: words of one
    process; ``vary``: variables of one."""
    if size is None:
        loaded = load_recipe([recipe], [word for word in words if not word.startswith("--")]).recipe
        size = loaded.controllers * loaded.devices_per_controller
    if size == 1:
        return [train(recipe, out, *words)]
    port = str(free_port())
    found = []
    for rank in range(size):
        slurm = {"SLURM_PROCID": rank, "SLURM_NTASKS": size, "SLURM_LOCALID": rank, "SLURM_JOB_ID": 1}
        environ = {**os.environ, "SLURM_NODELIST": "localhost", "MASTER_PORT": port}
        environ |= {key: str(value) for key, value in (slurm | more).items()} | dict(vary[rank] if vary else {})
        own = each[rank] if each else ()
        found.append(Command("mmrl.cli", ["train", recipe, *words, *own, "--out", out], ROOT, environ))
    return found


def placed(out):
    return [json.loads(line) for line in (out / "placement.jsonl").read_text().splitlines()]


def alike(a, b):
    """Equal rewards, gradients and held-out figures, floats parting in the last digits after updates."""
    assert len(rows(a)) == len(rows(b)) > 0
    for mine, theirs in zip(rows(a), rows(b), strict=True):
        for key in ("reward/mean", "optim/grad_norm", "policy/ratio_max_dev"):
            assert mine.get(key, 0.0) == pytest.approx(theirs.get(key, 0.0), rel=1e-3, abs=1e-5), (mine["step"], key)
    same_heldout(rows(a, "heldout.jsonl"), rows(b, "heldout.jsonl"))


def same_heldout(ones, others):
    """A judge is shown pixels of eight bits, of which a last digit may turn one: 1.6e-3 of its mean was seen. The
    distance of texts is measured only where the model lies whole on a device. Where no prompt has two samples, each
    controller compares its own, so that diversity changes a little with their number."""
    judged = {"reward/judge": 2e-3, "guard/std/judge": 2e-3, "guard/change/judge": 2e-2}
    for mine, theirs in zip(ones, others, strict=True):
        assert mine.keys() ^ theirs.keys() <= {"guard/distance"}
        for key in mine.keys() & theirs.keys():
            rel = 0.05 if key.startswith("guard/diversity") else 1e-3
            assert mine[key] == pytest.approx(theirs[key], rel=rel, abs=judged.get(key, 1e-5)), (mine["step"], key)

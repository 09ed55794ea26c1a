"""The proof of teachers: what it pays for, its shares and their errors, and the recipes of its arms."""

import importlib
import random
import sys
from pathlib import Path
from statistics import stdev

import numpy as np
import pytest
from PIL import Image

from mmrl.config.loader import load_recipe
from mmrl.core.trajectory import Prompt, Sample, SampleId

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def proof():
    """The script, imported as its command imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("proof_teacher")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def tasks():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("teacher_tasks")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def test_pictures_are_paid_by_the_sort_of_their_prompt(tasks):
    pixels = np.zeros((4, 4, 3), np.uint8)
    pixels[:, :2] = 204  # the left half, 0.8 bright
    image = Image.fromarray(pixels)
    samples = [
        Sample(Prompt("p", "", meta={"data_source": k}), SampleId(0, n, 0, 0), image=image)
        for n, k in enumerate(tasks.DRAWN)
    ]
    assert tasks.shown(samples, context=None) == pytest.approx([0.4, 0.8, -0.8])
    assert tasks.shown(samples, context=None, only="leftward") == pytest.approx([0, 0.8, 0])


def test_the_error_of_a_share_is_what_shares_of_drawn_samples_spread_by(proof):
    rng, found, said = random.Random(0), [], []
    for _ in range(100):
        base = [rng.gauss(0, 1) for _ in range(40)]
        teacher = [b + 2 + rng.gauss(0, 0.5) for b in base]
        student = [b + 1.8 + rng.gauss(0, 0.8) for b in base]
        means = {"before": base, "teachers": teacher, "student": student}
        scores = {name: {"kind": sum(of) / 40} for name, of in means.items()}
        found.append(proof.shares(scores, "student")["kind"])
        said.append(proof.error(base, teacher, student))
    assert sum(found) / 100 == pytest.approx(0.9, abs=0.02)
    assert sum(said) / 100 == pytest.approx(stdev(found), rel=0.2)


def test_a_run_that_was_stopped_is_not_finished(proof, tmp_path):
    assert not proof.finished(tmp_path)
    (tmp_path / "ended.json").write_text('{"how": "stopped", "step": 7, "why": "SIGTERM"}')
    assert not proof.finished(tmp_path)
    (tmp_path / "ended.json").write_text('{"how": "finished", "step": 7, "why": "CPU budget spent"}')
    assert proof.finished(tmp_path)


@pytest.mark.parametrize("name", ["text", "pictures"])
def test_the_arms_are_recipes(proof, name):
    job = proof.JOBS[name]
    common = [*job.common, job.mixture(job.kinds)]
    listed = [{"model": "adapters/one", "prompts": kind} for kind in job.kinds]
    lessons = [job.paid(0), f"teacher={proof.json.dumps(listed)}", *job.student]
    student = load_recipe([job.recipe], [*common, *lessons]).recipe
    assert [teacher.prompts for teacher in student.teacher] == list(job.kinds)
    soup = load_recipe([job.recipe], [*common, job.apart, "algorithm.advantage_std=batch"]).recipe
    assert [reward.options["only"] for reward in soup.rewards] == list(job.kinds)

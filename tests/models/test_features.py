"""The feature store: what is held comes back from disk equal to the bit, nothing is left behind, nothing grows."""

import gc
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.controller.features import FeatureStore
from mmrl.core.clock import Clock
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt
from mmrl.training.loop import train_step
from tests.support.features import features, same
from tests.support.tiny_diffusion import two_blocks

ROOT = Path(__file__).resolve().parents[2]
CPU = Clock(torch.device("cpu"))
SMALL = ["train.prompts_per_step=4", "train.group_size=2", "train.micro_batch_size=4", "eval.samples=4"]
PICTURES = [*SMALL, "sampling.steps=2", "sampling.window={size: 1}", 'rewards=[{name: "jpeg:compressibility"}]']
RECIPES = {"diffusion": ("shapes-lora", PICTURES), "text": ("sums", [*SMALL, "sampling.max_new_tokens=4"])}


def store(folder, fits=2, n=100):
    return FeatureStore(fits * (14 * n + 9), str(folder))


def files(folder):
    return sorted(p.suffix for p in Path(folder).rglob("*") if p.is_file())


def test_what_is_held_goes_to_disk_and_comes_back_equal(tmp_path):
    kept = store(tmp_path)
    made = {name: features(100, seed) for seed, name in enumerate("abcd")}
    kept.hold(list(made))
    for name, tensors in made.items():
        kept.put(name, {k: t.clone() for k, t in tensors.items()})
    assert kept.bytes <= kept.budget_bytes
    assert kept.written_bytes == 2 * 1409
    assert files(tmp_path) == ["", ".safetensors", ".safetensors"]
    folder = next(tmp_path.iterdir())
    assert folder.stat().st_mode & 0o77 == 0  # of this user alone
    for _ in range(2):
        for name, tensors in made.items():
            assert kept.ref(name).shapes["mask"] == (3, 3)
            assert same(kept.get(name), tensors)
            assert kept.bytes <= kept.budget_bytes
    assert kept.written_bytes == 4 * 1409  # each once, however often it goes and comes
    kept.release(list("abc"))
    assert ("c" in kept, "d" in kept, kept.held) == (True, True, 1)
    assert "a" not in kept  # on disk and held by nobody
    assert len(files(tmp_path)) == 2
    kept.close()
    assert list(tmp_path.iterdir()) == []


def test_what_nobody_holds_is_dropped_before_anything_is_written(tmp_path):
    kept = store(tmp_path)
    kept.hold(["b", "c"])
    for name in "abc":
        kept.put(name, features(100))
    assert ("a" in kept, kept.written_bytes, list(tmp_path.iterdir())) == (False, 0, [])


def test_one_larger_than_the_budget_stays_while_it_is_new(tmp_path):
    kept = FeatureStore(1, str(tmp_path))
    kept.put("a", features(10))
    assert same(kept.get("a"), features(10))
    kept.put("b", features(10))
    assert "a" not in kept


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(["put", "get", "hold", "release", "drop"]), st.integers(0, 4)), max_size=60))
def test_whatever_is_asked_what_is_held_is_there_and_memory_bounded(asked):
    with tempfile.TemporaryDirectory() as folder:
        kept, held = store(folder, n=4), {}
        for what, seed in asked:
            key = str(seed)
            if what == "put" and key not in kept:
                kept.put(key, features(4, seed))
            elif what == "get" and key in kept:
                assert same(kept.get(key), features(4, seed))
            elif what == "hold" and key in kept:
                kept.hold([key])
                held[key] = held.get(key, 0) + 1
            elif what == "release" and held.get(key):
                kept.release([key])
                held[key] -= 1
            elif what == "drop" and not held.get(key):
                kept.drop(key)
            in_use = {k for k, n in held.items() if n}
            assert kept.held == len(in_use)
            assert all(same(kept.get(k), features(4, int(k))) for k in in_use)
            assert kept.bytes <= kept.budget_bytes
            assert len(files(folder)) <= 1 + len(in_use)  # the lock, and no file of what nobody holds
        kept.close()
        assert os.listdir(folder) == []


def test_a_full_disk_leaves_features_in_memory_with_one_warning(tmp_path, capsys):
    made = [features(2000, seed) for seed in range(4)]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))  # a real write fails beyond it
    try:
        kept = store(tmp_path, n=100)
        kept.hold(list("0123"))
        for n, one in enumerate(made):
            kept.put(str(n), one)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert kept.bytes > kept.budget_bytes
    assert all(kept.get(str(n)) is one for n, one in enumerate(made))
    said = capsys.readouterr().err
    assert said.count("warning: features past features.budget") == 1
    assert str(tmp_path) in said
    assert files(tmp_path) == [""]  # nothing torn is left
    kept.close()


def test_a_file_that_is_gone_is_named(tmp_path):
    kept = store(tmp_path)
    kept.hold(list("abc"))
    for name in "abc":
        kept.put(name, features(100))
    next(tmp_path.rglob("*.safetensors")).unlink()
    with pytest.raises(UserError, match=r"cannot be read back .*features.folder"):
        kept.get("a")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["", "os.kill(os.getpid(), 9)"])
def test_a_process_leaves_nothing_behind(tmp_path, end):
    program = (
        "import os, sys, torch\nfrom mmrl.controller.features import FeatureStore\n"
        "kept = FeatureStore(1, sys.argv[1])\nkept.hold(['a', 'b'])\n"
        "for key in 'ab':\n    kept.put(key, {'x': torch.zeros(99)})\n"
        f"assert kept.written_bytes\n{end}"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=not end, cwd=ROOT)
    assert len(list(tmp_path.iterdir())) == (1 if end else 0)
    living = store(tmp_path)  # the next one clears away what a killed one left
    living.hold(list("abc"))
    for name in "abc":
        living.put(name, features(100))
    other = store(tmp_path)  # and leaves alone what is in use
    other.hold(list("abc"))
    for name in "abc":
        other.put(name, features(100))
    assert len(list(tmp_path.iterdir())) == 2
    assert same(living.get("a"), features(100))
    living.close()
    other.close()


class Endless(Sequence):
    """4096 prompts that all differ, in the words of the run's own."""

    def __init__(self, run):
        self.prompts = run.prompts

    def __len__(self):
        return 4096

    def __getitem__(self, i):
        whole = self.prompts[i % len(self.prompts)]
        return Prompt(f"{whole.id}-{i}", f"{whole.text} {i}", meta=whole.meta)


def make(name, budget=None, endless=False, *overrides):
    recipe, changes = RECIPES[name]
    path = [f"model.path={two_blocks()}"] if name == "diffusion" else []
    loaded = load_recipe([recipe], [*path, *changes, *overrides])
    run = build(loaded.recipe)
    if budget is not None:
        run.pipeline.features.budget_bytes = budget
    if endless:
        object.__setattr__(run, "prompts", Endless(run))
    return run


@pytest.mark.parametrize("name", list(RECIPES))
def test_a_step_whose_features_lie_on_disk_is_the_same_step(name):
    plain, spilled = make(name), make(name, budget=1)
    for step in range(2):
        rows = [train_step(run, step, CPU)[0] for run in (plain, spilled)]
        assert rows[0] == rows[1]  # to the bit
    assert spilled.pipeline.features.written_bytes > plain.pipeline.features.bytes / 2
    assert plain.pipeline.features.written_bytes == 0
    assert spilled.pipeline.features.held == 0
    assert len(spilled.pipeline.features) == 1  # what was used last
    spilled.pipeline.close()


def growth(name, steps, every, full):
    """Resident MiB, bytes in the store, and held prompts, ``every`` so many steps: other prompts in each. The store is
    full after ``full`` steps."""
    run = make(name, endless=True)
    train_step(run, 0, CPU)
    run.pipeline.features.budget_bytes = full * run.pipeline.features.bytes
    found = []
    for step in range(1, steps + 1):
        train_step(run, step, CPU)
        if step % every == 0:
            gc.collect()
            kept = run.pipeline.features
            found.append((psutil.Process().memory_info().rss / 2**20, kept.bytes, kept.held, len(kept)))
    run.pipeline.close()
    assert kept.budget_bytes == max(kept.budget_bytes, *(bytes for _, bytes, _, _ in found))
    return found


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "text")) for n in RECIPES])
def test_nothing_is_held_after_steps_on_other_prompts(name):
    found = growth(name, 6, 2, full=3)
    assert all(held == 0 for _, _, held, _ in found)
    assert found[-1][3] <= found[1][3] + 2  # full: as many prompts as before


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.parametrize("name", list(RECIPES))
def test_nothing_grows_over_200_steps(name):
    found = growth(name, 200, 20, full=6)
    warm, last = found[2], found[-1]
    print(name, found)
    assert last[0] - warm[0] < 8, found  # MiB resident, from step 60 to step 200
    assert last[1] <= 1.1 * warm[1]
    assert last[2] == 0
    assert last[3] <= warm[3] + 4

"""Checkpoints are whole or absent."""

import random
import re
import resource
import signal
import subprocess
import sys
import time

import pytest
import torch

from mmrl.checkpoint import writer
from mmrl.core import checkpoint_reader as reader
from mmrl.core.checkpoint_reader import Checkpoint
from mmrl.core.errors import UserError
from tests.support import damage
from tests.support.checkpoint import make


def test_what_was_saved_comes_back(tmp_path):
    writer.save(tmp_path, make(3, 2.5), keep=2)
    found, skipped = reader.load_latest(tmp_path)
    assert found is not None
    assert (found.step, found.state, skipped) == (3, {"policy": {"updates": 3}}, [])
    assert torch.equal(found.tensors["weights"]["a"], torch.full((64, 8), 2.5))


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        writer.save(tmp_path, make(step), keep=2)
    assert reader.steps(tmp_path) == [3, 10]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000010"]


@pytest.mark.parametrize("harm", damage.ALL, ids=lambda harm: harm.__name__)
def test_a_torn_checkpoint_is_passed_over_by_name(tmp_path, harm):
    writer.save(tmp_path, make(1, 1.0), keep=3)
    directory = writer.save(tmp_path, make(2, 2.0), keep=3)
    says = harm(directory, directory / "weights.safetensors")
    assert says in damage.passed_over(tmp_path, 1, 2)
    with pytest.raises(UserError, match="is not whole"):
        reader.load(tmp_path, 2)


def test_several_torn_ones_are_all_named_and_none_may_be_left(tmp_path):
    for step, harm in enumerate(damage.ALL[:3], 1):
        directory = writer.save(tmp_path, make(step), keep=9)
        harm(directory, directory / "weights.safetensors")
    found, skipped = reader.load_latest(tmp_path)
    assert found is None
    named = [re.search(r"step_\d+", line) for line in skipped]
    assert [n and n[0] for n in named] == ["step_000003", "step_000002", "step_000001"]


def test_a_full_disk_leaves_the_last_one_alone(tmp_path):
    """A limit on file sizes stands for the full disk: the kernel refuses the write in the middle of the weights."""
    writer.save(tmp_path, make(1), keep=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"."):
            writer.save(tmp_path, make(2), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001"]
    found, _ = reader.load_latest(tmp_path)
    assert found is not None


def test_nothing_saved_is_no_error(tmp_path):
    assert reader.load_latest(tmp_path / "none") == (None, [])


def grow(checkpoint):
    """The run goes on: its tensors change in place."""
    for tensors in checkpoint.tensors.values():
        for t in tensors.values():
            t += 1


def test_what_is_saved_is_what_was_there_when_the_saving_began(tmp_path):
    saver = writer.Saver(tmp_path, keep=2)
    run = make(1, 5.0)
    for step in (1, 2, 3):
        saver.begin(Checkpoint(step, run.tensors, {"policy": {"updates": step}}))
        grow(run)
    assert saver.saved == 2  # the third is being written, or it is not asked for yet
    saver.finish()
    assert (saver.saved, saver.failed) == (3, None)
    assert [reader.load(tmp_path, n).tensors["weights"]["a"][0, 0].item() for n in (2, 3)] == [6, 7]


def test_a_disk_that_is_full_is_told_and_the_next_save_is_tried(tmp_path, capsys):
    saver = writer.Saver(tmp_path, keep=2)
    saver.begin(make(1))
    saver.finish()
    (tmp_path / ".tmp-step_000002").write_text("a file where a directory belongs")
    saver.begin(make(2))
    saver.finish()
    assert saver.saved == 1
    assert "the checkpoint of step 2 could not be saved" in str(saver.failed)
    assert "the last whole one is step 1" in capsys.readouterr().err
    saver.begin(make(3))
    saver.finish()
    assert (saver.saved, saver.failed) == (3, None)


def test_only_the_leader_writes_what_all_hold(tmp_path):
    saver = writer.Saver(tmp_path, keep=2, leads=False)
    saver.begin(make(4))
    saver.finish()
    assert saver.saved == 4
    assert reader.steps(tmp_path) == []


KILLED = """
import sys
import torch
from pathlib import Path
from mmrl.core.checkpoint_reader import Checkpoint
from mmrl.checkpoint.writer import Saver

saver = Saver(Path(sys.argv[1]), keep=2)
for step in range(1, 10_000):
    weights = {str(n): torch.full((500, 1000), float(step)) for n in range(4)}
    saver.begin(Checkpoint(step, {"weights": weights}, {"step": step}))
    print(f"{step} {saver.saved}\\n", end="", flush=True)  # in one write, also where Python does not buffer
"""


def test_a_controller_that_cannot_write_what_it_alone_has_stops_the_save_everywhere(tmp_path):
    rows = {"flight-1": {"clean": torch.zeros(2, 0, dtype=torch.long)}}
    taken = reader.Checkpoint(3, {"weights": {"w": torch.zeros(2)}} | rows, {}, frozenset(rows))
    others = writer.write_own_parts(
        tmp_path, taken, leads=False, gather=lambda said: [{"parts": [], "error": None}, said]
    )
    assert others == ["flight-1"]
    assert [p.name for p in tmp_path.rglob("*.safetensors")] == ["flight-1.safetensors"]  # and not the weights
    torn = tmp_path / "file"
    torn.touch()
    with pytest.raises(OSError, match="Not a directory"):
        writer.write_own_parts(torn, taken, leads=False, gather=lambda said: [said])
    full, unseen = {"parts": [], "error": "no space"}, {"parts": ["flight-2"], "error": None}
    for leads in (True, False):
        with pytest.raises(OSError, match="no space"):
            writer.write_own_parts(tmp_path, taken, leads=leads, gather=lambda said: [said, full])
    for of_another, why in ((full, "no space"), (unseen, "No such file")):
        saver = writer.Saver(tmp_path, keep=1, gather=lambda said, other=of_another: [said, other])
        saver.begin(taken)
        saver.finish()
        assert why in saver.failed
        assert saver.saved == 0
        assert not reader.steps(tmp_path)


@pytest.mark.slow
def test_kill_9_at_any_moment_leaves_a_whole_checkpoint(tmp_path):
    generator = random.Random(0)
    for n in range(3):
        folder = tmp_path / str(n)
        process = subprocess.Popen([sys.executable, "-c", KILLED, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for _ in range(3):
            told = process.stdout.readline().split()
        time.sleep(generator.uniform(0, 0.3))
        process.kill()
        told = (process.stdout.read().splitlines() or [" ".join(told)])[-1].split() or told
        found, _ = reader.load_latest(folder)
        assert found is not None
        assert found.step >= int(told[1]) > 0  # nothing that was said to be saved is lost
        assert found.state == {"step": found.step}
        assert all(
            torch.equal(t, torch.full((500, 1000), float(found.step))) for t in found.tensors["weights"].values()
        )
        saver = writer.Saver(folder, keep=2)  # what was half written is in nobody's way
        saver.begin(make(20_000))
        saver.finish()
        assert not list(folder.glob(".tmp*"))

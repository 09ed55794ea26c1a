"""Checkpoints are whole or absent."""

import json
import resource
import signal

import pytest
import torch

from mmrl import checkpoint, saving
from mmrl.checkpoint import Checkpoint
from mmrl.errors import UserError


def make(step, value=1.0):
    tensors = {"weights": {"a": torch.full((64, 8), value)}, "optimizer": {}}
    return Checkpoint(step, tensors, {"policy": {"updates": step}})


def test_what_was_saved_comes_back(tmp_path):
    saving.save(tmp_path, make(3, 2.5), keep=2)
    found, skipped = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert (found.step, found.state, skipped) == (3, {"policy": {"updates": 3}}, [])
    assert torch.equal(found.tensors["weights"]["a"], torch.full((64, 8), 2.5))


def test_only_the_newest_are_kept(tmp_path):
    for step in (1, 2, 3, 10):
        saving.save(tmp_path, make(step), keep=2)
    assert checkpoint.steps(tmp_path) == [3, 10]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000003", "step_000010"]


def damage_truncate(path):
    data = (path / "weights.safetensors").read_bytes()
    (path / "weights.safetensors").write_bytes(data[: len(data) // 2])


def damage_flip(path):
    data = bytearray((path / "weights.safetensors").read_bytes())
    data[-5] ^= 1
    (path / "weights.safetensors").write_bytes(data)


def damage_delete(path):
    (path / "weights.safetensors").unlink()


def damage_manifest(path):
    (path / "manifest.json").write_text('{"files": ')


def damage_state(path):
    (path / "state.json").write_text(json.dumps({"policy": {"updates": 99}}))


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (damage_truncate, "weights.safetensors has"),
        (damage_flip, "weights.safetensors does not match its checksum"),
        (damage_delete, "weights.safetensors is missing"),
        (damage_manifest, "manifest.json cannot be read"),
        (damage_state, "state.json"),
    ],
)
def test_a_torn_checkpoint_is_passed_over_by_name(tmp_path, damage, says):
    saving.save(tmp_path, make(1, 1.0), keep=3)
    damage(saving.save(tmp_path, make(2, 2.0), keep=3))
    found, skipped = checkpoint.load_latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(skipped) == 1
    assert "step_000002" in skipped[0]
    assert says in skipped[0]
    with pytest.raises(UserError, match="is not whole"):
        checkpoint.load(tmp_path, 2)


def test_a_full_disk_leaves_the_last_one_alone(tmp_path):
    """A limit on file sizes stands for the full disk: the kernel refuses the write in the middle of the weights."""
    saving.save(tmp_path, make(1), keep=1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(OSError, match=r"."):
            saving.save(tmp_path, make(2), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000001"]
    found, _ = checkpoint.load_latest(tmp_path)
    assert found is not None


def test_nothing_saved_is_no_error(tmp_path):
    assert checkpoint.load_latest(tmp_path / "none") == (None, [])

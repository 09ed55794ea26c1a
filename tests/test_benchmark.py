"""The step benchmark: its arms do the same work and its output is whole. No time is judged here."""

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def modules():
    """The benchmark, its arms and its peer, imported as its command imports them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield [importlib.import_module(name) for name in ("diffusion_step", "diffusion_arms", "peer_flow_grpo")]
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def model(modules, tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark") / "tiny"
    modules[1].write_model(modules[1].SIZES["tiny"], path)
    return path


@pytest.fixture(scope="module")
def run(modules, model):
    return modules[1].make_run(modules[1].SIZES["tiny"], model, lora=4)


def test_output_is_whole(modules, tmp_path, capsys):
    step, arms, _ = modules
    step.main(["--sizes", "tiny", "--repeats", "2", "--memory-repeats", "0", "--json", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    found = result["sizes"]["tiny"]
    assert list(found["arms"]) == ["bare", "mmrl"]
    for name, arm in found["arms"].items():
        expected = set(arms.PHASES) - ({"reward"} if name == "bare" else set())
        assert len(arm["seconds"]) == 2
        for row in arm["seconds"]:
            assert set(row) == expected | {"total"}
            assert 0 < sum(row[p] for p in expected) <= row["total"]
    pairs = zip(found["arms"]["mmrl"]["seconds"], found["arms"]["bare"]["seconds"], strict=True)
    low, high = sorted(ours["total"] / bare["total"] for ours, bare in pairs)
    assert found["ratios"]["mmrl / bare"] == pytest.approx(
        {"median": (low + high) / 2, "q1": low + (high - low) / 4, "q3": high - (high - low) / 4}
    )
    assert result["environment"]["cpu"]["name"]
    assert result["peer"] is None
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert {line.count("|") for line in table} == {table[0].count("|")}


def test_bare_repeats_the_calls_of_our_iteration(modules, run):
    step, arms, _ = modules
    before = {name: p.detach().clone() for name, p in run.policy.trainable.items()}
    _, work, calls = step.warm_up(["bare", "mmrl"], run, None)
    # 2 prompts x 2 samples in 2 micro-batches, 4 steps of which 2 train
    assert work["mmrl"]["sample transformer"] == {"calls": 8, "rows": 16}
    assert work["mmrl"]["train transformer"] == {"calls": 4, "rows": 8}
    assert work["mmrl"]["decode vae"] == {"calls": 2, "rows": 4}
    assert work["mmrl"]["encode text_encoder_0"] == {"calls": 2, "rows": 2}
    assert work["bare"] == work["mmrl"]
    assert any((p != before[name]).any() for name, p in run.policy.trainable.items()), "our iteration trained nothing"
    with pytest.raises(ValueError, match=r"do not do the same work; only in mmrl: .*train transformer"):
        arms.same_work({"mmrl": calls, "bare": calls[:-1]})


def test_bare_computes_the_gradients_of_every_trained_weight(modules, run, monkeypatch):
    step, arms, _ = modules
    with arms.recording(run) as calls:
        arms.ours(run)(0, step.Clock(step.CPU))
    graded = []
    plain = step.torch.optim.AdamW.step
    monkeypatch.setattr(
        step.torch.optim.AdamW,
        "step",
        lambda self: graded.extend(p.grad is not None for g in self.param_groups for p in g["params"]) or plain(self),
    )
    arms.bare(run, calls)(0, step.Clock(step.CPU))
    assert graded == [True] * len(run.policy.trainable)
    assert all(p.grad is None for p in run.policy.trainable.values())


def test_per_sample_arm_encodes_every_sample(modules, run):
    step, _, _ = modules
    _, work, _ = step.warm_up(["mmrl", "mmrl-per-sample"], run, None)
    assert work["mmrl"]["encode text_encoder_2"]["rows"] == 2
    assert work["mmrl-per-sample"]["encode text_encoder_2"]["rows"] == 4


def test_calls_survive_a_file(modules, run, tmp_path):
    step, arms, _ = modules
    with arms.recording(run) as calls:
        arms.ours(run)(0, step.Clock(step.CPU))
    arms.save_calls(calls, tmp_path / "calls.pt")
    assert [c.shapes() for c in arms.load_calls(tmp_path / "calls.pt")] == [c.shapes() for c in calls]


def test_a_peer_without_its_fast_scripts_is_refused_with_their_names(modules, tmp_path, capsys):
    step, _, peer = modules
    for name in peer.FILES[1:]:
        (tmp_path / "flow_grpo" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "flow_grpo" / name).touch()
    with pytest.raises(SystemExit) as stopped:
        step.main(["--peer", str(tmp_path)])
    assert stopped.value.code == 2
    message = capsys.readouterr().err
    assert peer.FILES[0] in message
    assert peer.FILES[1] not in message
    (tmp_path / "flow_grpo" / peer.FILES[0]).touch()
    assert peer.find(tmp_path) == tmp_path / "flow_grpo"  # carried by another project
    assert peer.find(tmp_path / "flow_grpo") == tmp_path / "flow_grpo"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_memory_is_measured_in_a_process_of_its_own(modules, run, model, tmp_path):
    step, arms, _ = modules
    with arms.recording(run) as calls:
        arms.ours(run)(0, step.Clock(step.CPU))
    arms.save_calls(calls, tmp_path / "calls.pt")
    for name in ("bare", "mmrl"):
        found = step.memory_of(name, "tiny", argparse.Namespace(lora=4, peer=None), model, tmp_path / "calls.pt")
        assert 50 < found["built"] < found["peak"] < 4000


@pytest.mark.slow
@pytest.mark.skipif("FLOW_GRPO" not in os.environ, reason="set FLOW_GRPO to a checkout of flow_grpo")
def test_the_peer_computes_what_we_compute(modules, run):
    step, _, peer = modules
    root = peer.find(Path(os.environ["FLOW_GRPO"]))
    step.warm_up(["bare", "mmrl", "mmrl-per-sample", "flow_grpo"], run, root)
    assert max(peer.parity(peer.load(root), run).values()) < 1e-5

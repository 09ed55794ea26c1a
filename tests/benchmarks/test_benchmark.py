"""The step benchmarks: their arms do the same work and their output is whole. No time is judged here."""

import dataclasses
import importlib
import json
import os
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


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


@pytest.mark.slow
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
            assert set(row) == expected | {"total", "cpu"}
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
    _, work, calls = step.warm_up(["bare", "mmrl"], run, {})
    # 2 prompts x 2 samples in 2 micro-batches, 4 steps of which 2 train
    assert work["mmrl"]["sample transformer"] == {"calls": 8, "rows": 16}
    assert work["mmrl"]["train transformer"] == {"calls": 4, "rows": 8}
    assert work["mmrl"]["decode vae"] == {"calls": 2, "rows": 4}
    assert work["mmrl"]["encode text_encoder_0"] == {"calls": 2, "rows": 2}
    assert work["bare"] == work["mmrl"]
    assert any((p != before[name]).any() for name, p in run.policy.trainable.items()), "our iteration trained nothing"
    with pytest.raises(ValueError, match=r"do not do the same work; only in mmrl: .*train transformer"):
        arms.same_work({"mmrl": calls, "bare": calls[:-1]})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "target"), [("flux", "transformer"), ("unet", "unet"), ("wan", "transformer")])
def test_every_family_has_its_bare_arm(modules, tmp_path, name, target):
    step, arms, _ = modules
    less = {"pixels": 64, "steps": 3, "window": 1, "prompts": 1, "group": 2, "micro_batch": 2}
    size = dataclasses.replace(arms.SIZES[name], **less, frames=5 if name == "wan" else None)
    arms.write_model(size, tmp_path / name)
    run = arms.make_run(size, tmp_path / name, lora=4)
    made, work, _ = step.warm_up(["bare", "mmrl"], run, {})
    assert work["mmrl"][f"sample {target}"] == {"calls": 3, "rows": 6}
    assert work["mmrl"][f"train {target}"] == {"calls": 1, "rows": 2}
    assert work["mmrl"]["decode vae"]["rows"] == 2
    made["bare"](0, step.Clock(step.CPU))
    with pytest.raises(SystemExit):
        step.parse(["--sizes", name, "--peer", str(tmp_path)])


def test_bare_computes_the_gradients_of_every_trained_weight(modules, run, monkeypatch):
    step, arms, _ = modules
    with arms.recording(run) as calls:
        arms.ours(run)(0, step.Clock(step.CPU))
    graded = []
    plain = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self: graded.extend(p.grad is not None for g in self.param_groups for p in g["params"]) or plain(self),
    )
    arms.bare(run, calls)(0, step.Clock(step.CPU))
    assert graded == [True] * len(run.policy.trainable)
    assert all(p.grad is None for p in run.policy.trainable.values())


def test_per_sample_arm_encodes_every_sample(modules, run):
    step, _, _ = modules
    _, work, _ = step.warm_up(["mmrl", "mmrl-per-sample"], run, {})
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
    for word, said in (
        (f"flow_factory={tmp_path}", "src/flow_factory/trainers/grpo.py"),
        (f"trl={tmp_path}", "give flow_grpo=PATH or flow_factory=PATH"),
    ):
        with pytest.raises(SystemExit):
            step.main(["--peer", word])
        assert said in capsys.readouterr().err


@pytest.mark.slow
def test_settings_are_compared_by_whole_steps(modules, monkeypatch, capsys):
    settings = importlib.import_module("settings_step")
    tiny = ["train.prompts_per_step=1", "train.group_size=2", "train.micro_batch_size=2", "sampling.steps=3"]
    monkeypatch.setattr(sys, "argv", ["settings_step.py", "shapes-lora", *tiny, "--repeats", "2", "--arm", "the same"])
    settings.main()
    found = dict(line.split(": ", 1) for line in capsys.readouterr().out.splitlines())
    assert found["the same, gradient norms"] == found["as given, gradient norms"]
    assert set(found) == {
        f"{arm}, {what}"
        for arm in ("as given", "the same")
        for what in ("sample", "train", "total", "cpu", "gradient norms", "first ratios")
    }


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_memory_is_measured_in_a_process_of_its_own(modules, run, model, tmp_path):
    step, arms, _ = modules
    with arms.recording(run) as calls:
        arms.ours(run)(0, step.Clock(step.CPU))
    arms.save_calls(calls, tmp_path / "calls.pt")
    for name in ("bare", "mmrl"):
        found = step.stepping.memory_of(step.__file__, name, "tiny", model, tmp_path / "calls.pt", "--lora", "4")
        assert 50 < found["built"] < found["peak"] < 4000


@pytest.mark.slow
@pytest.mark.skipif("FLOW_GRPO" not in os.environ, reason="set FLOW_GRPO to a checkout of flow_grpo")
def test_the_peer_computes_what_we_compute(modules, run):
    step, _, peer = modules
    root = peer.find(Path(os.environ["FLOW_GRPO"]))
    step.warm_up(["bare", "mmrl", "mmrl-per-sample", "flow_grpo"], run, {"flow_grpo": root})
    assert max(peer.parity(peer.load(root), run).values()) < 1e-5


@pytest.mark.slow
@pytest.mark.skipif("FLOW_FACTORY" not in os.environ, reason="set FLOW_FACTORY to a checkout of Flow-Factory")
def test_flow_factory_computes_what_we_compute(modules, run):
    step, _, _ = modules
    peer, root = step.PEERS["flow_factory"], Path(os.environ["FLOW_FACTORY"])
    _, work, _ = step.warm_up(["bare", "mmrl", "flow_factory"], run, {"flow_factory": root})
    for call, found in work["mmrl"].items():  # a prompt is encoded once by both
        assert work["flow_factory"][call]["rows"] == found["rows"], call
    assert max(peer.parity(peer.load(root), run).values()) < 1e-5
    theirs = peer.Theirs(peer.load(root), run)
    before = {name: p.detach().clone() for name, p in run.policy.trainable.items()}
    theirs.iterate(1, step.Clock(step.CPU))
    assert theirs.trainer.step == 1, "one optimizer step an iteration"
    assert any((p != before[name]).any() for name, p in run.policy.trainable.items())


@pytest.fixture(scope="module")
def text_modules():
    """The benchmark of text, its arms and its peer, imported as its command imports them."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield [importlib.import_module(name) for name in ("llm_step", "llm_arms", "peer_trl")]
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture(scope="module")
def text_model(text_modules, tmp_path_factory):
    path = tmp_path_factory.mktemp("benchmark") / "tiny"
    text_modules[1].write_model(text_modules[1].SIZES["tiny"], path)
    return path


@pytest.fixture(scope="module")
def text_run(text_modules, text_model):
    return text_modules[1].make_run(text_modules[1].SIZES["tiny"], text_model)


@pytest.mark.slow
def test_output_of_the_text_benchmark_is_whole(text_modules, tmp_path, capsys):
    step, arms, _ = text_modules
    step.main(["--sizes", "tiny", "--repeats", "2", "--memory-repeats", "0", "--json", str(tmp_path / "out.json")])
    result = json.loads((tmp_path / "out.json").read_text())
    found = result["sizes"]["tiny"]
    assert list(found["arms"]) == ["bare", "mmrl"]
    for name, arm in found["arms"].items():
        expected = {"sample", "train"} if name == "bare" else set(arms.PHASES)
        for row in arm["seconds"]:
            assert set(row) == expected | {"total", "cpu"}
            assert 0 < sum(row[p] for p in expected) <= row["total"]
    for key, of in (("ratios", "total"), ("cpu_ratios", "cpu")):
        pairs = zip(found["arms"]["mmrl"]["seconds"], found["arms"]["bare"]["seconds"], strict=True)
        assert found[key]["mmrl / bare"]["median"] == pytest.approx(sum(a[of] / b[of] for a, b in pairs) / 2)
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(table) == 4
    assert {line.count("|") for line in table} == {table[0].count("|")}


def test_bare_repeats_the_calls_of_our_text_step(text_modules, text_run):
    step, arms, _ = text_modules
    before = {name: p.detach().clone() for name, p in text_run.policy.trainable.items()}
    _, work, calls = step.warm_up(["bare", "mmrl"], text_run, None)
    size, prompt = arms.SIZES["tiny"], calls[0].kwargs["input_ids"].shape[1]
    rows, new = size.rows, size.new_tokens
    assert work["mmrl"] == {
        "prefill": {"calls": 1, "tokens": rows * prompt},
        "decode": {"calls": new - 1, "tokens": rows * (new - 1)},  # the last token is drawn and never read
        "train": {"calls": rows // size.micro_batch, "tokens": rows * (prompt + new)},
    }
    assert work["bare"] == work["mmrl"]
    assert [c.past for c in calls] == [0, *range(prompt, prompt + new - 1), *[None] * (rows // size.micro_batch)]
    assert any((p != before[name]).any() for name, p in text_run.policy.trainable.items()), "our step trained nothing"
    with pytest.raises(ValueError, match=r"do not do the same work; only in mmrl: .*'train'"):
        arms.same_work({"mmrl": calls, "bare": calls[:-1]})
    emptier = [arms.Call(c.train, c.past and c.past - 1, c.kwargs) for c in calls]
    with pytest.raises(ValueError, match=r"do not do the same work; only in mmrl: .*'decode'"):
        arms.same_work({"mmrl": calls, "bare": emptier})


def test_the_bare_text_arm_computes_the_same_logits_and_every_gradient(text_modules, text_run, monkeypatch):
    """It decodes over a cache of its own: were that not filled, its logits would be others than ours."""
    step, arms, _ = text_modules
    seen = {"mmrl": [], "bare": []}
    model = text_run.pipeline.policy
    kept = {name: p.detach().clone() for name, p in model.state_dict().items()}
    with arms.recording(model) as calls:
        hook = model.register_forward_hook(lambda m, a, out: seen["mmrl"].append(out.logits.detach().clone()))
        arms.ours(text_run)(0, step.Clock(step.CPU))
        hook.remove()
    model.load_state_dict(kept)
    graded = []
    plain = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW,
        "step",
        lambda self: graded.extend(p.grad is not None for g in self.param_groups for p in g["params"]) or plain(self),
    )
    hook = model.register_forward_hook(lambda m, a, out: seen["bare"].append(out.logits.detach().clone()))
    arms.bare(text_run, calls)(0, step.Clock(step.CPU))
    hook.remove()
    assert len(seen["mmrl"]) == len(seen["bare"]) == len(calls)
    for mine, theirs in zip(seen["mmrl"], seen["bare"], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)
    assert graded == [True] * len(text_run.policy.trainable)


def test_nobody_can_draw_the_end_token(text_modules, text_model, text_run):
    _, arms, _ = text_modules
    size = arms.SIZES["tiny"]
    assert text_run.pipeline.conditioner.stop_tokens == [size.vocabulary]
    assert text_run.pipeline.policy.get_output_embeddings().weight.shape[0] == size.vocabulary
    tokenizer = text_run.pipeline.conditioner.saved
    for text in ("Hello, W\u00f6rld <|pad|>!", "\n\t 0123"):
        assert tokenizer.decode(tokenizer(text).input_ids) == text
    lengths = {len(text_run.pipeline.conditioner.encode(p)["input_ids"]) for p in arms.prompts("train")}
    assert len(lengths) == 1


def test_calls_of_text_survive_a_file(text_modules, text_run, tmp_path):
    step, arms, _ = text_modules
    with arms.recording(text_run.pipeline.policy) as calls:
        arms.ours(text_run)(0, step.Clock(step.CPU))
    arms.save_calls(calls, tmp_path / "calls.pt")
    assert [c.shape() for c in arms.load_calls(tmp_path / "calls.pt")] == [c.shape() for c in calls]


def test_a_peer_that_is_not_installed_is_refused(text_modules, monkeypatch, capsys):
    step, _, peer = text_modules
    monkeypatch.setattr(peer, "version", lambda: None)
    with pytest.raises(SystemExit) as stopped:
        step.main(["--peer"])
    assert stopped.value.code == 2
    assert "TRL is not installed here; pip install" in capsys.readouterr().err


@pytest.mark.slow
def test_trl_does_the_same_work_and_computes_the_same_gradient(text_modules, text_model, text_run):
    pytest.importorskip("trl")
    step, arms, trl = text_modules
    with step.opened(arms.SIZES["tiny"], text_model) as peer:
        made, work, _ = step.warm_up(["bare", "mmrl", "trl"], text_run, peer)
        assert work["trl"] == work["mmrl"] == work["bare"]
        before = {name: p.detach().clone() for name, p in peer.model.named_parameters()}
        rows = step.stepping.measure(made, 4)
        assert any((p != before[name]).any() for name, p in peer.model.named_parameters()), "TRL trained nothing"
        assert peer.trainer.state.global_step == 5
        assert all(row["sample"] + row["train"] <= row["total"] * (1 + 1e-9) for row in rows["trl"])
        assert trl.parity(peer, text_run)["gradient"] < 1e-5
    assert not peer._thread.is_alive()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from /proc")
def test_memory_of_text_arms_is_measured_in_a_process_of_its_own(text_modules, text_run, text_model, tmp_path):
    step, arms, peer = text_modules
    with arms.recording(text_run.pipeline.policy) as calls:
        arms.ours(text_run)(0, step.Clock(step.CPU))
    arms.save_calls(calls, tmp_path / "calls.pt")
    for name in ("bare", "mmrl", *(["trl"] if peer.version() else [])):
        found = step.stepping.memory_of(step.__file__, name, "tiny", text_model, tmp_path / "calls.pt")
        assert 50 < found["built"] < found["peak"] < 4000

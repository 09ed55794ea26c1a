"""The calibration of a machine: what is measured, kept and read, and what a plan says without it."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.core.reward_contract import Asks, Weights
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.planner import calibration, calibration_file
from mmrl.planner.calibration import Over
from mmrl.planner.calibration_file import find, keep, key_of
from mmrl.planner.fake_tensors import LiveBytes
from mmrl.planner.judge_work import answering
from mmrl.planner.operations import Call, Work
from mmrl.planner.plan import plan
from mmrl.planner.rates import ALIKE, Calibrated, place, rate_at, seconds
from tests.support.calibration import EVEN
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()

CRITIC = Path(__file__).resolve().parents[2] / "pipelines" / "llm" / "models" / "sums-critic"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_was_kept_is_found_again_and_only_for_this_machine():
    key = key_of("cpu", 1)
    assert find(key, "float32") == (None, "not calibrated: run mmrl doctor --calibrate (half a minute)")
    file = keep(key, EVEN)
    assert find(key, "float32") == (EVEN, "")
    for other, said in (
        (replace(key, threads=7), "threads 1 instead of 7"),
        (replace(key, host="elsewhere"), f"host {key.host} instead of elsewhere"),
        (replace(key, torch="9.9"), f"torch {key.torch} instead of 9.9"),
        (replace(key, device="a GPU"), f"device {key.device} instead of a GPU"),
    ):
        found, why = find(other, "float32")
        assert found is None
        assert said in why
        other.file.write_bytes(file.read_bytes())  # by hand
        found, why = find(other, "float32")
        assert found is None
        assert "is not used" in why
        other.file.unlink()
    found, why = find(key, "bfloat16")
    assert found is None
    assert "has no bfloat16" in why


def changed(content, path, value):
    *way, last = path
    at = content
    for part in way:
        at = at[part]
    at[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["calibration", "launches", "graph"], -1.0),
        (["calibration", "launches", "graph"], 0),
        (["calibration", "launches", "view"], "1e-6"),
        (["calibration", "launches"], {}),
        (["calibration", "timings"], []),
        (["calibration", "timings"], [["product", "float32", [1, 2], 1.0, 1e300]]),
        (["calibration", "timings"], [["product", "float32", [1] * 100, 1.0, 1.0]]),
        (["calibration", "timings"], [["product", "float32", [1, 1, 1], 1.0, 1.0]]),
        (["calibration", "timings"], [["product", "float32", [0, 1, 1, 1], 1.0, 1.0]]),
        (["calibration", "timings", 0, 3], 0),
        (["calibration", "timings", 0, 2], [1, 1, 1]),
        (["calibration", "timings", 5, 0], "mul"),
        (["calibration", "dtypes"], "float32"),
        (["calibration", "kind"], "tpu"),
        (["key"], None),
        (["key", "threads"], 10**30),
    ],
)
def test_a_file_that_mmrl_does_not_write_is_not_used_and_said(path, value):
    key = key_of("cpu", 1)
    file = keep(key, EVEN)
    file.write_text(json.dumps(changed(json.loads(file.read_text()), path, value)))
    found, why = find(key, "float32")
    assert found is None
    assert "the calibration is not used" in why
    assert str(file) in why
    assert "mmrl doctor --calibrate" in why


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff" * 9, b"[" * 100_000, b'{"key": NaN}', b" " * (2 << 20)])
def test_a_broken_file_is_not_used_and_said(content):
    key = key_of("cpu", 1)
    keep(key, EVEN).write_bytes(content)
    found, why = find(key, "float32")
    assert found is None
    assert "the calibration is not used" in why


def test_the_seconds_of_operators_worked_out_by_hand():
    rates = Calibrated(EVEN)
    flops = 2 * 1024 * 128 * 128
    product = Call("product", "float32", (1, 1024, 128, 128), flops, 0, "forward")
    least = flops / 1e9 - 2e-6  # without the start of the operator that was timed
    assert seconds(Work({product: 3}), rates) == pytest.approx(3 * (least + 1e-5))
    graph, back = product._replace(mode="graph"), product._replace(mode="backward")
    assert seconds(Work({graph: 1, back: 1}), rates) == pytest.approx(2 * least + 2e-5 + 5e-6)
    moved = Call("an operator that nobody timed", "int64", (), 0, 10**6, "forward")
    assert seconds(Work({moved: 1}), rates) == pytest.approx(1e-3 + 1e-5, rel=1e-4)
    assert seconds(Work({product._replace(kind="view"): 5}), rates) == pytest.approx(5e-6)


def test_a_rate_is_that_of_the_nearest_measurements():
    points = [((4.0, 4.0), 1.0), ((8.0, 4.0), 100.0)]
    assert rate_at(points, (4.0, 4.0)) == 1.0
    assert rate_at(points, (6.0, 4.0)) == pytest.approx(10.0), "between two, the geometric mean"
    assert 1.0 < rate_at(points, (5.0, 4.0)) < 10.0
    assert rate_at(points[:1], (40.0, 0.0)) == 1.0
    assert place("product", (3, 16, 1024, 64), 1.0) == place("product", (3, 1024, 64, 16), 1.0)


def test_operators_are_told_apart():
    x = torch.randn(4, 6, requires_grad=True)
    with LiveBytes() as seen:
        y = (x @ x.t()).exp().view(16)
        y.sum().backward()
        x.detach().t().contiguous()
    kinds = {(call.kind, call.mode) for call in seen.work}
    assert {("product", "graph"), ("product", "backward"), ("exp", "graph"), ("transpose", "graph")} <= kinds
    assert ("view", "graph") in kinds
    (product,) = {call for call in seen.work if (call.kind, call.mode) == ("product", "graph")}
    assert (product.flops, product.sizes) == (2 * 4 * 6 * 4, (1, 4, 6, 4))
    assert product.nbytes == 4 * (24 + 24 + 16)
    assert all(name not in ALIKE.values() or name == "pow" for name in ALIKE), "no chains"


@pytest.mark.slow
def test_a_measurement_of_a_small_machine_has_all_that_a_plan_reads(monkeypatch):
    monkeypatch.setattr(calibration, "LEAST", 1e-5)
    monkeypatch.setattr(calibration, "ROUNDS", 1)
    monkeypatch.setattr(calibration, "_MOST", {"cpu": 1e6})
    monkeypatch.setattr(calibration, "_BYTES", {"cpu": (1 << 14,)})
    made = calibration.measure("cpu", [torch.float32])
    keep(key_of("cpu"), made)
    assert find(key_of("cpu"), "float32") == (made, "")
    assert {"product", "attention", "attention_backward", "convolution", "convolution_backward", "add"} <= {
        one.kind for one in made.timings
    }
    assert min(asdict(made.launches).values()) > 0


def test_a_plan_says_an_interval_and_whether_it_is_calibrated():
    small = ["train.prompts_per_step=2", "train.group_size=2", "train.micro_batch_size=4", f"model.path={two_blocks()}"]
    loaded = load_recipe(["shapes-lora"], [*small, "model.dtype=float32", "device=cpu", "threads=3"])
    made = plan(loaded)
    assert not made.time.calibrated
    assert made.uncalibrated.startswith("not calibrated: ")
    keep(key_of("cpu", 3), EVEN)
    calibrated = plan(loaded)
    low, high = calibrated.time.interval
    assert calibrated.time.calibrated
    assert calibrated.uncalibrated == ""
    assert high <= 1.5 * low
    assert made.time.interval[1] / made.time.interval[0] > high / low
    assert calibrated.of_a_step == {"plan/step_seconds": calibrated.time.step}


def test_what_cannot_be_read_raises_nothing_else(cache):
    calibration_file.folder().mkdir(parents=True)
    key_of("cpu", 1).file.mkdir()
    found, why = find(key_of("cpu", 1), "float32")
    assert found is None
    assert "is not used" in why


def test_whole_models_and_the_code_around_a_token_take_what_was_measured():
    over = Over(forward=1.5, train=2.0, token=3e-4)
    plain, whole = Calibrated(EVEN), Calibrated(replace(EVEN, over=over))
    moved = Call("add", "float32", (), 0, 10**6, "forward")
    for mode, times in (("forward", 1.5), ("graph", 2.0), ("backward", 2.0)):
        work = Work({moved._replace(mode=mode): 3})
        assert seconds(work, whole) == pytest.approx(times * seconds(work, plain))
    assert whole.token == 3e-4


def test_a_judge_in_the_process_is_counted():
    model = Weights(
        str(CRITIC), "float32", asks=Asks(lambda sample: [f"Which steps of {sample.text} are wrong?"], 5, 16, {})
    )
    sample = Sample(Prompt("p", "Compute 1+2"), SampleId(0, 0, 0, 0), text="3")
    few, many = (answering(model, sample, rows) for rows in (2, 40))
    assert (few.rows, many.rows, many.tokens) == (2, 16, 5)
    assert many.question.flops == pytest.approx(8 * few.question.flops, rel=0.01)
    assert 0 < many.token.flops < many.question.flops
    rates = Calibrated(EVEN)
    one = many.seconds(lambda work: seconds(work, rates), 1e-3)
    assert one == pytest.approx(many.reading + seconds(many.question, rates) + 2 * seconds(many.token, rates) + 3e-3)

"""Memory runs out: sampling goes on with fewer rows, training stops and says what the plan expected and what helps."""

import json
import threading
from contextlib import contextmanager
from multiprocessing import Pipe

import pytest
import torch

from mmrl.app.build import build
from mmrl.config.loader import load_recipe
from mmrl.core import notices
from mmrl.core.errors import UserError
from mmrl.core.out_of_memory import OutOfMemoryError, in_phase
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import SampleId, Slot
from mmrl.placement import device_tasks
from mmrl.planner.fake_tensors import LiveBytes
from mmrl.runtime import start
from mmrl.runtime.stall_watchdog import StallWatchdog
from mmrl.runtime.worker import RemoteWorker, serve
from mmrl.step.step_context import Chunk, SamplingSpec
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()

SMALL = [
    "device=cpu",
    "model.dtype=float32",
    "train.steps=1",
    "train.prompts_per_step=1",
    "train.group_size=8",
    "train.micro_batch_size=8",
    "sampling.steps=2",
    "sampling.window=null",
    "eval.every=null",
    "rewards=[{name: 'jpeg:incompressibility'}]",
]


class Device(LiveBytes):
    """A device of ``limit`` bytes, which refuses as torch does. What was there before it was entered takes none."""

    def __init__(self, limit):
        super().__init__()
        self.limit = limit

    def _count(self, key, storage):
        if storage.device.type == "meta":  # of a plan's
            return
        if self.now + storage.nbytes() > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {storage.nbytes()} bytes. GPU 0 has a total capacity of "
                f"{self.limit} bytes. If reserved but unallocated memory is large try setting something."
            )
        super()._count(key, storage)


def loaded(*overrides):
    return load_recipe(["shapes-lora"], [*SMALL, f"model.path={two_blocks()}", *overrides])


@pytest.fixture(scope="module")
def run():
    of = loaded()
    return build(of.recipe)


@pytest.fixture(scope="module")
def asked(run):
    """Eight samples of one prompt."""
    slots = [Slot(0, 0, 0, run.prompts[0])] * 8
    run.pipeline.encode(slots)
    run.pipeline.features.hold(run.pipeline.encode(slots[:1]))
    ids = [SampleId(0, 0, 0, k) for k in range(8)]
    return Chunk(slots, ids), SamplingSpec([0], "current", 0, frozenset({"image"}))


@contextmanager
def a_run_that_begins(run):
    run.compute.local.at_once.clear()
    yield
    run.compute.local.at_once.clear()


def takes(run, asked, n):
    """Bytes that sampling ``n`` of them takes, and decoding."""
    (slots, ids, _), how = asked
    with torch.no_grad():
        with LiveBytes() as sampling:
            trajectory = run.pipeline.sample(slots[:n], ids[:n], how.actions, how.seed)
        with LiveBytes() as decoding:
            run.pipeline.samples(trajectory, how.inputs)
    return sampling.peak, sampling.now + decoding.peak


def test_sampling_goes_on_with_half_the_rows_and_draws_the_same_samples(run, asked, capsys, says):
    half, whole = takes(run, asked, 4), takes(run, asked, 8)
    limit = (max(half) + 2**20 + min(whole)) // 2
    assert max(half) < limit < min(whole)
    with a_run_that_begins(run):
        expected, shown = device_tasks.sample(run, *asked)
        assert run.compute.local.at_once == {}
        with Device(limit):
            drawn, said = device_tasks.sample(run, *asked)
        told = capsys.readouterr().err
        assert run.compute.local.at_once == {"sample": 4, "decode": 4}
        assert "out of memory in the phase sample with 8 samples at once: it goes on with 4" in told
        assert "sampling.batch_size=4" in told
        says(told)
        with Device(limit):
            device_tasks.sample(run, *asked)
        assert capsys.readouterr().err == "", "it begins with what there is memory for"
    with a_run_that_begins(run), Device(limit):
        (slots, ids, _), how = asked
        device_tasks.sample(run, Chunk(slots[:4], ids[:4]), how)  # as with sampling.batch_size=4
    assert capsys.readouterr().err == ""
    assert drawn.ids == expected.ids
    for name in ("clean", "states", "log_probs"):
        torch.testing.assert_close(getattr(drawn, name), getattr(expected, name), rtol=1e-5, atol=1e-5)
    assert [s.id for s in said] == [s.id for s in shown]


def test_in_half_precision_training_takes_as_few_rows(tmp_path, capsys, says):
    """A GPU's kernels may round by the shape; on a CPU the ratio is one either way."""
    half = build(loaded("model.dtype=bfloat16").recipe)
    slots = [Slot(0, 0, 0, half.prompts[0])] * 8
    half.pipeline.features.hold(half.pipeline.encode(slots[:1]))
    asked = (
        Chunk(slots, [SampleId(0, 0, 0, k) for k in range(8)]),
        SamplingSpec([0], "current", 0, frozenset({"image"})),
    )
    limit = (max(takes(half, asked, 4)) + min(takes(half, asked, 8))) // 2
    with a_run_that_begins(half), Device(limit):
        device_tasks.sample(half, *asked)
    says(told := capsys.readouterr().err)
    assert "sampling.batch_size=4 starts with that; bfloat16 rounds differently in training's larger batch" in told
    fewer = ["model.dtype=bfloat16", "sampling.batch_size=4", "train.micro_batch_size=4"]
    start.train(loaded(*fewer), tmp_path / "run")
    (row,) = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert row["policy/first_ratio_max_dev"] == 0
    assert "out of memory" not in capsys.readouterr().err


def test_where_one_row_is_too_much_the_phase_is_named(run, asked):
    with (
        a_run_that_begins(run),
        Device(2**16),
        pytest.raises(OutOfMemoryError, match="phase sample: CUDA out of memory"),
    ):
        device_tasks.sample(run, *asked)


@pytest.mark.slow
def test_a_device_in_another_process_names_the_phase_too(run, asked):
    here, there = Pipe()

    def device():
        with Device(2**16):
            serve(run, there, None, StallWatchdog(10.0))

    thread = threading.Thread(target=device, daemon=True)
    thread.start()
    try:
        with pytest.raises(OutOfMemoryError, match="phase sample: device 1: CUDA out of memory"):
            RemoteWorker(1, here).perform(run, device_tasks.sample, asked, {})
    finally:
        here.close()
        thread.join(60)
        notices.listen(None)  # ``serve`` is for a process of its own


@pytest.mark.slow
def test_training_stops_says_what_helps_and_goes_on_with_that(tmp_path):
    fewer = "sampling.batch_size=2"  # so that training takes most
    whole = loaded(fewer)
    with LiveBytes() as live:
        start.train(whole, tmp_path / "whole")
    limit = int(0.8 * live.peak)
    with Device(limit), pytest.raises(UserError) as stopped:
        start.train(whole, tmp_path / "run")
    said = str(stopped.value)
    assert "out of memory in the phase train: CUDA out of memory. Tried to allocate" in said
    assert "If reserved" not in said
    assert "The plan expected" in said
    assert "Try: model.gradient_checkpointing=true; train.micro_batch_size=4;" in said
    assert "no step is saved; fix it, then: " in said
    with Device(limit):
        start.train(loaded(fewer, "train.micro_batch_size=4"), tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "report.html").exists()


def test_the_hosts_memory_runs_out_too():
    with pytest.raises(OutOfMemoryError, match="out of memory in the phase load: "), in_phase("load"):
        torch.empty(2**60, dtype=torch.uint8)
    with pytest.raises(RuntimeError, match="shape"), in_phase("load"):  # another error stays what it is
        torch.zeros(2) @ torch.zeros(3, 3)

"""Several devices of a controller without processes or a cluster: the task queue, refusals, what a device answers."""

import contextlib
import importlib.util
import sys
import threading
import types
from concurrent.futures import Future
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.config.placement import Placement
from mmrl.core import notices
from mmrl.core.errors import UserError
from mmrl.placement import utilisation
from mmrl.placement.adaptive import Split
from mmrl.placement.multi_device import MultiDevice
from mmrl.placement.task_queue import Task, TaskQueue
from mmrl.placement.utilisation import Sampler, of_gpu
from mmrl.runtime.stall_watchdog import StallWatchdog
from mmrl.runtime.worker import LostDeviceError, RemoteWorker, serve
from mmrl.step.step_context import DeviceState


def task(role):
    return Task(role, "sample", ())


def taken(board, device):
    found = board.take(device)
    return found.role


def test_devices_keep_their_role_and_take_up_the_other_as_the_placement_allows():
    board = TaskQueue(2, Placement())
    board.begin(Split(1, 1), "never", 2)
    for role in ("rollout", "rollout", "judge"):
        board.put(task(role))
    assert [taken(board, 0), taken(board, 1)] == ["rollout", "judge"]
    board.done(0, "rollout", 0.0, 0.0, 1.0)
    assert taken(board, 0) == "rollout"
    board.put(task("judge"))
    board.done(1, "judge", 0.0, 0.0, 1.0)
    assert taken(board, 1) == "judge"
    assert board.scheduler.moves == 0

    board = TaskQueue(2, Placement())
    board.begin(Split(2, 0), "after", 1)
    board.put(task("rollout"))
    board.put(task("judge"))
    assert taken(board, 0) == "rollout"
    assert board.scheduler.next_task(1) is None  # sampling is not over yet
    board.done(0, "rollout", 0.0, 0.0, 1.0)
    assert taken(board, 1) == "judge"
    assert board.scheduler.moves == 1

    board = TaskQueue(2, Placement())
    board.begin(Split(1, 1), "worth", 2)
    board.put(task("rollout"))
    board.put(task("rollout"))
    assert taken(board, 0) == "rollout"
    board.done(0, "rollout", 0.0, 0.0, 1.0)
    assert taken(board, 0) == "rollout"
    for _ in range(4):
        board.put(task("judge"))
    assert taken(board, 1) == "judge"
    board.done(1, "judge", 0.0, 0.0, 1.0)
    board.done(0, "rollout", 0.0, 0.0, 1.0)
    assert taken(board, 0) == "judge"  # nothing is left to sample, and three batches wait to be judged
    assert board.scheduler.roles == ["judge", "judge"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["placement=adaptive"], "set devices_per_controller to 2 or more"),
        (["placement.judges=1"], "remove it, or set placement.type"),
        (["devices_per_controller=2", "placement={type: partial, judges: 2}"], "set it to 1 or less"),
        (["devices_per_controller=2", "device=cuda:1"], "a controller takes several"),
        (["placement={sleep: true}", "algorithm={type: draft}"], "so nothing sleeps; remove it"),
        (["devices_per_controller=2", "placement={type: partial, inside: false}"], "placement.inside"),
        (["devices_per_controller=2", "placement=separate"], "placement.type"),
    ],
)
def test_placements_that_cannot_be_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe(["shapes-judge"], overrides)


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        ("{engine: vllm}", "set it to vllm_server, which every sampling device starts for itself"),
        ("{engine: vllm_server, partial: {cut_after: 2, extra: 2}}", "controllers to more, or remove rollout.partial"),
        ("{engine: sglang, options: {url: 'http://127.0.0.1:9'}}", "remove url, so that each sampling device starts"),
        ("{engine: vllm_server, options: {environment: {CUDA_VISIBLE_DEVICES: '1'}}}", "remove CUDA_VISIBLE_DEVICES"),
        ("{engine: sglang, options: {tp_size: 4}}", "an engine takes 4 devices, and 2 of 2 .* to 4, or lower"),
    ],
)
@pytest.mark.parametrize("controllers", [1, 2])
def test_engines_that_cannot_be_beside_several_devices_are_refused_once(rollout, message, controllers):
    with pytest.raises(UserError, match=message) as said:
        load_recipe(["sums"], ["devices_per_controller=2", f"controllers={controllers}", f"rollout={rollout}"])
    assert len(str(said.value).split("rollout.")) <= 4, said.value
    load_recipe(["sums"], ["devices_per_controller=2", "rollout.engine=vllm_server"])


def test_an_engine_over_several_devices_is_refused_beside_a_controller_of_one():
    with pytest.raises(UserError, match=r"rollout\.options: an engine of 2 devices .* set placement to disaggregated"):
        load_recipe(["sums"], ["controllers=2", "rollout={engine: vllm_server, options: {tensor_parallel_size: 2}}"])
    load_recipe(["sums"], ["rollout={engine: vllm_server, options: {tensor_parallel_size: 2}}"])


def soon(call):
    """What ``call`` comes to within a minute."""
    answer = Future()

    def ask():
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer.result(60)


@pytest.mark.parametrize("where", ["take", "done"])
def test_a_device_that_fails_outside_its_task_is_heard_and_not_waited_for(monkeypatch, where):
    several, run = (
        MultiDevice([], Placement()),
        SimpleNamespace(rewards=SimpleNamespace(on_device=[], call_by=lambda *_: None)),
    )
    run.recipe = SimpleNamespace(threads=None, rollout=SimpleNamespace(in_process=True), environment=None)
    several.open(run)  # type: ignore[arg-type]
    assert several.cpu_seconds(run) > 0  # type: ignore[arg-type]
    before = getattr(several._board, where)

    def failing(*given, **named):
        before(*given, **named)
        raise ZeroDivisionError("no such share")

    monkeypatch.setattr(several._board, where, failing)

    def ask():
        for _ in range(3):  # one may have been taken before it fails
            several.cpu_seconds(run)  # type: ignore[arg-type]

    with pytest.raises(ZeroDivisionError, match="no such share"):
        soon(ask)
    several.close()


class Unsendable:
    def __reduce__(self):
        raise TypeError("stays here")


class Unreadable:
    def __reduce__(self):
        return int, ("no number",)


def echo(run, value):
    return value


def unsendable(run):
    return Unsendable()


def tell(run, value):
    notices.tell("a server is lost")
    with notices.starting(), notices.starting():
        run.starts.append("while")
    return value


@pytest.fixture
def device():
    """A device as its controller sees it, which another thread serves, and what was heard of it."""
    here, there = Pipe()
    heard, starts = [], []

    @contextlib.contextmanager
    def starting():
        starts.append("begun")
        yield
        starts.append("over")

    features = SimpleNamespace(hold=lambda keys: None)
    compute = SimpleNamespace(local=DeviceState())
    run = SimpleNamespace(pipeline=SimpleNamespace(features=features), compute=compute, starts=starts)
    serving = threading.Thread(target=serve, args=(run, there, None, StallWatchdog(60)), daemon=True)
    serving.start()
    yield RemoteWorker(3, here, heard.append, starting), heard, starts
    here.close()
    serving.join(60)
    notices.listen(None)


@pytest.mark.parametrize(
    ("task", "arguments", "features"),
    [
        (unsendable, (), {}),  # its answer
        (echo, (Unreadable(),), {}),
        (echo, (), {"a prompt": None}),  # which the store does not take
    ],
)
def test_what_fails_between_tasks_is_an_answer_and_no_silence(device, task, arguments, features):
    there, _, _ = device
    with pytest.raises(LostDeviceError, match=r"(?s)device 3 failed.*(stays|no num|put)"):
        soon(lambda: there.perform(None, task, arguments, features))
    assert there.perform(None, echo, (1,), {}) == 1  # it goes on


def test_what_happens_on_a_device_is_heard_before_its_answer(device):
    there, heard, starts = device
    assert there.perform(None, tell, (1,), {}) == 1
    assert heard == ["device 3: a server is lost"]
    assert sorted(starts) == ["begun", "over", "while"]


def test_a_turn_has_a_price_where_the_next_will_take_as_long():
    board = TaskQueue(1, Placement())
    begun = board.scheduler.start
    board.done(0, "rollout", begun, begun + 60, begun + 61, priced=False)  # an engine was started for good
    assert board.scheduler.price("judge") == 0.0
    board.done(0, "rollout", begun + 70, begun + 72, begun + 75)
    assert board.scheduler.price("judge") == pytest.approx(2.0)
    board.done(0, "train", begun + 80, begun + 85, begun + 86, priced=False)
    assert board.scheduler.price("judge") == pytest.approx(2.0)
    assert board.scheduler.events.seconds("wake") == pytest.approx(67.0)


def test_how_busy_a_device_is_is_read_between_two_questions():
    values, told, go = iter([0.25, 0.75]), threading.Event(), threading.Event()

    def reading():
        if (value := next(values, None)) is None:  # so the two before it have been counted
            told.set()
            go.wait(60)
            return 1.0
        return value

    sampler = Sampler(reading)
    assert told.wait(60)
    assert sampler.mean() == 0.5
    assert sampler.mean() is None
    go.set()
    sampler.close()
    assert of_gpu(torch.device("cpu")) is None


@pytest.mark.parametrize("error", [RuntimeError("no driver"), OSError("NVML: Not Supported"), KeyError("MIG")])
def test_a_gpu_that_tells_no_utilisation_ends_no_run(monkeypatch, error):
    """What NVML's package raises under MIG, on a vGPU or without a driver has no class that torch names."""
    monkeypatch.setitem(sys.modules, "pynvml", types.ModuleType("pynvml"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: True)
    utilisation._sampler.cache_clear()
    asked = []

    def refuses(device):
        asked.append(device)
        raise error

    monkeypatch.setattr(torch.cuda, "utilization", refuses)
    gpu = torch.device("cuda", 0)
    assert [of_gpu(gpu), of_gpu(gpu)] == [None, None]
    assert asked == [gpu], "it is asked once"


def test_a_gpu_that_stops_telling_has_the_readings_until_then(monkeypatch):
    readings = iter([0.25, 0.75])
    ended = threading.Event()

    def read():
        try:
            return next(readings)
        except StopIteration:
            ended.set()
            raise OSError("the driver was reloaded") from None

    monkeypatch.setattr(utilisation, "EVERY_S", 0.001)
    sampler = Sampler(read)
    assert ended.wait(60)
    assert sampler.mean() == 0.5
    assert sampler.mean() is None
    sampler.close()

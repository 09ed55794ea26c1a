"""Several devices to a controller: the same learning wherever samples are drawn and judged, and real moves."""

import contextlib
import itertools
import signal
import threading
from concurrent.futures import Future
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest
import torch

from mmrl._torchvision import allow_cpu_only
from mmrl.config.loader import load_recipe
from mmrl.config.placement import Placement
from mmrl.errors import UserError
from mmrl.judge.local import LocalModel
from mmrl.placement.adaptive import Split
from mmrl.placement.multi_device import MultiDevice
from mmrl.placement.task_queue import Task, TaskQueue
from mmrl.placement.utilisation import Sampler, of_gpu
from mmrl.report import notices
from mmrl.runtime.worker import LostDeviceError, RemoteWorker, serve
from mmrl.training.step_context import DeviceState
from tests.ray_runs import JUDGED, ROOT, SMALL, alike, ended, lose_one, placed, rows, run, start, train

allow_cpu_only()  # before transformers imports torchvision
pytest.importorskip("ray")
pytest.importorskip("torchvision")

VISION = ["train.steps=2", "train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=4", *SMALL[4:]]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one device, with a generative judge."""
    out = tmp_path_factory.mktemp("devices") / "alone"
    run("shapes-judge", out, *JUDGED)
    return out


def test_two_controllers_of_two_devices_learn_as_one_device(alone, tmp_path):
    out = tmp_path / "adaptive"
    said = run("shapes-judge", out, *JUDGED, "controllers=2", "devices_per_controller=2", "placement=adaptive")
    assert "done: 3 steps" in said
    alike(alone, out)
    lines = placed(out)
    work = [line for line in lines if "device" in line]
    assert {(line["controller"], line["device"]) for line in work} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert {line["role"] for line in work} == {"rollout", "judge", "train"}
    assert all(0 <= line["began"] <= line["ended"] for line in work)
    for controller in (0, 1):  # a device does one thing at a time
        for device in (0, 1):
            mine = sorted(
                (line["step"], line["began"], line["ended"])
                for line in work
                if (line["controller"], line["device"]) == (controller, device)
            )
            assert all(a[2] <= b[1] + 1e-3 for a, b in itertools.pairwise(mine) if a[0] == b[0])
    assert [line["step"] for line in lines if "decision" in line] == [1, 2, 3]
    assert rows(out)[0]["placement/moves"] >= 1
    assert rows(out)[-1]["sent/numbers"] < 20_000


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [
        "{type: partial, sleep: true}",
        pytest.param("colocate", marks=pytest.mark.long),
        pytest.param("{type: adaptive, inside: false}", marks=pytest.mark.long),
    ],
)
def test_every_placement_learns_alike(alone, tmp_path, placement):
    out = tmp_path / "placed"
    run("shapes-judge", out, *JUDGED, "devices_per_controller=2", f"placement={placement}")
    alike(alone, out)
    roles = {(line["device"], line["role"]) for line in placed(out) if "device" in line and line["step"] == 1}
    judges = {device for device, role in roles if role == "judge"}
    assert judges == ({1} if "partial" in placement else {0, 1})  # adaptive begins with all in turn
    if "sleep" in placement:
        assert (1, "wake") in roles


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "judge"), [("sums-capo", 1), ("scenes-judge", 0)])
def test_text_and_vision_with_a_judge_learn_as_one_device(tmp_path, recipe, judge):
    small = [*JUDGED[:-1], "train.steps=2", "eval.every=2", "sampling.batch_size=4", f"rewards.{judge}.batch_size=4"]
    run(recipe, tmp_path / "one", *small)
    four = ["controllers=2", "devices_per_controller=2", "placement=adaptive"]
    run(recipe, tmp_path / "four", *small, *four)
    alike(tmp_path / "one", tmp_path / "four")
    work = [line for line in placed(tmp_path / "four") if "device" in line]
    assert {(line["controller"], line["device"]) for line in work if line["role"] == "judge"} > {(0, 0)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe", ["shapes-draft", *(pytest.param(name, marks=pytest.mark.long) for name in ("sums", "scenes", "sums-dpo"))]
)
def test_every_kind_of_recipe_trains_on_two_devices(tmp_path, recipe):
    small = {"sums-dpo": [w for w in VISION if "group_size" not in w]}.get(recipe, VISION)
    small = [w for w in small if recipe != "shapes-draft" or "group_size" not in w]
    run(recipe, tmp_path / "one", *small)
    run(recipe, tmp_path / "two", *small, "devices_per_controller=2")
    alike(tmp_path / "one", tmp_path / "two")


@pytest.fixture(scope="module")
def unhurried(tmp_path_factory):
    """A run of one process, of which nothing is lost."""
    out = tmp_path_factory.mktemp("unhurried") / "whole"
    assert ended(start(out))[0] == 0
    return out


AHEAD = "placement={type: disaggregated, staleness: 1}"
SHARDS = "train.backend=fsdp"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "layout"),
    [
        (signal.SIGKILL, []),
        (signal.SIGSTOP, [AHEAD]),
        pytest.param(signal.SIGKILL, [SHARDS], marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, [], marks=pytest.mark.long),
        pytest.param(signal.SIGSTOP, [SHARDS], marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, [AHEAD], marks=pytest.mark.long),
        pytest.param(signal.SIGKILL, [AHEAD, SHARDS, "controllers=2"], marks=pytest.mark.long),
    ],
    ids=lambda what: " ".join(what) if isinstance(what, list) else what.name,
)
def test_a_device_that_dies_or_freezes_is_found_and_nothing_is_lost(unhurried, tmp_path, how, layout):
    whole, out = unhurried, tmp_path / "lost"
    if AHEAD in layout:  # it learns from older samples
        whole = tmp_path / "whole"
        assert ended(start(whole, "devices_per_controller=2", AHEAD))[0] == 0
    lose_one(out, how, "devices_per_controller=2", *layout)
    alike(whole, out)
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4]


@pytest.mark.slow
def test_what_the_user_must_mend_on_one_device_alone_is_said(tmp_path):
    file = tmp_path / "picky.py"
    file.write_text(
        "import os\nimport mmrl\n\n@mmrl.reward(inputs=('text',))\nclass Score:\n    def __init__(self):\n"
        "        if os.readlink('/proc/self/fd/1').endswith('/0.1.log'):\n"
        "            raise ValueError('no room here')\n"
        "    def score(self, samples, *, context):\n        return [0.0] * len(samples)\n"
    )
    words = [*SMALL, f'rewards=[{{name: "{file}:Score"}}]', "devices_per_controller=2"]
    code, said = ended(train("sums", tmp_path / "x", *words))
    assert code == 2, said
    assert "no room here" in said
    assert "Traceback" not in said


def test_a_judge_sleeps_for_real_and_answers_as_before():
    from mmrl.judge.answers import parse_kind
    from mmrl.judge.asking import Ask, Settings

    model = LocalModel(str(ROOT / "pipelines" / "vlm" / "models" / "shapes-judge"))
    size = sum(p.nbytes for p in model.model.parameters())
    ask = [Ask(["Is 2 + 2 = 4? Answer yes or no."], None, 7)]
    kind = parse_kind("pointwise", {"type": "yes_no"})
    before = model.ask(ask, kind, Settings(0.0, 4, 0), "cpu")[0].verdict
    model.sleep("cpu")
    model.sleep("cpu")
    assert {p.nbytes for p in model.model.parameters()} == {0}  # no byte of the weights is left
    assert size > 1e6
    assert model.ask(ask, kind, Settings(0.0, 4, 0), "cpu")[0].verdict == before
    model.sleep("cpu")
    model.wake("cpu")
    assert sum(p.nbytes for p in model.model.parameters()) == size  # before it is asked


def task(role):
    return Task(role, "sample", ())


def taken(board, device):
    found = board.take(device)
    return found.role


def test_devices_keep_their_role_and_take_up_the_other_as_the_placement_allows():
    board = TaskQueue(2)
    board.begin(Split(1, 1), "never", 2)
    for role in ("rollout", "rollout", "judge"):
        board.put(task(role))
    assert [taken(board, 0), taken(board, 1)] == ["rollout", "judge"]
    board.done(0, "rollout", 0.0, 0.0, 1.0)
    assert taken(board, 0) == "rollout"
    board.put(task("judge"))
    board.done(1, "judge", 0.0, 0.0, 1.0)
    assert taken(board, 1) == "judge"
    assert board.moves == 0

    board = TaskQueue(2)
    board.begin(Split(2, 0), "after", 1)
    board.put(task("rollout"))
    board.put(task("judge"))
    assert taken(board, 0) == "rollout"
    assert board._next(1) is None  # sampling is not over yet
    board.done(0, "rollout", 0.0, 0.0, 1.0)
    assert taken(board, 1) == "judge"
    assert board.moves == 1

    board = TaskQueue(2)
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
    assert board.roles == ["judge", "judge"]


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
        ("{engine: vllm}", "set it to vllm_server, which each that samples starts for itself"),
        ("{engine: vllm_server, partial: {cut_after: 2, extra: 2}}", "controllers to more, or remove rollout.partial"),
        ("{engine: sglang, options: {url: 'http://127.0.0.1:9'}}", "remove url, and each that samples starts"),
        ("{engine: vllm_server, options: {environment: {CUDA_VISIBLE_DEVICES: '1'}}}", "remove CUDA_VISIBLE_DEVICES"),
        ("{engine: vllm_server, options: {tensor_parallel_size: 2}}", "remove tensor_parallel_size"),
        ("{engine: sglang, options: {tp_size: 4}}", "an engine of 4 devices does not fit beside one of 2"),
    ],
)
@pytest.mark.parametrize("controllers", [1, 2])
def test_engines_that_cannot_be_beside_several_devices_are_refused_once(rollout, message, controllers):
    with pytest.raises(UserError, match=message) as said:
        load_recipe(["sums"], ["devices_per_controller=2", f"controllers={controllers}", f"rollout={rollout}"])
    assert len(str(said.value).split("rollout.")) <= 4, said.value
    load_recipe(["sums"], ["devices_per_controller=2", "rollout.engine=vllm_server"])


def test_an_engine_over_several_devices_is_refused_beside_a_controller_of_one():
    with pytest.raises(UserError, match=r"rollout\.options: an engine of 2 devices .* remove tensor_parallel_size"):
        load_recipe(["sums"], ["controllers=2", "rollout={engine: vllm_server, options: {tensor_parallel_size: 2}}"])
    load_recipe(["sums"], ["rollout={engine: vllm_server, options: {tensor_parallel_size: 2}}"])


def soon(call):
    """What ``call`` comes to within 10 s."""
    answer = Future()

    def ask():
        try:
            answer.set_result(call())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    return answer.result(10)


@pytest.mark.parametrize("where", ["take", "done"])
def test_a_device_that_fails_outside_its_task_is_heard_and_not_waited_for(monkeypatch, where):
    several, run = MultiDevice([], Placement()), SimpleNamespace(rewards=SimpleNamespace(on_device=[]))
    run.recipe = SimpleNamespace(threads=None, rollout=SimpleNamespace(engine="transformers"))
    several.open(run)  # type: ignore[arg-type]
    assert several.cpu_seconds(run) > 0  # type: ignore[arg-type]
    before = getattr(several._board, where)

    def failing(*given):
        before(*given)
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
    run = SimpleNamespace(pipeline=SimpleNamespace(features=features), local=DeviceState(), starts=starts)
    serving = threading.Thread(target=serve, args=(run, there), daemon=True)
    serving.start()
    yield RemoteWorker(3, here, heard.append, starting), heard, starts
    here.close()
    serving.join(10)
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
    board = TaskQueue(1)
    begun = board._start
    board.done(0, "rollout", begun, begun + 60, begun + 61, False)  # an engine was started for good
    assert board.price == 0.0
    board.done(0, "rollout", begun + 70, begun + 72, begun + 75)
    assert board.price == pytest.approx(2.0)
    board.done(0, "train", begun + 80, begun + 85, begun + 86, False)
    assert board.price == pytest.approx(2.0)
    assert board.seconds("wake") == pytest.approx(67.0)


def test_how_busy_a_device_is_is_read_between_two_questions():
    values, told, go = iter([0.25, 0.75]), threading.Event(), threading.Event()

    def reading():
        if (value := next(values, None)) is None:  # so the two before it have been counted
            told.set()
            go.wait(10)
            return 1.0
        return value

    sampler = Sampler(reading)
    assert told.wait(10)
    assert sampler.mean() == 0.5
    assert sampler.mean() is None
    go.set()
    sampler.close()
    assert of_gpu(torch.device("cpu")) is None

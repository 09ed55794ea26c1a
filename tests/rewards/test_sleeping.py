"""Engines and judges that sleep, with the real vLLM: its processes go, and come back to say the same."""

import asyncio
import json
import os
import signal
import time
from threading import Thread

import psutil
import pytest

from mmrl.core.notices import listen
from mmrl.core.rollout_engine import Request, Settings
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.inference.lazy_engine import LazyEngine, unfailing
from mmrl.inference.vllm_server import VllmServer
from mmrl.rewards.judging.answers import parse_kind
from mmrl.rewards.judging.asking import Ask
from mmrl.rewards.judging.asking import Settings as Asking
from mmrl.rewards.judging.server import ServedJudge
from tests.support import judging, tiny
from tests.support.runs import SMALL, children, ended, rows, train, wait_for

allow_cpu_only()  # before transformers imports torchvision
pytest.importorskip("vllm")
pytestmark = pytest.mark.slow

SHAPE = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
SMALL_CACHE = {"kv_cache_memory_bytes": 64 * 2**20, "max_num_seqs": 8}


def memory(before):
    """MiB of the processes that this one has started since those of ``before``."""
    return sum(p.memory_info().rss for p in {*psutil.Process().children(recursive=True)} - before) >> 20


def test_an_engine_on_standby_gives_its_memory_back_and_draws_the_same_again(tmp_path):
    from transformers import AutoModelForCausalLM

    folder = tiny.language_model(tmp_path / "model", **SHAPE)
    other = AutoModelForCausalLM.from_pretrained(tiny.language_model(tmp_path / "other", seed=1, **SHAPE))
    weights = dict(other.named_parameters())
    engine = LazyEngine(lambda: VllmServer(str(folder), max_model_len=128, options=SMALL_CACHE), to_sleep=True)
    requests, greedy = [Request(list(range(40, 70)), "", seed=0)], Settings(16, temperature=0)
    before = {*psutil.Process().children(recursive=True)}  # of earlier tests: they may end
    try:
        (base,) = engine.generate(requests, greedy)
        engine.update(iter(weights.items()))
        (drawn,) = engine.generate(requests, greedy)
        assert drawn.token_ids != base.token_ids
        assert memory(before) > 500
        engine.sleep()
        assert memory(before) < 50
        assert engine.wake() is False  # its price is paid each time
        assert memory(before) > 500
        engine.update(iter(weights.items()))
        (again,) = engine.generate(requests, greedy)
        assert again.token_ids == drawn.token_ids
        assert again.log_probs == pytest.approx(drawn.log_probs, abs=1e-5)
    finally:
        engine.close()
    assert memory(before) < 50


class Told:
    """What a run says was lost, and when."""

    def __init__(self):
        self.lines, self.at = [], []

    def tell(self, line):
        self.lines.append(line)
        self.at.append(time.monotonic())


@pytest.fixture
def told():
    listener = Told()
    listen(listener.tell)
    yield listener
    listen(None)


def lose_soon(victim, how, after=0.5):
    """Kill or freeze a process a little later; returns where the moment will stand."""
    at = []

    def lose():
        time.sleep(after)
        victim.send_signal(how)
        at.append(time.monotonic())

    Thread(target=lose, daemon=True).start()
    return at


@pytest.mark.long  # in short: servers of judges that are lost, in tests/rewards/test_judge_remote.py, by the same guard
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_an_engine_that_is_lost_while_it_draws_is_started_again_and_draws_the_same(tmp_path, told, how):
    from transformers import AutoModelForCausalLM

    folder = tiny.language_model(tmp_path / "model", **SHAPE)
    other = AutoModelForCausalLM.from_pretrained(tiny.language_model(tmp_path / "other", seed=1, **SHAPE))
    engine = LazyEngine(lambda: VllmServer(str(folder), max_model_len=256, options=SMALL_CACHE), to_sleep=False)
    requests = [Request(list(range(40, 70)), "", seed=n) for n in range(6)]

    def give():
        engine.update(iter(dict(other.named_parameters()).items()))

    def draw():
        return [d.token_ids for d in unfailing(engine, give, lambda: engine.generate(requests, Settings(200)))]

    try:
        first = engine.ready()._process
        base = draw()
        give()
        drawn = draw()
        core = first.members()[-1]
        lost = lose_soon(core, how)
        while engine.ready()._process is first:
            again = draw()
        assert drawn != base
        assert again == drawn
        assert told.at[0] - lost[0] < 10
        assert "the vLLM server is lost: " in told.lines[0]
        assert (f"its process {core.pid} was stopped" in told.lines[0]) == (how == signal.SIGSTOP)
        assert [line.partition(",")[0] for line in told.lines[1:]] == ["the rollout engine is started again"]
        assert not first.members()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def judge_model(tmp_path_factory):
    return judging.taught(tmp_path_factory.mktemp("judge") / "model", [("good", "yes"), ("bad", "no")], 120, within=0.5)


@pytest.mark.long  # in short: the engine on standby, above
def test_a_judge_in_a_server_gives_its_memory_back_and_judges_the_same_again(judge_model):
    judge = ServedJudge(judge_model, {"dtype": "float32", "max_model_len": 256, **SMALL_CACHE})
    judge.sleep()
    before, kind = {*psutil.Process().children(recursive=True)}, parse_kind("pointwise", {"type": "yes_no"})
    asks = [Ask(["good"], None, 7), Ask(["bad"], None, 8)]

    def verdicts():
        return [outcome.verdict for outcome in asyncio.run(judge.ask(asks, kind, Asking(0.0, 4, 0)))]

    try:
        said = verdicts()
        assert said[0] > 0.6 > 0.4 > said[1]
        assert memory(before) > 500
        judge.sleep()
        assert memory(before) < 50
        assert judge.wake() is False
        assert verdicts() == pytest.approx(said, abs=1e-5)
    finally:
        judge.close()
    assert memory(before) < 50


def servers(process):
    """The servers that a run has up now: engines and judges."""
    found = [(child, _command(child)) for child in children(process.pid)]
    found = [(child, w) for child, w in found if "-m mmrl.inference.vllm_server" in w and "process_guard.py" not in w]
    return [[child for child, w in found if f"--served-model-name {name}" in w] for name in ("policy", "judge")]


def _command(process):
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def _log(process):
    try:
        return os.readlink(f"/proc/{process.pid}/fd/1")
    except OSError:
        return ""


def watched(process, timeout):
    """The exit status, what was printed, and the servers that were up together, in the order in which they changed;
    none of them is left."""
    seen, met, until = [[0, 0]], set(), time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < until:
        now = servers(process)
        met.update(*now)
        if [len(n) for n in now] != seen[-1]:
            seen.append([len(n) for n in now])
        time.sleep(0.05)
    code, said = ended(process)
    _, left = psutil.wait_procs(met, timeout=20)
    assert met
    assert not left
    return code, said, seen


def alike(a, b):
    for row, other in zip(rows(a), rows(b), strict=True):
        assert max(row["mismatch/log_prob_gap_max"], other["mismatch/log_prob_gap_max"]) < 1e-4  # weights arrive
        assert other["text/length"] == row["text/length"]
        assert other["reward/mean"] == pytest.approx(row["reward/mean"], rel=1e-3)
        assert other["optim/grad_norm"] == pytest.approx(row["optim/grad_norm"], rel=1e-3)


@pytest.mark.long
def test_every_device_that_samples_has_an_engine_of_its_own(tmp_path):
    for devices in (1, 2):
        more = ["rollout.engine=vllm_server", "eval.every=null", "sampling.batch_size=4", "train.steps=3"]
        process = train("sums", tmp_path / f"{devices}", *SMALL, *more, f"devices_per_controller={devices}")
        code, said, seen = watched(process, 900)
        assert code == 0, said
        assert max(engines for engines, _ in seen) == devices
    alike(tmp_path / "1", tmp_path / "2")
    work = [line for line in rows(tmp_path / "2", "placement.jsonl") if line.get("role") in ("rollout", "wake")]
    assert {line["device"] for line in work if line["role"] == "rollout"} == {0, 1}
    assert [line["step"] for line in work if line["role"] == "wake"] == [1, 1], "each is started once"


@pytest.mark.long
@pytest.mark.parametrize(
    "parts",
    [
        ["train.backend=megatron", "train.tensor_parallel=2", "devices_per_controller=2"],
        ["train.backend=fsdp", "devices_per_controller=2"],
        [
            *("train.backend=megatron", "train.tensor_parallel=2", "devices_per_controller=3"),
            "placement={type: disaggregated, trainers: 2, staleness: 1}",
        ],
    ],
)
def test_engines_beside_devices_with_parts_of_a_model_have_its_present_weights(tmp_path, parts):
    pytest.importorskip("megatron.core")
    rollout = json.dumps({"engine": "vllm_server", "options": SMALL_CACHE})
    more = [f"rollout={rollout}", "eval.every=2", "sampling.batch_size=4", "train.steps=3", "model.dtype=float32"]
    code, said = ended(train("sums", tmp_path / "parts", *SMALL, *more, *parts), 900)
    assert code == 0, said
    if "disaggregated" not in parts[-1]:
        code, said = ended(train("sums", tmp_path / "one", *SMALL, *more), 900)
        assert code == 0, said
        alike(tmp_path / "one", tmp_path / "parts")
    for row in rows(tmp_path / "parts"):
        assert row["mismatch/log_prob_gap_max"] < 1e-3 or row["sampling/stale_steps"] > 0
        assert row["optim/grad_norm"] > 0


@pytest.mark.long
def test_an_engine_and_a_judge_take_turns_with_training_and_nothing_changes(tmp_path, judge_model):
    judge = {"model": {"vllm": judge_model, "args": {"dtype": "float32", **SMALL_CACHE}}, "rubric": "{{ response }}"}
    rewards = [{"name": "judge", "batch_size": 4, "options": judge}]
    engine = {"engine": "vllm_server", "options": SMALL_CACHE}
    more = ["train.steps=2", "eval.every=null", f"rewards={json.dumps(rewards)}", f"rollout={json.dumps(engine)}"]
    code, said, seen = watched(train("sums", tmp_path / "one", *SMALL, *more), 900)
    assert code == 0, said
    more += ["devices_per_controller=2", "placement={type: partial, sleep: true}"]
    code, said, seen = watched(train("sums", tmp_path / "two", *SMALL, *more), 900)
    assert code == 0, said
    alike(tmp_path / "one", tmp_path / "two")
    assert [max(counts) for counts in zip(*seen, strict=True)] == [1, 1], "neither where it has nothing to do"
    assert seen.count([0, 0]) >= 3, "both are gone while the devices train"
    for row in rows(tmp_path / "two"):
        assert row["placement/wake"] > 2.0
    woken = [line for line in rows(tmp_path / "two", "placement.jsonl") if line.get("role") == "wake"]
    assert {(line["step"], line["device"]) for line in woken} == {(1, 0), (1, 1), (2, 0), (2, 1)}


@pytest.mark.long
@pytest.mark.parametrize(("devices", "how"), [(1, signal.SIGKILL), (2, signal.SIGSTOP)])
def test_a_run_whose_engine_is_lost_goes_on_as_if_it_had_not(tmp_path, devices, how):
    more = ["rollout.engine=vllm_server", "eval.every=null", "sampling.batch_size=4", "train.steps=3"]
    more += [f"devices_per_controller={devices}"]
    calm, lost = tmp_path / "calm", tmp_path / "lost"
    code, said = ended(train("sums", calm, *SMALL, *more), 900)
    assert code == 0, said
    process = train("sums", lost, *SMALL, *more)
    wait_for(process, lost, 1, 600)
    engines, _ = servers(process)
    of_device_1 = [e for e in engines if any(_log(p).endswith("/0.1.log") for p in e.parents())]
    assert len(of_device_1) == (devices == 2)
    (of_device_1 or engines)[-1].send_signal(how)
    code, said = ended(process, 900)
    assert code == 0, said
    assert said.count("the vLLM server is lost: ") == 1, said
    assert ("device 1: the vLLM server is lost" in said) == (devices == 2)
    assert "the rollout engine is started again" in said
    assert "start again after step" not in said
    alike(calm, lost)

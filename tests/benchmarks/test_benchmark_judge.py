"""The benchmark of judging beside sampling: its arms make the same calls, and its arithmetic adds up."""

import importlib
import json
import os
import sys
import time
from pathlib import Path

import pytest
import torch

from mmrl.config.schema import Reward
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.scoring import RewardSet

ROOT = Path(__file__).resolve().parents[2]
CRITIC = ROOT / "pipelines" / "llm" / "models" / "sums-critic" / "model.safetensors"
pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="a core of its own needs Linux")


@pytest.fixture(scope="module")
def judge():
    """The benchmark, imported as its command imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("judge")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.fixture
def rewards(tmp_path):
    """A reward that writes down, call by call, what it was asked."""
    (tmp_path / "noted.py").write_text(
        "import mmrl\n\n\n"
        "@mmrl.reward(inputs=('text',))\n"
        "def score(samples, *, context, log):\n"
        "    with open(log, 'a') as file:\n"
        "        print(' '.join(s.text for s in samples), file=file)\n"
        "    return [float(s.text) for s in samples]\n"
    )
    made = RewardSet([Reward(name=f"{tmp_path}/noted.py:score", options={"log": str(tmp_path / "log")})])
    yield made, tmp_path / "log"
    made.close()


def samples(first, n):
    prompt = Prompt("p", "count")
    return [Sample(prompt, SampleId(0, 0, 0, i), text=str(i)) for i in range(first, first + n)]


def wait_for(log, lines):
    until = time.monotonic() + 60
    while not (log.exists() and len(log.read_text().splitlines()) == lines):
        assert time.monotonic() < until, "the reward was not asked while samples were still being made"
        time.sleep(0.01)


def test_the_serial_arm_makes_the_same_calls_after_the_last_sample(judge, rewards):
    given, log = rewards
    asked = {}
    for name, made in (("overlapped", given), ("serial", judge.HeldBack(given))):
        assert made.inputs == {"text"}
        scoring = made.start(0, 4)
        for n in (1, 2):
            scoring.add(samples(2 * n - 2, 2))
            if name == "overlapped":
                wait_for(log, n)
        if name == "serial":
            time.sleep(0.2)  # for a call that should not have been made to show
            assert not log.exists()
        assert scoring.finish([[0, 1, 2, 3]]).total.tolist() == [0, 1, 2, 3]
        asked[name] = log.read_text()
        log.unlink()
    assert asked["serial"] == asked["overlapped"] == "0 1\n2 3\n"


def test_what_is_not_hidden_is_accounted_for(judge):
    serial = {"total": 20.5, "sampling": 12.0, "judging": 8.0}
    found = judge.compare(serial, {"total": 14.0, "sampling": 13.0, "judging": 9.0})
    assert found["hidden"] == pytest.approx(6.5 / 8)
    assert found["alone"] == pytest.approx(1 / 8)  # sampling is the longer: the end, when only the judge works
    assert found["slowed"] == pytest.approx(1 / 8)
    assert found["hidden"] == pytest.approx(1 - found["alone"] - found["slowed"] + found["between"])
    serial = {"total": 20.0, "sampling": 8.0, "judging": 12.0}
    found = judge.compare(serial, {"total": 13.0, "sampling": 11.0, "judging": 12.5})
    assert found["hidden"] == pytest.approx(7 / 8)
    assert found["alone"] == pytest.approx(0.5 / 8)  # judging is the longer: the start, when only the policy works
    assert found["slowed"] == pytest.approx(0.5 / 8)


def test_a_core_is_taken_and_given_back(judge):
    before = os.sched_getaffinity(0)
    core = min(before)
    assert core in judge.siblings(core)
    with judge.pinned(core):
        assert os.sched_getaffinity(0) == {core}
    assert os.sched_getaffinity(0) == before
    if len(before) > 1:
        with judge.pinned(core), pytest.raises(ValueError, match="two cores are needed"):
            judge.two_cores()


def test_processor_time_of_a_process_is_read(judge):
    before, own = judge.cpu_of(os.getpid()), time.process_time()
    while time.process_time() - own < 0.1:
        torch.ones(100).sum()
    assert 0.05 < judge.cpu_of(os.getpid()) - before < 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--micro-batches", "1"], "at least 2"),
        (["--micro-batches", "2", "--samples", "5", "--group", "4"], "whole groups"),
        (["--cores", "0", "0"], "two different ones"),
        (["--judge", "nowhere.yaml"], "there is no file"),
    ],
)
def test_what_cannot_be_measured_is_refused(judge, capsys, words, said):
    with pytest.raises(SystemExit) as stopped:
        judge.parse(words)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


def test_verdicts_are_never_cached(judge, tmp_path):
    options = judge.judge_options(judge.parse(["--votes", "3", "--judge-tokens", "9"]))
    assert options["cache"] is False
    assert (options["votes"], options["temperature"], options["max_tokens"]) == (3, 1.0, 9)
    other = tmp_path / "judge.yaml"
    other.write_text("{model: {url: 'http://x/v1', name: large}, rubric: '{{ response }}', cache: true, max_tokens: 5}")
    options = judge.judge_options(judge.parse(["--judge", str(other)]))
    assert options["cache"] is False
    assert (options["max_tokens"], judge.name_of(options["model"])) == (5, "large")


@pytest.mark.slow
@pytest.mark.skipif(not CRITIC.exists(), reason="the shipped critic is not there")
def test_output_is_whole(judge, tmp_path, capsys):
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("each role needs a core of its own")
    before = os.sched_getaffinity(0)
    judge.main(
        [
            "--rounds",
            "1",
            "--micro-batches",
            "2",
            "--samples",
            "4",
            "--group",
            "4",
            "--json",
            str(tmp_path / "out.json"),
        ]
    )
    assert os.sched_getaffinity(0) == before
    result = json.loads((tmp_path / "out.json").read_text())
    settings, (pair,) = result["settings"], result["compared"]
    assert settings["questions"] == 8
    assert settings["policy_core"] != settings["judge_core"]
    assert result["verdicts"] > 0.5, "the critic's answers cannot be read"
    serial, overlapped = (result["arms"][name][0] for name in judge.ARMS)
    assert serial["judging"] <= serial["waited"] * 1.2  # all of it after sampling
    assert serial["sampling"] + serial["judging"] <= serial["total"]
    assert overlapped["waited"] <= overlapped["total"]
    assert pair["hidden"] == pytest.approx(1 - pair["alone"] - pair["slowed"] + pair["between"])
    assert "hidden: **" in capsys.readouterr().out

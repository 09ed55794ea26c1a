"""Environments in processes of their own: what a call does there ends its own episode, and nothing else changes."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

import mmrl
from mmrl.config.environment import Environment as Section
from mmrl.config.loader import load_recipe
from mmrl.core.episode import Action
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.episodes import loading
from mmrl.episodes.environment import told_of
from mmrl.episodes.isolated import Isolated, end
from mmrl.episodes.loading import opened
from mmrl.episodes.pool import returned_by
from tests.support.episode_journal import WORLD, calls, play, section
from tests.support.episodes import SMALL, TOOLS, call, figures, played

allow_cpu_only()  # before transformers imports torchvision

WORLDS = '''
import os, pathlib, signal, subprocess, sys, time
import numpy as np
from PIL import Image
from mmrl.core.episode import Observation

class Once:
    """One of its episodes does what ``how`` says; the others end well."""
    def __init__(self, how, folder):
        self.how, self.folder = how, pathlib.Path(folder)
    def reset(self, prompt, seed):
        return "begin"
    def step(self, action):
        try:
            (self.folder / "done").touch(exist_ok=False)
        except FileExistsError:
            return Observation("well", reward=1.0, done=True)
        if self.how in ("hang", "leave"):
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (self.folder / "pid").write_text(f"{os.getpid()} {child.pid}")
        if self.how in ("hang", "stop"):
            os.kill(os.getpid(), signal.SIGSTOP) if self.how == "stop" else time.sleep(600)
        if self.how in ("exit", "leave"):
            os._exit(3)
        if self.how == "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        if self.how == "close":
            os.closerange(3, 1024)
            time.sleep(600)
        if self.how == "memory":
            return "x" * (1 << 40)
        if self.how == "grow":
            kept = []
            while True:
                kept.append(bytearray(1 << 24))
        if self.how == "return":
            return "x" * (300 << 20)
        if self.how == "raise":
            raise RuntimeError("broken")
        if self.how == "flood":
            for _ in range(20_000):
                print("y" * 1000)
                print("z" * 1000, file=sys.stderr)
        if self.how == "fork":
            if os.fork() == 0:
                time.sleep(600)
            os._exit(4)
        return Observation("well", reward=1.0, done=True)

class Shows:
    """Answers of all kinds."""
    answers = (
        "a text", None, ["a", "b"], Image.new("RGB", (8, 8), (1, 2, 3)), ["see", Image.new("L", (4, 4), 9)],
        [Observation("one", 0.5, call_id="c"), Observation(["x", Image.new("RGBA", (3, 3))], done=True)],
        Observation("n", np.float32(0.1), np.bool_(False), info={"a": np.ones(2), "b": "\\ud83d\\ude00 \\u2028"}),
        17, Observation("n", float("nan")), Observation(info={"a": {1}}),
    )
    def __init__(self):
        self.n = -1
    def reset(self, prompt, seed):
        return f"{prompt.text} {prompt.meta} {seed}"
    def step(self, action):
        self.n += 1
        return self.answers[self.n]
'''
FAULTS = {
    "hang": "did not return within",
    "stop": "did not return within",
    "exit": "its process ended with status 3",
    "leave": "its process ended with status 3",
    "crash": "its process ended by SIGSEGV",
    "close": "its process ended by SIGKILL",
    "memory": r"MemoryError \(environment.memory\)",
    "grow": r"MemoryError \(environment.memory\)",
    "return": "it answered with 300 MiB; at most 256 are taken",
    "fork": "(its process ended with status 4|did not return within)",
    "raise": "RuntimeError: broken",
    "flood": "",
}


@pytest.fixture
def worlds(tmp_path):
    (tmp_path / "worlds.py").write_text(WORLDS)
    return tmp_path


def gone(pids):
    """Whether the processes end, within a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if not any(alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param(*fault, marks=() if fault[0] == "exit" else pytest.mark.slow, id=fault[0])
        for fault in FAULTS.items()
    ],
)
def test_what_one_call_does_ends_its_episode_alone(worlds, how, words):
    given = {"name": f"{worlds}/worlds.py:Once", "options": {"how": how, "folder": str(worlds)}, "max_tokens": 90}
    waits = "5s" if "did not return" in words else "300s"  # a busy machine may take minutes to send 300 MiB
    given |= {"isolate": True, "timeout": waits, "memory": "2 GiB"}
    _, _, rows = played(load_recipe(["sums"], [*SMALL, f"environment={json.dumps(given)}"]), [("4", True, "stop")], 3)
    failed = [one.failure for one in rows.episodes if one.end == "failed"]
    assert sum(one.reward for one in rows.episodes) == 3 - len(failed)
    assert len(failed) == bool(words)
    assert all(re.search(words, why) for why in failed)
    if (worlds / "pid").exists():
        assert gone((worlds / "pid").read_text().split())


TRIED = '''
import os, signal, time

class Tried:
    """Does what ``how`` says when it is made (``where`` is made) or closed, also where no episode has begun."""
    def __init__(self, where, how):
        self.where, self.how, self.tools = where, how, [look]
        self.does("made")
    def does(self, where):
        if where == self.where:
            {"exit": lambda: os._exit(0), "raise": lambda: 1 / 0, "stop": lambda: exit(3),
             "hang": lambda: time.sleep(600), "crash": lambda: os.kill(os.getpid(), signal.SIGSEGV)}[self.how]()
    def reset(self, prompt, seed):
        return "begin"
    def step(self, action):
        return None
    def close(self):
        self.does("closed")

def look(where: str) -> str:
    """Look.

    Args:
        where: there
    """
    return where
'''


def tried(tmp_path, where, how, timeout):
    (tmp_path / "tried.py").write_text(TRIED)
    options = {"where": where, "how": how}
    return opened(Section(name=f"{tmp_path}/tried.py:Tried", options=options, isolate=True, timeout=timeout))


@pytest.mark.parametrize(
    "how", ["exit", *(pytest.param(how, marks=pytest.mark.slow) for how in ("raise", "stop", "hang", "crash"))]
)
def test_one_that_cannot_be_closed_without_an_episode_ends_nothing(tmp_path, how):
    factory = tried(tmp_path, "closed", how, 1 if how == "hang" else 60)
    assert (factory.closes, factory.stateless, factory.pictures) == (True, False, False)
    assert [schema["function"]["name"] for schema in factory.schemas] == ["look"]
    world = factory.make()
    assert told_of(returned_by(partial(world.reset, Prompt("p", "hi"), 1)))[0][0].content == "begin"
    end(world)


@pytest.mark.parametrize(
    ("how", "words"),
    [
        pytest.param("exit", "its process ended with status 0; mend its file", marks=pytest.mark.slow),
        ("raise", r"environment\.options: .* cannot be made with them: ZeroDivisionError"),
        pytest.param("stop", "SystemExit: 3; mend its file", marks=pytest.mark.slow),
        pytest.param("hang", r"did not return within 2 s .*; mend its file", marks=pytest.mark.slow),
        ("crash", "its process ended by SIGSEGV; mend its file"),
    ],
)
def test_one_that_cannot_be_made_is_refused_and_ends_nothing(tmp_path, monkeypatch, how, words):
    monkeypatch.setattr(loading, "_MADE", 2.0 if how == "hang" else 120.0)
    with pytest.raises(mmrl.UserError, match=words):
        tried(tmp_path, "made", how, 1)


def test_answers_come_as_from_threads(worlds):
    settings = Section(name=f"{worlds}/worlds.py:Shows")
    prompt = Prompt("p", "hi", {"answer": [1, None, "é"]})
    apart, here = Isolated(settings).make(), opened(settings).make()
    found, wanted = (told_of(returned_by(partial(world.reset, prompt, 2**62))) for world in (apart, here))
    assert found == wanted
    action = Action("é\u2028", tokens=(1, 2))
    for _ in range(11):
        found, wanted = (told_of(returned_by(partial(world.step, action))) for world in (apart, here))
        assert found == wanted
    end(apart)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        pytest.param("sums", ["environment={name: guess, max_turns: 3, max_tokens: 90}"], marks=pytest.mark.long),
        ("sums-tool", []),
    ],
)
def test_a_run_trains_as_with_threads(tmp_path, recipe, changes):
    runs = []
    for isolate in (False, True):
        more = [f"environment.isolate={isolate}", "sampling.max_new_tokens=64"]
        mmrl.train(recipe, changes=[*SMALL, *changes, *more], out=tmp_path / f"run{isolate}")
        kept = [file.read_text().splitlines() for file in sorted((tmp_path / f"run{isolate}/episodes").iterdir())]
        runs.append((figures(tmp_path / f"run{isolate}"), [sorted(rows) for rows in kept]))
    assert runs[0] == runs[1]


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 2])
def test_an_episode_that_was_ended_goes_on_in_another_process(tmp_path, at):
    (tmp_path / "worlds.py").write_text(WORLD)
    (tmp_path / "calls").touch()
    texts, environment = ["1", "22", "333"], section(tmp_path, isolate=True)
    whole, _ = play(tmp_path, tmp_path / "whole", section(tmp_path), texts)
    play(tmp_path, tmp_path / "run", environment, texts, at)
    again, journal = play(tmp_path, tmp_path / "run", environment, texts)
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert again.episodes == whole.episodes
    assert journal.taken == 1 + 2 * (1 + at)


@pytest.mark.slow
def test_functions_share_processes_and_are_never_called_twice(tmp_path, monkeypatch):
    (tmp_path / "worlds.py").write_text(WORLD)
    monkeypatch.setenv("DOUBLE_LOG", str(tmp_path / "calls"))
    texts = [call("double", n=1), call("double", n=2), "4"]
    environment = section(tmp_path, "double", options={}, max_tokens=200, isolate=True)
    play(tmp_path, tmp_path / "run", environment, texts, 2, "sums-tool")
    again, _ = play(tmp_path, tmp_path / "run", environment, texts, recipe="sums-tool")
    assert [one.turns[1].told[0].content for one in again.episodes] == ["4", "4"]
    assert sorted(calls(tmp_path)) == ["1", "1", "2", "2"]


PARENT = """
import sys
from mmrl.config.environment import Environment
from mmrl.episodes import loading
from mmrl.core.episode import Action
from mmrl.episodes.isolated import Isolated
world = Isolated(Environment(name=sys.argv[1], options={"how": "hang", "folder": sys.argv[2]})).make()
world.step(Action("x"))
"""


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGTERM])
def test_processes_end_with_a_run_that_is_killed(worlds, sent):
    command = [sys.executable, "-c", PARENT, f"{worlds}/worlds.py:Once", str(worlds)]
    parent = subprocess.Popen(command, start_new_session=True)
    while parent.poll() is None and not (worlds / "pid").exists():
        time.sleep(0.05)
    time.sleep(0.5)
    pids = (worlds / "pid").read_text().split()
    assert all(map(alive, pids))
    os.killpg(parent.pid, sent)
    parent.wait()
    assert gone(pids)


@pytest.mark.slow
def test_a_function_of_this_process_alone_is_refused_and_one_of_a_file_is_not(tmp_path):
    def here(n: int) -> int:
        """Doubles.

        Args:
            n: a number
        """
        return 2 * n

    (tmp_path / "my_tools.py").write_text(TOOLS)
    with pytest.raises(mmrl.UserError, match=r"environment\.isolate: python:here is in this process only"):
        mmrl.plan("sums", environment=here, changes=[*SMALL, "environment.isolate=true"])
    changes = [*SMALL, "environment.isolate=true", "environment.max_tokens=90"]
    mmrl.plan("sums", environment=here, changes=[*changes[:-2], "environment.isolate=false", changes[-1]])
    mmrl.plan("sums", environment=f"{tmp_path}/my_tools.py:add", changes=changes)


@pytest.mark.slow
def test_a_file_that_cannot_be_imported_again_is_named(tmp_path):
    file = tmp_path / "once.py"
    file.write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'begun')!r}).touch(exist_ok=False)\n{TOOLS}")
    settings = Section(name=f"{file}:Store", isolate=True)
    factory = opened(settings)
    with pytest.raises(mmrl.UserError, match=r"FileExistsError.*set environment\.isolate to false"):
        Isolated(settings).make()
    assert factory.make()

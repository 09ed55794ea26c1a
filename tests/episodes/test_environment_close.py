"""Every environment that was made is closed once, however its episode ends; what ``close`` does ends nothing else."""

import json
import time
from collections import Counter

import pytest

import mmrl
from mmrl.app.conformance import environments
from mmrl.app.conformance.running import results
from mmrl.config.environment import Environment as Section
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.episodes.loading import closed, closer_of, opened
from tests.support.episode_journal import play
from tests.support.episodes import SMALL, call, figures, played

allow_cpu_only()  # before transformers imports torchvision

WORLDS = '''
import asyncio, os, pathlib, time, uuid
from mmrl.core.episode import Observation

class Base:
    """Notes who begins and who is closed; ``how``: what ``step`` or ``close`` does."""
    def __init__(self, log, how=""):
        self.log, self.how, self.name = pathlib.Path(log), how, None
    def note(self, what):
        if self.name is not None:
            with open(self.log, "ab", buffering=0) as file:
                file.write(f"{what} {self.name}\\n".encode())
    def reset(self, prompt, seed):
        self.name = uuid.uuid4().hex
        self.note("begun")
        if self.how == "reset":
            raise ValueError("no beginning")
    def step(self, action):
        if self.how == "step":
            raise ValueError("no step")
        if self.how == "slow":
            time.sleep(60)
        return Observation("more", done=len(action.text) > 1)

class Plain(Base):
    def close(self):
        self.note("closed")
        if self.how == "raise":
            raise ValueError("no end")
        if self.how == "hang":
            time.sleep(300)
        if self.how == "exit" and self.name is not None:
            os._exit(3)
        return True

class Later(Base):
    async def close(self):
        await asyncio.sleep(0)
        self.note("closed")

class Block(Base):
    def __enter__(self):
        raise ValueError("nobody may call this")
    def __exit__(self, kind, value, trace):
        assert (kind, value, trace) == (None, None, None)
        self.note("closed")

class Tools:
    def __init__(self, log, how=""):
        self.world = Plain(log, how)
    def reset(self, **record):
        self.world.reset(None, 0)
    def look(self) -> str:
        """Look."""
        return "moss"
    def close(self):
        self.world.close()
'''


@pytest.fixture
def worlds(tmp_path):
    (tmp_path / "worlds.py").write_text(WORLDS)
    (tmp_path / "log").touch()
    return tmp_path


def section(worlds, name="Plain", how="", **more):
    given = {"name": f"{worlds}/worlds.py:{name}", "options": {"log": f"{worlds}/log", "how": how}, "max_tokens": 90}
    return f"environment={json.dumps(given | more)}"


def noted(worlds):
    """Those that began, and how often each was closed."""
    lines = [line.split() for line in (worlds / "log").read_text().splitlines()]
    return {name for what, name in lines if what == "begun"}, Counter(name for what, name in lines if what == "closed")


def all_closed_once(worlds, at_least):
    begun, closed = noted(worlds)
    return len(begun) >= at_least and closed == Counter(begun)


@pytest.mark.slow
@pytest.mark.parametrize("isolate", [False, True])
@pytest.mark.parametrize("name", ["Plain", "Later", "Block", "Tools"])
def test_it_is_closed_when_its_episode_ends(worlds, name, isolate):
    made, most = ("sums-tool", 200) if name == "Tools" else ("sums", 90)
    recipe = load_recipe([made], [*SMALL, section(worlds, name, isolate=isolate, max_tokens=most)])
    turns = [(call("look") if name == "Tools" else "4", True, "stop"), ("44", True, "stop")]
    _, _, rows = played(recipe, turns, 3)
    assert [(len(one.turns), one.end, one.unclosed) for one in rows.episodes] == [(2, rows.episodes[0].end, "")] * 3
    assert all_closed_once(worlds, 4)  # three episodes, and the one that begins for the prompt


@pytest.mark.slow
@pytest.mark.parametrize("isolate", [False, True])
def test_it_is_closed_when_its_episode_fails_and_when_the_run_is_stopped(worlds, isolate):
    recipe = load_recipe(["sums"], [*SMALL, section(worlds, how="step", isolate=isolate)])
    _, _, rows = played(recipe, [("4", True, "stop")], 3)
    assert [(one.end, one.unclosed) for one in rows.episodes] == [("failed", "")] * 3
    assert all_closed_once(worlds, 4)
    rows, _ = play(worlds, worlds / "run", section(worlds, isolate=isolate), ["1", "2", "3"], 1)
    assert rows is None
    assert all_closed_once(worlds, 7)
    with pytest.raises(UserError, match="no beginning"):
        mmrl.train("sums", changes=[*SMALL, section(worlds, how="reset", isolate=isolate)], out=worlds / "begun")
    assert all_closed_once(worlds, 8)


@pytest.mark.slow
def test_one_whose_call_hangs_is_closed_in_threads_and_killed_apart(worlds):
    for isolate in (False, True):
        (worlds / "log").write_text("")
        recipe = load_recipe(["sums"], [*SMALL, section(worlds, how="slow", isolate=isolate, timeout="1s")])
        _, _, rows = played(recipe, [("4", True, "stop")], 2)
        assert [(one.end, one.unclosed) for one in rows.episodes] == [("failed", "")] * 2
        begun, closed = noted(worlds)
        assert (len(begun), len(closed)) == (3, 1 if isolate else 3)


@pytest.mark.parametrize(
    ("how", "isolate", "words"),
    [
        ("raise", False, "ValueError: no end"),
        pytest.param("raise", True, "ValueError: no end", marks=pytest.mark.slow),
        pytest.param("hang", False, "did not return within 1 s", marks=pytest.mark.slow),
        pytest.param("hang", True, "did not return within 1 s", marks=pytest.mark.long),
        pytest.param("exit", True, "its process ended with status 3", marks=pytest.mark.slow),
    ],
)
def test_what_close_does_is_counted_and_named_and_changes_nothing_else(worlds, how, isolate, words):
    changes = [*SMALL, "sampling.max_new_tokens=8", "train.steps=1", "eval.every=null"]
    runs = {}
    for name in ("", how):
        changed = [*changes, section(worlds, how=name, isolate=isolate, max_turns=2, timeout="1s", workers=64)]
        began = time.monotonic()
        mmrl.train("sums", changes=changed, out=worlds / f"run{name}")
        assert time.monotonic() - began < 280  # else what hangs was waited for
        runs[name] = figures(worlds / f"run{name}")
    assert [row.pop("episode/unclosed") for row in runs[""]] == [0]
    assert [row.pop("episode/unclosed") for row in runs[how]] == [1]
    assert runs[how] == runs[""]
    lines = [json.loads(line) for line in (worlds / f"run{how}" / "failures.jsonl").read_text().splitlines()]
    assert len(lines) == 8
    assert all(line["reward"] == "environment.close" and words in line["error"] for line in lines)
    assert not (worlds / "run" / "failures.jsonl").exists() or not (worlds / "run" / "failures.jsonl").read_text()


def test_a_plan_and_a_check_close_what_they_make(worlds):
    options = {"log": f"{worlds}/log"}
    for name in ("Plain", "Later", "Block", "Tools"):
        settings = Section(name=f"{worlds}/worlds.py:{name}", options=options, timeout=1)
        assert opened(settings).closes
        case = environments.case_of(settings.name, options)
        assert not [one for one in results(environments.checks(case), None) if one.outcome == "FAILED"]
        begun, closings = noted(worlds)
        assert closings == Counter(begun)
    assert not opened(Section(name=f"{worlds}/worlds.py:Base", options=options)).closes
    case = environments.case_of(f"{worlds}/worlds.py:Plain", options | {"how": "raise"})
    assert all("close failed: ValueError: no end" in one.said for one in results(environments.checks(case), None)
               if one.name != "wrong calls are answered")  # fmt: skip
    world = opened(Section(name=f"{worlds}/worlds.py:Base", options=options)).make()
    assert closer_of(world) is None
    assert closed(world, 1.0) == ""

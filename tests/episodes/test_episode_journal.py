"""What environments answered is kept: a step that is taken again asks for no answer again."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import mmrl
from mmrl.app.verify import verify
from mmrl.core.episode import Observation
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import SampleId
from mmrl.episodes.journal import FOLDER, Journal, Kept
from tests.support import runs
from tests.support.episode_journal import calls, play, section, worlds  # noqa: F401
from tests.support.episodes import SMALL, figures

allow_cpu_only()  # before transformers imports torchvision


@pytest.mark.parametrize("at", [0, 1, 2])
def test_an_episode_that_was_ended_goes_on_as_if_it_had_not_been(worlds, at):
    texts = ["1", "22", "333"]
    whole, _ = play(worlds, worlds / "whole", section(worlds), texts)
    before = len(calls(worlds))
    play(worlds, worlds / "run", section(worlds), texts, at)
    again, journal = play(worlds, worlds / "run", section(worlds), texts)
    assert again.tokens.tolist() == whole.tokens.tolist()
    assert again.episodes == whole.episodes
    assert journal.taken == 1 + 2 * (1 + at)  # the group's beginning, and of each sample that and its turns
    assert len(calls(worlds)) > before


def test_a_world_that_is_gone_is_replayed_from_its_answers(worlds):
    texts = ["1", "22", "333"]
    whole, _ = play(worlds, worlds / "run", section(worlds), texts)
    made = calls(worlds)
    again, journal = play(worlds, worlds / "run", section(worlds, "Gone"), texts)
    assert again.episodes == whole.episodes
    assert (journal.missing, calls(worlds)) == (0, made)


def test_other_words_get_other_answers(worlds):
    play(worlds, worlds / "run", section(worlds), ["1", "22", "333"])
    again, journal = play(worlds, worlds / "run", section(worlds), ["1", "4444", "333"])
    whole, _ = play(worlds, worlds / "whole", section(worlds), ["1", "4444", "333"])
    assert again.episodes == whole.episodes
    assert journal.missing


def test_a_world_that_answers_otherwise_when_it_is_called_again_is_named(worlds):
    play(worlds, worlds / "run", section(worlds, "Forgetful"), ["1", "22", "333", "4"], 2)
    again, _ = play(worlds, worlds / "run", section(worlds, "Forgetful"), ["1", "22", "333", "4"])
    assert [one.end for one in again.episodes] == ["failed"] * 2
    assert "make it depend on its seed alone" in again.episodes[0].failure


def test_a_function_is_never_called_twice(worlds, monkeypatch):
    monkeypatch.setenv("DOUBLE_LOG", str(worlds / "calls"))
    asks = '<tool_call>{"name": "double", "arguments": {"n": %d}}</tool_call>'
    texts = [asks % 1, asks % 2, "4"]
    environment = section(worlds, "double", options={}, max_tokens=200)
    play(worlds, worlds / "run", environment, texts, 2, "sums-tool")
    again, _ = play(worlds, worlds / "run", environment, texts, recipe="sums-tool")
    assert [one.turns[1].told[0].content for one in again.episodes] == ["4", "4"]
    assert sorted(calls(worlds)) == ["1", "1", "2", "2"]
    (file,) = (worlds / "run" / FOLDER).iterdir()
    rows = [row for row in file.read_text().splitlines() if '"turn": 2' not in row or "asked" in row]
    file.write_text("".join(f"{row}\n" for row in rows))  # as if the run had been killed during the second call
    again, _ = play(worlds, worlds / "run", environment, texts, recipe="sums-tool")
    assert [one.end for one in again.episodes] == ["failed"] * 2
    assert "its answer is lost" in again.episodes[0].failure
    assert len(calls(worlds)) == 4


def test_rows_that_are_torn_or_from_somebody_else_say_nothing(tmp_path):
    id = SampleId(3, 0, 0, 1)
    told = Observation("a\u2028b", 0.1, True, False, "call_0_0", {"n": [1]})
    journal = Journal(tmp_path / "controllers" / "1")
    journal.asks(id, 1, "x")
    journal.tells(id, 1, "x", [told], "")
    journal.asks(id, 2, "y")
    journal.tells(id, 3, "z", [], "it failed")
    for wrong in (float("nan"), object()):
        with pytest.raises((TypeError, ValueError)):
            journal.tells(id, 4, "w", [Observation("", 0.0, info={"x": wrong})], "")
    file = tmp_path / "controllers" / "1" / FOLDER / "000003.jsonl"
    draw = random.Random(0)
    keys = ("slot", "attempt", "sample", "turn", "after", "told", "failed", "asked")
    values = (None, -1, 10**30, "x", [], [[]], [{}], {"content": 3}, True, 1.5)
    with file.open("a") as f:
        for _ in range(300):
            f.write(json.dumps({key: draw.choice(values) for key in keys}) + "\n")
        f.write('{"slot": 0, "attempt": 0, "sam')
    again = Journal(tmp_path)
    assert again.answer(id, 1, "x") == Kept((told,))
    assert again.answer(id, 2, "y") == Kept(lost=True)
    assert again.answer(id, 3, "z") == Kept(failure="it failed")
    assert again.answer(id, 1, "y") is None


@pytest.mark.slow
def test_verify_replays_a_step_without_its_environment(worlds):
    changes = [*SMALL, section(worlds), "checkpoint.every=1"]
    mmrl.train("sums", changes=changes, rewards=["environment"], out=worlds / "run")
    made = calls(worlds)
    text = (worlds / "worlds.py").read_text().replace("class Gone:", "class Counter:")
    (worlds / "worlds.py").write_text(text)  # the later class counts, and nobody may call it
    found = verify(worlds / "run", 2)
    assert [(part.of, one.name) for part in found.parts for one in part.found if not one.same] == []
    assert any("answers of the environment were taken" in note for note in found.notes)
    assert calls(worlds) == made


@pytest.mark.slow
@pytest.mark.parametrize("most", [2, pytest.param(100, marks=[pytest.mark.long, pytest.mark.timeout(7200)])])
def test_a_run_that_is_killed_again_and_again_is_as_one_that_was_not(worlds, most):
    changes = [*SMALL, section(worlds, options={"log": str(worlds / "calls"), "seconds": 0.02}), "checkpoint.every=1"]
    changes += [f"train.steps={max(3, most // 2)}", "eval.every=3", "environment.workers=2"]
    mmrl.train("sums", changes=changes, rewards=["environment"], out=worlds / "whole")
    command = [sys.executable, "-m", "mmrl", "train", "sums", *changes, "rewards=[{name: environment}]"]
    draw, kills, ended = random.Random(0), 0, None
    while ended != 0:
        how = "--resume" if (worlds / "run" / "recipe.yaml").exists() else "--overwrite"
        process = subprocess.Popen(
            [*command, "--out", str(worlds / "run"), how],
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=(worlds / "log").open("w"),
            cwd=Path(mmrl.__file__).parents[1],
        )
        noted, wait, later = len(calls(worlds)), draw.randint(1, 25), draw.random() * 0.2
        while process.poll() is None and kills < most:
            if len(calls(worlds)) - noted >= wait:
                time.sleep(later)  # so that a kill falls beside calls, too: in sampling, an update, a checkpoint
                os.killpg(process.pid, signal.SIGKILL)
                kills += 1
                break
            time.sleep(0.005)
        ended = process.wait(600)
        assert ended in (0, -signal.SIGKILL), (worlds / "log").read_text()[-2000:]
    assert kills == most
    assert told(worlds / "run") == told(worlds / "whole")
    assert figures(worlds / "run") == figures(worlds / "whole")


def told(run):
    """What the answers of a run's training say, by step, episode and turn; each was told once."""
    found = {}
    for file in run.rglob(f"{FOLDER}/0*.jsonl"):
        for row in map(json.loads, file.read_text().splitlines()):
            key = (file.name, *(row[name] for name in ("slot", "attempt", "sample", "turn", "after")))
            if "asked" not in row:
                assert key not in found, key
                found[key] = row.get("told")
    return found


@pytest.mark.slow
def test_unfinished_episodes_go_on_with_other_numbers_of_controllers(worlds):
    """Killed in the second step, gone on with by two controllers, killed in the third, and gone on with by one."""
    pytest.importorskip("ray")
    environment = section(worlds, options={"log": str(worlds / "calls"), "seconds": 0.05}, workers=2)
    changes = [*SMALL, environment, "rewards=[{name: environment}]", "checkpoint.every=1", "eval.every=null"]
    changes += ["train.steps=4", "optim.schedule=constant"]
    code, said = runs.ended(runs.train("sums", worlds / "whole", *changes), timeout=600)
    assert code == 0, said
    run = worlds / "run"
    for controllers, steps in ((1, 1), (2, 2)):
        more = [f"controllers={controllers}", *(["--resume"] if steps > 1 else [])]
        process = runs.train("sums", run, *changes, *more)
        wait_for(process, lambda steps=steps: len(runs.rows(run)) >= steps)
        noted = len(calls(worlds))
        wait_for(process, lambda noted=noted: len(calls(worlds)) >= noted + 8)
        left = runs.children(process.pid)
        process.kill()
        process.wait()
        for other in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                other.kill()
        assert not psutil.wait_procs(left, timeout=60)[1]
    assert len(runs.rows(run)) == 2
    code, said = runs.ended(runs.train("sums", run, *changes, "controllers=1", "--resume"), timeout=600)
    assert code == 0, said
    assert told(run) == told(worlds / "whole")
    for row, other in zip(runs.rows(worlds / "whole"), runs.rows(run), strict=True):
        for name in ("reward/mean", "episode/turns", "episode/reward", "episode/failed", "text/length", "policy/loss"):
            assert row[name] == pytest.approx(other[name], abs=1e-5), name


def wait_for(process, found):
    end = time.monotonic() + 300
    while not found():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end
        time.sleep(0.005)

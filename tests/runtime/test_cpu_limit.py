"""Where ``train.max_cpu_seconds`` ends a run before ``train.steps``: the learning rate, and the time left."""

import io
import itertools
import json
import re
import shutil
import signal

import pytest
import torch
from torch import nn

from mmrl.app.resume import same_run
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Optim
from mmrl.core import checkpoint_reader as reader
from mmrl.core.errors import UserError
from mmrl.logging import progress as shown
from mmrl.logging.expected import Pace, about, expected
from mmrl.logging.progress import Progress, status_line
from mmrl.logging.rundir import RunDir
from mmrl.models.policy import Policy
from mmrl.runtime.start import train
from tests.support.tiny_diffusion import two_blocks

SMALL = ["sampling.steps=2", "train.prompts_per_step=2", "train.micro_batch_size=2", "eval.every=null"]
LIMITED = [*SMALL, "optim={schedule: linear, lr: 1e-4}", "train.steps=20", "train.max_cpu_seconds=5"]
ROW = {"reward/mean": 0.6012, "reward/std": 0.21, "policy/ratio_max_dev": 1.2e-7, "policy/kl": 0.01, "time/step": 45.1}


@pytest.fixture
def cpu_clock(monkeypatch):
    """Every step takes one CPU-second."""
    ticks = itertools.count()
    monkeypatch.setattr("mmrl.placement.single_device.SingleDevice.cpu_seconds", lambda self, run: float(next(ticks)))


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("mmrl.logging.progress.time.monotonic", lambda: now[0])
    return now


def rates(schedule, spent, updates=(0, 40, 80)):
    torch.manual_seed(0)
    policy = Policy(nn.Linear(3, 2), Optim(lr=1.0, schedule=schedule), total_updates=100)
    found = []
    for policy.updates, policy.spent in zip(updates, spent, strict=True):
        found.append(policy.learning_rate())
    return found


def test_a_falling_learning_rate_follows_what_ends_the_run():
    assert rates("linear", (0.0, 0.8, 1.0)) == pytest.approx([1.0, 0.25, 0.05])
    assert rates("linear", (0.0, 5.0, 9.0)) == [1.0, 0.0, 0.0]
    assert rates("cosine", (0.0, 0.55, 1.05)) == pytest.approx([1.0, 0.5, 0.0])
    assert rates("cosine", (0.0, 5.0, 9.0)) == pytest.approx([1.0, 0.0, 0.0])


def test_measured_time_has_no_say_where_steps_end_the_run():
    steps = rates("linear", (0.0, 0.0, 0.0))
    assert rates("linear", (0.03, 0.44, 0.84)) == steps, "to the bit"
    assert rates("cosine", (0.03, 0.44, 0.84)) == rates("cosine", (0.0, 0.0, 0.0)), "to the bit"
    assert rates("constant", (0.0, 0.8, 1.0)) == [1.0, 1.0, 1.0]


def rows_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "perf/peak", "features/"))} for row in rows]


def test_a_run_that_the_limit_ends_goes_on_from_the_time_in_its_checkpoint(tmp_path, cpu_clock, capsys):
    loaded = load_recipe(["shapes-draft"], [*LIMITED, f"model.path={two_blocks()}", "checkpoint={every: 1, keep: 9}"])
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    train(loaded, whole)
    said = capsys.readouterr().err
    assert re.search(r"^about \S+ \w+ to go: 4 more steps \(train\.max_cpu_seconds\)$", said, re.MULTILINE)
    rows = rows_of(whole)
    assert [row["optim/lr"] for row in rows] == pytest.approx([1e-4, 8.5e-5, 6.5e-5, 4.5e-5, 2.5e-5])
    assert [row["perf/cpu_seconds"] for row in rows] == [1, 2, 3, 4, 5]
    shutil.copytree(whole, cut)
    for step in (4, 5):  # as if it had been killed in step 4
        shutil.rmtree(cut / "checkpoints" / f"step_{step:06d}")
    assert reader.steps(cut / "checkpoints")[-1] == 3
    train(loaded, cut, resume=True)
    assert [row["perf/cpu_seconds"] for row in rows_of(cut)] == [1, 2, 3, 4, 5], "they go on from the checkpoint's"
    assert rows_of(cut) == rows
    longer = load_recipe(["shapes-draft"], [*loaded.overrides, "train.max_cpu_seconds=9"])
    with pytest.raises(UserError, match=r"--resume: train\.max_cpu_seconds differ"):
        train(longer, cut, resume=True)


def ctrl_c(training, _):
    if training.step == 2:
        signal.raise_signal(signal.SIGINT)


def test_a_run_that_ctrl_c_stopped_goes_on_counting(tmp_path, cpu_clock):
    loaded = load_recipe(["shapes-draft"], [*LIMITED, f"model.path={two_blocks()}", "checkpoint={every: 10}"])
    train(loaded, tmp_path / "run", callbacks=[ctrl_c])
    rows = rows_of(tmp_path / "run")
    assert [row["perf/cpu_seconds"] for row in rows] == [1, 2]
    assert reader.steps(tmp_path / "run" / "checkpoints") == [2]
    train(loaded, tmp_path / "run", resume=True)
    rows = rows_of(tmp_path / "run")
    assert [row["perf/cpu_seconds"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["optim/lr"] for row in rows] == pytest.approx([1e-4, 8.5e-5, 6.5e-5, 4.5e-5, 2.5e-5])


def test_with_a_cosine_another_limit_is_refused(tmp_path):
    directory = RunDir(tmp_path)
    directory.resolved.write_text(json.dumps(load_recipe(["shapes-nft"], ["optim.schedule=cosine"]).resolved()))
    with pytest.raises(UserError, match=r"--resume: train\.max_cpu_seconds differ"):
        same_run(directory, load_recipe(["shapes-nft"], ["optim.schedule=cosine", "train.max_cpu_seconds=9"]))


def test_without_a_schedule_another_limit_may_be_set(tmp_path):
    directory = RunDir(tmp_path)
    directory.resolved.write_text(json.dumps(load_recipe(["shapes-nft"]).resolved()))
    same_run(directory, load_recipe(["shapes-nft"], ["train.max_cpu_seconds=9"]))


# ---- the time that is expected


@pytest.mark.parametrize(
    ("done", "spent", "pace", "said"),
    [
        (1, 0.0, Pace(5.0, 0.0, 4.0), "about 9 min to go: 99 more steps, 10 evaluations"),
        (1, 0.02, Pace(5.0, 0.02, 4.0), "about 4 min to go: 49 more steps (train.max_cpu_seconds), 5 evaluations"),
        (1, 0.005, Pace(5.0, 0.005, 4.0), "about 9 min to go: 99 more steps, 10 evaluations"),  # steps come first
        (91, 0.9, Pace(5.0, 0.05, 1.0), "about 10 s to go: 2 more steps (train.max_cpu_seconds), 1 evaluation"),
        (98, 0.0, Pace(5.0, 0.0, 0.0), "about 10 s to go: 2 more steps, 1 evaluation not counted"),  # on resume
        (99, 0.0, Pace(0.5, 0.0, 1.0), "about 2 s to go: 1 more step, 1 evaluation"),
    ],
)
def test_the_first_step_says_how_long_the_run_will_take(done, spent, pace, said):
    assert expected(done, 100, 10, pace, spent) == said
    assert len(said) <= 80


def test_an_estimate_is_rounded():
    found = [about(seconds) for seconds in (0.2, 8.4, 44, 89, 91, 3000, 5400, 7777, 90000)]
    assert found == ["1 s", "8 s", "40 s", "90 s", "2 min", "50 min", "1 h 30 min", "2 h 10 min", "25 h 00 min"]
    line = expected(1, 10, None, Pace(60.0, 0.0, 0.0), 0.0, may_stop=True)
    assert line == "at most about 9 min to go: 9 more steps"


# ---- the time left


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def frame(out):
    """What the newest bar looks like."""
    assert shown._live is not None
    out.truncate(out.seek(0))
    shown._live.refresh()
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", out.getvalue()).strip("\r\n")


def test_the_time_left_is_to_the_limit_where_that_comes_first(clock):
    out = io.StringIO()
    with Progress(125, "shapes-full", "steps", file=out) as progress:
        clock[0] += 300  # of a first evaluation
        for n in range(1, 13):
            clock[0] += 50
            progress.advance(1, "reward 0.41", spent=n * 10 / 600)
    lines = out.getvalue().splitlines()
    assert lines[-1] == "shapes-full: 12/~60 steps  40 min 00 s left  reward 0.41"


def test_the_first_time_left_leaves_out_what_was_done_before_the_first_step(clock):
    out = io.StringIO()
    with Progress(125, "shapes-full", "steps", file=out) as progress:
        clock[0] += 300
        progress.line("held-out: shapes 0.633", paced=False)
        clock[0] += 10
        progress.advance(1, spent=10 / 600)
    assert out.getvalue().splitlines()[1] == "shapes-full: 1/~60 steps  9 min 50 s left"


def test_a_run_that_the_limit_ended_says_how_long_it_took(clock):
    out = io.StringIO()
    with Progress(125, "shapes-full", "steps", done=60, file=out, spent=0.9) as progress:
        clock[0] += 50
        progress.advance(1, "reward 0.41", spent=1.002)
    assert out.getvalue().splitlines() == ["shapes-full: 61/125 steps  in 50 s  reward 0.41"]


@pytest.mark.parametrize("seconds", [4, 45])
def test_the_bar_keeps_count_time_and_reward_at_80_columns(seconds, clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Progress(125, "flux2-klein-base-4b-edit", "steps", file=out) as progress:
        assert "0/125 steps" in frame(out)
        for n in range(1, 13):
            clock[0] += seconds
            progress.advance(1, status_line(ROW), spent=n * seconds / 2700)
        line = frame(out)
        expected = "12/125 steps 7 min 32 s left" if seconds == 4 else "12/~60 steps 36 min 00 s left"
        assert expected in line
        assert "reward 0.601" in line
        assert len(line) <= 80
        clock[0] += 30
        assert ("7 min 02 s left" if seconds == 4 else "35 min 30 s left") in frame(out), "it runs on inside a step"
        with Progress(64, "evaluate", "samples", file=out) as inner:
            clock[0] += 10
            inner.advance(32)
            outer, line = frame(out).splitlines()
            assert "32/64 samples" in line
            assert "10 s left" in line
            assert "12/" in outer
            assert "reward 0.6" in outer


def test_a_wide_bar_shows_everything(clock, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setenv("TERM", "xterm")
    out = Terminal()
    with Progress(125, "shapes-full", "steps", file=out) as progress:
        clock[0] += 45
        progress.advance(1, status_line(ROW))
        line = frame(out)
    assert "1/125 steps in 45 s 1 h 33 min left reward 0.601 ±0.21  kl 0.010  45.1 s/step" in line

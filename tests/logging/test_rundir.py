"""A run's directory and lock, its JSONL and trackers, and what it tells while it goes on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

from mmrl.core.durations import duration
from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.logging.grids import write_samples
from mmrl.logging.metrics import METRICS, MetricsLog, describe, read
from mmrl.logging.progress import Progress, status_line
from mmrl.logging.rundir import RunDir, looks_like_run
from mmrl.logging.trackers import check_trackers, open_trackers

# ---- run directory


def test_create_makes_the_layout_and_names_the_three_edits(tmp_path):
    with RunDir.create(tmp_path / "a" / "run") as run:
        assert run.samples.is_dir()
        assert run.checkpoints.is_dir()
        run.metrics.write_text('{"step": 1}\n')
    with pytest.raises(UserError) as refused:
        RunDir.create(run.path)
    for edit in ("--resume", "--overwrite", "--out other"):
        assert edit in str(refused.value)


def test_overwrite_removes_what_a_run_made_and_nothing_else(tmp_path):
    elsewhere = tmp_path / "big-disk"
    elsewhere.mkdir()
    (elsewhere / "kept.bin").write_text("x")
    with RunDir.create(tmp_path / "run") as run:
        run.metrics.write_text('{"step": 1}\n')
        (run.path / "notes.txt").write_text("mine")
        run.checkpoints.rmdir()
        run.checkpoints.symlink_to(elsewhere)
    with RunDir.create(run.path, overwrite=True):
        assert not run.metrics.exists()
        assert (run.path / "notes.txt").read_text() == "mine"
        assert (elsewhere / "kept.bin").exists(), "a link was followed"
        assert run.checkpoints.is_dir()
        assert not run.checkpoints.is_symlink()


def test_a_run_that_came_to_nothing_is_replaced(tmp_path):
    """It failed while its model was loaded, say: there is nothing to keep, and the next attempt need not be asked."""
    with RunDir.create(tmp_path / "run") as run:
        run.env.write_text("{}")
        run.metrics.touch()
    with RunDir.create(run.path):
        assert not run.env.exists()
        (run.checkpoints / "step_000001").mkdir()
    with pytest.raises(UserError, match="already holds a run"):
        RunDir.create(run.path)


def test_a_directory_that_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("of another program")
    for flags in ({}, {"overwrite": True}, {"resume": True}):
        with pytest.raises(UserError, match=r"--out|--resume"):
            RunDir.create(tmp_path, **flags)
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]
    with pytest.raises(UserError, match="one of them"):
        RunDir.create(tmp_path, overwrite=True, resume=True)
    with pytest.raises(UserError, match="is a file"):
        RunDir.create(tmp_path / "metrics.jsonl")


def test_resume_needs_a_run_and_keeps_it(tmp_path):
    with pytest.raises(UserError, match=r"no run .* leave out --resume"):
        RunDir.create(tmp_path / "none", resume=True)
    assert not (tmp_path / "none").exists()
    with RunDir.create(tmp_path / "run") as run:
        run.metrics.write_text('{"step": 1}\n')
    with RunDir.create(run.path, resume=True):
        assert read(run.metrics) == [{"step": 1}]


def test_an_unwritable_place_is_a_users_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="--out other"):
        RunDir.create(tmp_path / "file" / "run")


HOLD = """
import sys, time
from mmrl.logging.rundir import RunDir
run = RunDir.create(sys.argv[1])
print("in", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
def test_two_processes_never_write_the_same_run(tmp_path):
    other = subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "in\n"
        owner = RunDir(tmp_path / "run").owner()
        assert owner is not None
        assert owner["pid"] == other.pid
        for flags in ({}, {"resume": True}, {"overwrite": True}):
            with pytest.raises(UserError, match=rf"pid {other.pid}|--resume"):
                RunDir.create(tmp_path / "run", **flags)
        with pytest.raises(UserError, match=f"pid {other.pid}"):
            RunDir.create(tmp_path / "run", resume=True)
        assert (tmp_path / "run" / "samples").is_dir(), "overwrite removed files of a live run"
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert RunDir(tmp_path / "run").owner() is None
    RunDir.create(tmp_path / "run", resume=True).close()


def test_recipe_is_kept_as_given_with_overrides_as_comments(tmp_path):
    import yaml

    source = tmp_path / "given.yaml"
    source.write_text("# override: stale=1\n# mine\nname: x\n")
    with RunDir.create(tmp_path / "run") as run:
        run.write_recipe([source], ["optim.lr=1e-5", "name=a\nevil: true"], {"name": "x"})
    text = run.recipe.read_text()
    assert source.read_text() in text
    assert yaml.safe_load(text) == {"name": "x"}, "an override broke out of its comment"
    assert run.overrides() == ["optim.lr=1e-5", "name=a\\nevil: true"]
    assert json.loads(run.resolved.read_text()) == {"name": "x"}
    assert looks_like_run(run.path)


def test_environment_tells_versions_and_nobodys_paths(tmp_path):
    with RunDir.create(tmp_path / "run") as run:
        run.write_environment()
    found = json.loads(run.env.read_text())
    assert found["versions"]["torch"]
    assert found["cpu"]["count"] >= 1
    for private in (str(Path.home()), str(Path.cwd()), os.uname().nodename):
        assert len(private) < 4 or private not in run.env.read_text()


def test_write_atomic_leaves_the_old_file_when_it_fails(tmp_path, monkeypatch):
    target = tmp_path / "x.json"
    write_atomic(target, "old")
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match="No space"):
        write_atomic(target, "new")
    assert target.read_text() == "old"
    assert list(tmp_path.iterdir()) == [target]


# ---- metrics


def test_rows_come_back_bit_for_bit_and_nonfinite_as_null(tmp_path):
    row = {"reward/mean": 0.1 + 0.2, "policy/kl": 1e-17, "count": 3}
    with MetricsLog(tmp_path / "m.jsonl") as log:
        log.write(1, row)
        assert read(log.path) == [{"step": 1, **row}], "a row must be on disk before the next step begins"
        log.write(2, {"a": float("nan"), "b": float("inf"), "c": 1.0})
        with pytest.raises(ValueError, match="step"):
            log.write(3, {"step": 1.0})
    assert "NaN" not in log.path.read_text()
    assert read(log.path)[1] == {"step": 2, "a": None, "b": None, "c": 1.0, "nonfinite": ["a", "b"]}


def test_a_torn_last_line_is_dropped_and_a_broken_middle_told(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "a": 0.\xc3')
    assert read(path) == [{"step": 1}]
    with MetricsLog(path) as log:
        log.write(2, {"a": 0.5})
    assert path.read_text() == '{"step": 1}\n{"step": 2, "a": 0.5}\n'
    path.write_text('{"step": 1}\n{"ste\n{"step": 3}\n')
    with pytest.raises(UserError, match="line 2"):
        read(path)
    assert read(tmp_path / "none.jsonl") == []


def test_truncate_after_cuts_what_a_resumed_run_writes_again(tmp_path):
    with MetricsLog(tmp_path / "m.jsonl") as log:
        for step in range(1, 6):
            log.write(step, {"a": step / 3})
        log.truncate_after(3)
        log.write(4, {"a": 9.0})
    assert [(r["step"], r["a"]) for r in read(log.path)] == [(1, 1 / 3), (2, 2 / 3), (3, 1.0), (4, 9.0)]


def test_a_run_forgets_rows_failures_and_samples_after_the_checkpoint(tmp_path):
    with RunDir.create(tmp_path / "run") as run, MetricsLog(run.metrics) as metrics, MetricsLog(run.heldout) as heldout:
        for step in range(0, 21):
            metrics.write(step, {"a": 1.0})
            if step % 10 == 0:
                heldout.write(step, {"a": 1.0})
                write_samples(run, step, [Image.new("RGB", (8, 8))], ["p"], [{"a": 1.0}])
    run.failure(5, "reward", "jpeg", "timeout")
    run.failure(15, "reward", "jpeg", "timeout")
    run.truncate_after(10)
    assert read(run.metrics)[-1]["step"] == read(run.heldout)[-1]["step"] == 10
    assert [r["step"] for r in read(run.failures)] == [5]
    assert sorted(p.name for p in run.samples.iterdir()) == [
        f"step_{s}{end}" for s in ("000000", "000010") for end in ("", ".json", ".png")
    ]


FULL_DISK = """
import resource, sys
from mmrl.core.errors import UserError
from mmrl.logging.metrics import MetricsLog
resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
log = MetricsLog(sys.argv[1])
try:
    for step in range(99):
        log.write(step, {"a": 0.5})
except UserError as error:
    print(error)
"""


def test_a_full_disk_is_told_and_leaves_whole_lines(tmp_path):
    path = tmp_path / "m.jsonl"
    told = subprocess.run([sys.executable, "-c", FULL_DISK, str(path)], capture_output=True, text=True, check=True)
    assert re.search(r"cannot write .*m\.jsonl: .*; free space there and continue with --resume", told.stdout)
    assert path.read_bytes().endswith(b"}\n"), "a part of a row stayed"
    assert [r["step"] for r in read(path)] == [0, 1, 2, 3], "four rows of 22 bytes fit into 100"


def test_every_metric_is_described_in_the_docs():
    text = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    documented = dict(re.findall(r"^\| `(.+?)` \| (.+?) \|$", text, re.M))
    assert {key: value.replace(r"\|", "|") for key, value in documented.items()} == METRICS
    assert describe("reward/shapes/colour") == METRICS["reward/<label>/<part>"]
    assert describe("time/decode") == METRICS["time/<phase>"]
    assert describe("nonsense") is None


# ---- trackers


def test_missing_and_unknown_trackers_are_told_before_anything_is_loaded(tmp_path, monkeypatch):
    with pytest.raises(UserError, match="no such tracker"):
        check_trackers(["mlflow"])
    (tmp_path / "wandb").mkdir()  # what wandb leaves where it ran is not the package
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(UserError, match=r"pip install .*\[wandb\]"):
        check_trackers(["wandb"])


def test_tensorboard_gets_the_same_scalars_and_grids_across_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with RunDir.create(tmp_path / "run") as run:
        for begin, value in ((1, 1.0), (3, 2.0)):  # a run killed after step 4, resumed from step 2
            trackers = open_trackers(["tensorboard"], run, "x")
            with MetricsLog(run.metrics, trackers) as log, MetricsLog(run.heldout, trackers, "heldout/") as heldout:
                for step in range(begin, 5):
                    log.write(step, {"reward/mean": value, "policy/kl": float("nan")})
                heldout.write(4, {"reward/shapes": value})
                heldout.picture(4, "samples", Image.new("RGB", (40, 30), "red"))
            trackers[0].close()
            time.sleep(1.1)  # event files are ordered by the second they were made in
    events = EventAccumulator(str(run.path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(1, 1.0), (2, 1.0), (3, 2.0), (4, 2.0)]
    assert [e.value for e in events.Scalars("heldout/reward/shapes")] == [2.0]
    assert "policy/kl" not in events.Tags()["scalars"]
    assert (events.Images("heldout/samples")[0].width, events.Images("heldout/samples")[0].height) == (40, 30)


# ---- progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_plain_progress_is_one_line_every_few_seconds_and_the_last(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("mmrl.logging.progress.time.monotonic", lambda: now[0])
    out = io.StringIO()
    with Progress(100, "train", "steps", done=40, file=out) as progress:
        for _ in range(60):
            now[0] += 0.5
            progress.advance(1, text="reward 0.41")
    lines = out.getvalue().splitlines()
    assert len(lines) == 6
    assert lines[0] == "train: 50/100 steps  25 s left  reward 0.41"
    assert lines[-1] == "train: 100/100 steps  in 30 s  reward 0.41"


def test_plain_progress_says_where_it_stopped():
    out = io.StringIO()
    with contextlib.suppress(KeyboardInterrupt), Progress(10, "evaluate", file=out) as progress:
        progress.advance(3)
        raise KeyboardInterrupt
    assert out.getvalue().startswith("evaluate: stopped 3/10")


def test_bars_nest_on_a_terminal_and_show_text_as_it_is():
    out = Terminal()
    with Progress(2, "train", "steps", file=out) as outer:
        outer.advance(1, text="[bold]not markup[/bold] 1/2")
        with Progress(4, "evaluate", "samples", file=out) as inner:
            inner.advance(4)
        outer.line("step 1 [red]as it is[/red]")
        outer.advance(1)
    with Progress(1, "again", file=out) as after:
        after.advance()
    shown = out.getvalue()
    for text in ("[bold]not markup[/bold]", "evaluate", "[red]as it is[/red]", "again"):
        assert text in shown


def test_status_line_tells_the_step_in_one_line():
    row = {
        "reward/mean": 0.4123,
        "reward/std": 0.21,
        "policy/ratio_max_dev": 1.2e-7,
        "policy/kl": 0.01,
        "time/step": 4.1,
    }
    assert status_line(row).split("  ") == ["reward 0.412 ±0.21", "kl 0.010", "4.1 s/step"]
    pairs = {"dpo/accuracy": 0.75, "dpo/margin": 0.2, "dpo/chosen_reward": 0.1, "policy/loss": 0.6}
    assert status_line(pairs).split("  ") == ["dpo/accuracy 0.750", "dpo/margin 0.200"]
    assert [duration(s) for s in (0.4, 42, 185, 7800)] == ["0.4 s", "42 s", "3 min 05 s", "2 h 10 min"]


@pytest.mark.parametrize("words", [[], ["--resume"]])
def test_a_directory_that_is_refused_is_refused_before_anything_is_planned(tmp_path, monkeypatch, capsys, words):
    import mmrl as python
    from mmrl.api import training
    from mmrl.planner import plan
    from tests.support.cli import mmrl

    def planned(*_):
        raise AssertionError("it was planned")

    monkeypatch.setattr(plan, "plan", planned)
    monkeypatch.setattr(training, "make_plan", planned)
    (tmp_path / "notes.txt").write_text("mine")
    assert mmrl("train", "sums", "--out", str(tmp_path), *words) == 2
    said = capsys.readouterr().err
    assert ("no run in" if words else "files that no run made") in said
    with pytest.raises(python.UserError, match=r"resume=True" if words else r"use out='other'"):
        python.train("sums", out=tmp_path, resume=bool(words))


def test_a_run_to_resume_is_looked_for_before_the_files_of_its_recipe(tmp_path, monkeypatch, capsys):
    import mmrl as python
    from tests.support.cli import mmrl

    monkeypatch.chdir(tmp_path)
    gone = "model.path=./gone"
    for call in (python.train, python.start):
        with pytest.raises(python.UserError, match=r"no run in runs/sums to resume; .*name the run with out='RUN'$"):
            call("sums", [gone], resume=True)
    assert mmrl("train", "sums", gone, "--resume") == 2
    assert "there is no run in runs/sums to resume; leave out --resume, or name the run with --out RUN" in (
        " ".join(capsys.readouterr().err.split())
    )
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "resolved.json").write_text("{}")
    with pytest.raises(python.UserError, match="is the folder of a run, which goes on with: mmrl continue other"):
        python.train("other", resume=True)

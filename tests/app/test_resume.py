"""A run that was killed goes on as if it had not been."""

import json
import random
import shutil
import signal
import time

import pytest

from mmrl.logging.metrics import read
from tests.support import recipes


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    done = recipes.train(out, "train.steps=6")
    assert done.returncode == 0, done.stderr
    return out


def wait_for_rows(out, n, process, seconds=120):
    """Wait until ``n`` rows are written."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        assert process.poll() is None or (out / "metrics.jsonl").exists(), process.stdout.read()
        if (out / "metrics.jsonl").exists() and len((out / "metrics.jsonl").read_text().splitlines()) >= n:
            return
        time.sleep(0.02)
    raise AssertionError(f"no {n} rows in {seconds} s")


@pytest.mark.slow
def test_after_kill_9_the_metrics_are_those_of_the_run_that_was_never_killed(tmp_path, uninterrupted):
    out = tmp_path / "run"  # pictures; a text recipe is killed more often, in test_random_kills.py
    process = recipes.start(out, "train.steps=6")
    wait_for_rows(out, 3, process)
    step = sorted(row["time/step"] for row in read(uninterrupted / "metrics.jsonl"))[3]
    time.sleep(random.uniform(0, 1.5 * step))
    process.kill()
    process.wait()
    done = recipes.train(out, "train.steps=6", "--resume")
    assert done.returncode == 0, done.stderr
    assert recipes.metrics(out) == recipes.metrics(uninterrupted)
    assert recipes.heldout(out) == recipes.heldout(uninterrupted)
    assert (out / "heldout_samples.jsonl").read_text() == (uninterrupted / "heldout_samples.jsonl").read_text()


@pytest.mark.slow
def test_ctrl_c_finishes_the_step_saves_and_says_how_to_go_on(tmp_path, uninterrupted):
    out = tmp_path / "run"
    process = recipes.start(out, "train.steps=6")
    wait_for_rows(out, 1, process)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=120)
    assert "stopping after this step" in text
    assert "--resume" in text
    assert "Traceback" not in text
    done = recipes.train(out, "train.steps=6", "--resume")
    assert done.returncode == 0, done.stderr
    assert recipes.metrics(out) == recipes.metrics(uninterrupted)


@pytest.mark.slow
def test_a_torn_checkpoint_is_named_and_an_older_one_taken(tmp_path, uninterrupted):
    out = tmp_path / "run"
    shutil.copytree(uninterrupted, out)
    weights = out / "checkpoints" / "step_000006" / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    done = recipes.train(out, "train.steps=6", "--resume")
    assert done.returncode == 0, done.stderr
    assert "step_000006 is not whole" in done.stderr
    assert "resuming after step 4" in done.stderr
    assert recipes.metrics(out) == recipes.metrics(uninterrupted)


@pytest.mark.slow
def test_another_recipe_is_no_resumption(uninterrupted):
    done = recipes.train(uninterrupted, "train.steps=6", "optim.lr=1e-5", "--resume")
    assert done.returncode == 2
    assert "optim.lr differ" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_finished_run_shows_what_it_should(uninterrupted):
    rows = recipes.metrics(uninterrupted)
    assert [r["step"] for r in rows] == [1, 2, 3, 4, 5, 6]
    assert all(r["policy/first_ratio_max_dev"] == 0 for r in rows)
    assert [r["step"] for r in recipes.heldout(uninterrupted)] == [0, 2, 4, 6]
    kept = [json.loads(line) for line in (uninterrupted / "heldout_samples.jsonl").read_text().splitlines()]
    for row, each in zip(recipes.heldout(uninterrupted), kept, strict=True):
        assert each["step"] == row["step"]
        assert len(each["prompts"]) == row["samples"]
        means = {key: sum(of) / len(of) for key, of in each["values"].items()}
        assert means == pytest.approx({key: of for key, of in row.items() if key.startswith("reward/")}, abs=1e-5)
    for name in ("recipe.yaml", "resolved.json", "env.json", "report.html", "samples/step_000006.png"):
        assert (uninterrupted / name).stat().st_size > 0
    assert sorted(p.name for p in (uninterrupted / "checkpoints").iterdir()) == ["step_000004", "step_000006"]


def test_a_run_directory_that_exists_is_not_overwritten(uninterrupted):
    before = recipes.metrics(uninterrupted)
    done = recipes.train(uninterrupted, "train.steps=6")
    assert done.returncode == 2
    assert "--resume" in done.stderr
    assert "--overwrite" in done.stderr
    assert recipes.metrics(uninterrupted) == before

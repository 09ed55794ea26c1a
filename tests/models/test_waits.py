"""A run in which a process waits for ever, from its first step on: it is named with its place, and the run goes on."""

import os
import re

import pytest

from tests.support.ranks import Command, free_port
from tests.support.runs import ROOT, SMALL, ended, rows, train

PATIENCE = 10
PLANTED = """
import importlib, os, signal, time
from pathlib import Path

import torch.distributed as dist
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    called()
    return [float(len(sample.text or "") % 2) for sample in samples]

def called():
    pass

def hang():
    time.sleep(3600)

def freeze():
    os.kill(os.getpid(), signal.SIGSTOP)

def slowly():
    # slower than the patience in all, and never without a sign of life for so long
    for _ in range(12):
        time.sleep(1.5)
        mmrl.core.notices.alive()

def plant(place, ranks, how):
    module, _, name = place.partition(":")
    owner = importlib.import_module(module) if module else importlib.import_module(__name__)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    inner = getattr(owner, last)

    def planted(*arguments, **more):
        rank = dist.get_rank()
        mark = Path({folder!r}) / f"mark-{{rank}}"
        if rank in ranks and not mark.exists():
            mark.touch()
            how()
        return inner(*arguments, **more)

    setattr(owner, last, planted)

plant({place!r}, {ranks!r}, {how})
"""
PLACES = {
    "gradients": ("mmrl.controller:Controller.gradients", "train"),
    "load": ("mmrl.app.build:Policy.__init__", "load"),
    "evaluation": ("mmrl.training.evaluation:Evaluator._make", "evaluation"),
    "transfer": ("mmrl.placement.device_tasks:_sync", "sample"),
    "data": ("mmrl.controller:Controller._read", "the time between phases"),
    "features": ("mmrl.controller.features:FeatureStore.put", "encode"),
    "save": ("mmrl.checkpoint.writer:save", "save"),
}
"""Where it blocks, and the phase that is named."""


def words(folder, place, ranks=(1,), how="hang", *more):
    """Of a recipe whose processes ``ranks`` do ``how`` once, when they come to ``place`` for the first time."""
    file = folder / "planted.py"
    file.write_text(PLANTED.format(place=place, ranks=ranks, how=how, folder=str(folder)))
    reward = f'rewards=[{{name: "{file}:score", timeout: 3, retries: 0}}]'
    return [*SMALL, reward, f"runtime.patience={PATIENCE}s", *more]


def blamed(said, seconds=PATIENCE):
    """Who and which phase the message names; it came in time, as the phase's own clock says."""
    found = re.search(
        r"controller (\d) of 2.*? makes no progress: (.+?) has shown no progress for (\d+) s.*?; it is in (.*)", said
    )
    assert found, said
    assert seconds <= int(found[3]) <= seconds + 60, said
    return int(found[1]), found[2], found[4]


def job(out, *arguments):
    """The two processes of a job with torchrun's variables: forked, they need not import the libraries."""
    port = str(free_port())
    each = [{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2} for rank in (0, 1)]
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
    given = [{key: str(value) for key, value in {**os.environ, **its, **where}.items()} for its in each]
    return [Command("mmrl.cli", ["train", "sums", *arguments, "--out", out], ROOT, env) for env in given]


def both(processes):
    """The exit codes, and what all printed."""
    found = [ended(process) for process in processes]
    return [code for code, _ in found], "".join(said for _, said in found)


def resumes(out, given):
    """The same command goes on with the run, to its end."""
    codes, said = both(job(out, *given, "--resume"))
    assert codes == [0, 0], said
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", [w if w in ("gradients", "save") else pytest.param(w, marks=pytest.mark.long) for w in PLACES]
)
def test_under_torchrun_a_process_that_blocks_is_named_and_the_run_resumes(tmp_path, where):
    place, phase = PLACES[where]
    rank = 0 if where == "save" else 1  # process 0 saves for all
    more = (
        ["eval.every=null"] if where in ("transfer", "features") else []
    )  # or an evaluation is the first to need them
    out, given = tmp_path / "run", words(tmp_path, place, (rank,), "hang", *more)
    codes, said = both(job(out, *given))
    assert all(codes), said
    who, what, at = blamed(said)
    assert (who, what) == (rank, phase)
    assert where == "save" or "hang (" in at
    resumes(out, given)


@pytest.mark.slow
@pytest.mark.parametrize(
    "where", ["gradients", *(pytest.param(w, marks=pytest.mark.long) for w in ("load", "evaluation", "transfer"))]
)
def test_under_ray_a_process_that_blocks_is_named_and_the_run_goes_on(tmp_path, where):
    pytest.importorskip("ray")
    place, phase = PLACES[where]
    more = ["eval.every=null"] if where == "transfer" else []
    given = words(tmp_path, place, (1,), "hang", "controllers=2", *more)
    code, said = ended(train("sums", tmp_path / "run", *given))
    assert code == 0, said
    assert blamed(said)[:2] == (1, phase)
    assert "all controllers start again after step 0" in said
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.long
@pytest.mark.slow
def test_the_second_device_of_a_controller_is_named(tmp_path):
    pytest.importorskip("ray")
    given = words(tmp_path, "mmrl.models.policy:Policy.accumulate", (1,), "hang", "devices_per_controller=2")
    code, said = ended(train("sums", tmp_path / "run", *given, "train.micro_batch_size=2", "ray=local"))
    assert code == 0, said
    assert re.search(r"device 1 of controller 0 of 1 \(.*\) makes no progress: backward has shown no progress", said), (
        said
    )
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2, 3, 4]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [(0,), pytest.param((0, 1), marks=pytest.mark.long)])
def test_process_0_and_both_are_named(tmp_path, ranks):
    out, given = tmp_path / "run", words(tmp_path, PLACES["gradients"][0], ranks)
    codes, said = both(job(out, *given))
    assert all(codes), said
    named = re.findall(r"controller (\d) of 2 \(process \d+ on [^)]*\) makes no progress: train", said)
    named = list(dict.fromkeys(named))  # process 1 says it, too, where process 0 is named
    assert named == [str(rank) for rank in ranks][: len(named)]
    assert named
    resumes(out, given)


@pytest.mark.slow
def test_a_process_that_is_slow_and_gets_on_is_not_ended(tmp_path):
    out, given = tmp_path / "run", words(tmp_path, PLACES["load"][0], (1,), "slowly")
    codes, said = both(job(out, *given))
    assert codes == [0, 0], said
    assert "makes no progress" not in said


@pytest.mark.long
@pytest.mark.slow
def test_a_process_that_is_stopped_in_its_first_step_is_named(tmp_path):
    out, given = tmp_path / "run", words(tmp_path, PLACES["gradients"][0], (1,), "freeze")
    started = job(out, *given)
    try:
        code, said = ended(started[0])
    finally:
        started[1].kill()
    assert code == 4
    assert re.search(r"controller 1 of 2 .* has given no sign of life for \d+ s; it is stopped \(SIGSTOP\)", said), said
    resumes(out, given)


@pytest.mark.long
@pytest.mark.slow
def test_a_reward_that_blocks_ends_by_its_own_deadline(tmp_path):
    out, given = tmp_path / "run", words(tmp_path, ":called", (1,), "hang")
    codes, said = both(job(out, *given))
    assert all(codes), said
    assert "makes no progress" not in said
    assert "planted" in said
    assert "timeout" in said
    resumes(out, given)


@pytest.mark.long
@pytest.mark.slow
def test_by_torchrun_itself(tmp_path):
    out, given = tmp_path / "run", words(tmp_path, PLACES["gradients"][0])
    port = str(free_port())
    started = ["--nnodes", "1", "--nproc-per-node", "2", "--master-port", port, "--max-restarts", "1", "-m", "mmrl"]
    code, said = ended(Command("torch.distributed.run", [*started, "train", "sums", *given, "--out", out], ROOT))
    assert code == 0, said
    assert blamed(said)[:2] == (1, "train")
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4]

"""Without Ray: torchrun's and Slurm's variables start the same program, one controller a process."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial

import pytest

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.runtime.external_launch import _on_one_host, _refuse, _told, with_processes
from mmrl.runtime.launchers import Launched, first_host, hidden_from_each_other, launched, own_device
from mmrl.runtime.rendezvous import meet
from tests.support import runs
from tests.support.ranks import Command, free_port
from tests.support.runs import ROOT, SMALL, UNHURRIED, children, ended, rows, wait_for

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.4", "MASTER_PORT": "29500"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODELIST": "n[07-08]",
    "SLURM_JOB_ID": "9",
}


def test_the_variables_of_each_launcher_say_which_process_this_is():
    found = launched(TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"})
    assert found is not None
    assert (found.rank, found.size, found.local, found.host, found.port) == (1, 4, 1, "10.0.0.4", 29500)
    assert found.command("mmrl train sums") == "torchrun --nnodes 2 --nproc-per-node 2 -m mmrl train sums"
    found = launched(SLURM)
    assert found is not None
    assert (found.rank, found.size, found.local, found.host) == (3, 4, 1, "n07")
    assert 20000 <= found.port < 32768
    assert launched(SLURM | {"MASTER_ADDR": "n8", "MASTER_PORT": "700"}).port == 700
    assert launched({**SLURM, "SLURM_JOB_ID": "10"}).port != found.port
    assert found.command("mmrl train sums") == "srun --ntasks 4 mmrl train sums"
    several = launched(SLURM | {"SLURM_NNODES": "2"}), launched(SLURM | {"SLURM_NNODES": "3"})
    assert several[0].command("mmrl").startswith("srun --ntasks 4 --ntasks-per-node 2 mmrl")
    assert several[1].command("mmrl").startswith("srun --ntasks 4 mmrl")


def test_a_process_alone_is_not_one_of_several():
    assert launched({}) is None
    assert launched(TORCHRUN | {"RANK": "0", "WORLD_SIZE": "1"}) is None
    script = SLURM | {"SLURM_PROCID": "0", "SLURM_TASK_PID": "7"}  # what a batch script has, before any srun
    assert launched(script) is None
    assert launched(script | {"SLURM_STEP_ID": "0"}) is not None
    inside = SLURM | {
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": "0",
    }  # srun -n 1 of a larger job
    assert launched(inside) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({k: v for k, v in TORCHRUN.items() if k != "MASTER_ADDR"}, ["MASTER_ADDR is not", "torchrun --nnodes N"]),
        ({"RANK": "0"}, ["WORLD_SIZE and LOCAL_RANK and MASTER_ADDR and MASTER_PORT are not"]),
        (TORCHRUN | SLURM, ["RANK=1", "SLURM_PROCID=3", "srun mmrl train RECIPE", "env -u SLURM_PROCID"]),
        ({k: v for k, v in SLURM.items() if k != "SLURM_NODELIST"}, ["SLURM_NODELIST is not set", "MASTER_ADDR"]),
        ({k: v for k, v in SLURM.items() if k != "SLURM_NTASKS"}, ["SLURM_NTASKS is not"]),
        (TORCHRUN | {"MASTER_PORT": "http"}, ["MASTER_PORT=http is no number"]),
        (TORCHRUN | {"RANK": "4"}, ["process 4 of 4 cannot be", "0 to 3"]),
    ],
)
def test_variables_that_say_nothing_or_too_much_are_refused_with_the_edit(environ, words):
    with pytest.raises(UserError) as refused:
        launched(environ)
    assert all(word in str(refused.value) for word in words), str(refused.value)


def test_the_first_host_of_a_list_of_nodes():
    lists = {"vm": "vm", "a,b": "a", "n[07-09,12]": "n07", "n[3,5],m": "n3", "gpu[001-002]-ib": "gpu001-ib", "": ""}
    assert {text: first_host(text) for text in lists} == lists


def test_each_process_has_a_gpu_of_its_own():
    torchrun, slurm = launched(TORCHRUN), launched(SLURM)
    assert own_device(torchrun, None) == "1"
    assert own_device(torchrun, "4,5,6,7") == "5"
    assert own_device(slurm, "0,1") == "1"
    assert own_device(slurm, "6") == "6"  # --gpus-per-task=1: Slurm has given each its own
    with pytest.raises(UserError, match=r"process 1 of this host needs 1 GPU of its own.*start fewer processes"):
        own_device(torchrun, "0")


def test_the_devices_of_a_controller_are_of_one_host():
    torchrun, slurm = launched(TORCHRUN), launched(SLURM)
    where = {n: {"host": host} for n, host in enumerate("aabb")}
    _on_one_host(where, torchrun, 1)
    _on_one_host(where, torchrun, 2)
    for found, option in ((torchrun, "torchrun --nproc-per-node"), (slurm, "srun --ntasks-per-node")):
        edit = rf"controller 0 would have its 4 devices on a and b.*a multiple of 4 processes on each host \({option}\)"
        with pytest.raises(UserError, match=edit):
            _on_one_host(where, found, 4)


def test_gpus_that_slurm_hides_from_each_other_are_said():
    slurm = launched(SLURM | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"})
    assert "--gpus-per-node in place of --gpus-per-task" in hidden_from_each_other(slurm, "0")
    assert not hidden_from_each_other(slurm, "0,1,2,3")
    assert not hidden_from_each_other(slurm, None)
    assert not hidden_from_each_other(launched(SLURM | {"SLURM_NNODES": "4"}), "0")  # one task a host
    assert not hidden_from_each_other(launched(TORCHRUN), "0")


tasks = partial(runs.tasks, size=2)


def unhurried(out):
    reward = out.parent / "unhurried.py"
    reward.write_text(UNHURRIED)
    return f'rewards=[{{name: "{reward}:score"}}]'


def same(out, other):
    """Equal to the bit, but for what is measured in seconds and bytes."""
    kept = [
        [
            {
                k: v
                for k, v in row.items()
                if not k.startswith(("time/", "perf/", "plan/", "memory/", "sent/", "balance/", "features/"))
            }
            for row in rows(o)
        ]
        for o in (out, other)
    ]
    assert kept[0] == kept[1]
    assert rows(out, "heldout.jsonl") == rows(other, "heldout.jsonl")
    name = "checkpoints/step_000004/weights.safetensors"
    assert (out / name).read_bytes() == (other / name).read_bytes()


@pytest.fixture(scope="module")
def by_slurm(tmp_path_factory):
    """A run of two tasks with Slurm's variables, and what each printed."""
    out = tmp_path_factory.mktemp("launched") / "slurm"
    found = [ended(task) for task in tasks("sums", out, *SMALL)]
    assert [code for code, _ in found] == [0, 0], found
    return out, [said for _, said in found]


@pytest.mark.slow
def test_two_tasks_of_slurm_are_two_controllers_and_one_of_them_prints(by_slurm):
    out, (said, other) = by_slurm
    assert "done: 4 steps" in said
    assert other == ""
    assert sorted(p.name for p in (out / "controllers").iterdir()) == ["1", "1.log"]
    assert "sums: 4/4 steps" in (out / "controllers" / "1.log").read_text()
    assert rows(out)[-1]["sent/gradients"] > 0
    assert (out / "report.html").exists()


@pytest.mark.slow
def test_torchrun_computes_the_same_to_the_bit(by_slurm, tmp_path):
    out = tmp_path / "torchrun"
    words = ["--nnodes", "1", "--nproc-per-node", "2", "--master-port", str(free_port()), "-m", "mmrl"]
    code, said = ended(Command("torch.distributed.run", [*words, "train", "sums", *SMALL, "--out", out], ROOT))
    assert code == 0, said
    assert said.count("done: 4 steps") == 1
    same(by_slurm[0], out)


@pytest.mark.slow
def test_ray_computes_the_same_to_the_bit(by_slurm, tmp_path):
    pytest.importorskip("ray")
    code, said = ended(Command("mmrl.cli", ["train", "sums", "controllers=2", *SMALL, "--out", tmp_path / "ray"], ROOT))
    assert code == 0, said
    same(by_slurm[0], tmp_path / "ray")


@pytest.mark.slow
def test_a_killed_process_is_named_and_the_job_resumes(by_slurm, tmp_path):
    out = tmp_path / "killed"
    words = [*SMALL, "runtime.patience=400s", unhurried(out)]
    first, second = tasks("sums", out, *words)
    wait_for(first, out, 2)
    second.kill()
    began = time.monotonic()
    code, said = ended(first)
    assert time.monotonic() - began < 380  # less than the patience
    assert code == 4
    assert f"controller 1 of 2 (process {second.pid} on {socket.gethostname()}) has died" in said
    assert "--resume" in said
    assert "srun --ntasks 2 mmrl train" in said
    found = [ended(task) for task in tasks("sums", out, *words, "--resume")]
    assert [code for code, _ in found] == [0, 0], found
    assert "resuming after step" in found[0][1]
    whole = tmp_path / "whole"
    found = [ended(task) for task in tasks("sums", whole, *words)]
    assert [code for code, _ in found] == [0, 0], found
    same(whole, out)


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_stopped_process_is_named_within_the_patience(tmp_path, victim):
    out = tmp_path / "stopped"
    job = tasks("sums", out, *SMALL, "runtime.patience=6s", unhurried(out))
    wait_for(job[0], out, 1)
    job[victim].send_signal(signal.SIGSTOP)
    try:
        code, said = ended(job[1 - victim], timeout=120)
    finally:
        job[victim].kill()
    assert code == 4
    assert f"controller {victim} of 2 (process {job[victim].pid}" in said
    assert "no sign of life for" in said
    assert "stopped (SIGSTOP)" in said


@pytest.mark.slow
def test_what_differs_between_processes_is_refused_before_a_model_is_loaded(tmp_path):
    patience = "runtime.patience=30s"
    cases = {
        "another recipe than process 0: train.steps is 5, and 4 there": {"each": [(), ("train.steps=5",)]},
        "is one of 3 processes, and process 0 one of 2": {"vary": [{}, {"SLURM_NTASKS": "3"}]},
    }
    for n, (expected, how) in enumerate(cases.items()):
        out = tmp_path / str(n)
        found = [ended(task, timeout=120) for task in tasks("sums", out, *SMALL, patience, **how)]
        assert [code for code, _ in found] == [2, 2], found
        said = found[0][1]
        assert expected in " ".join(said.split()), said
        assert "start all" in said
        assert "error" not in found[1][1]
        assert "load:" not in said
        assert not out.exists()


def test_process_0_that_refuses_the_run_stays_until_the_others_know():
    port, leads, left = free_port(), [], []
    processes = [Launched("srun", rank, 2, rank, "localhost", port) for rank in (0, 1)]
    store = meet(processes[0], 60.0)

    def follow():
        mine = meet(processes[1], 60.0)
        mine.first("came/1")
        leads.append(time.monotonic())
        time.sleep(0.5)  # a busy machine
        with pytest.raises(SystemExit):
            _told(mine, processes[1], "begin", 60.0)
        left.append(time.monotonic())

    thread = threading.Thread(target=follow)
    thread.start()
    while not leads:
        time.sleep(0.01)
    _refuse(store, processes[0], "another recipe")
    ended = time.monotonic()
    thread.join(60)
    assert left
    assert leads[0] + 0.5 <= ended < leads[0] + 30


def test_a_number_of_controllers_that_is_not_that_of_the_processes_is_refused(tmp_path):
    for code, said in [ended(task) for task in tasks("sums", tmp_path / "x", *SMALL, "controllers=3")]:
        assert code == 2
        assert "controllers: the recipe has 3 (command line), and srun started 2 processes, each a controller" in said
        assert "set controllers=2 or leave it out, or start 3 processes (srun --ntasks)" in said


def test_a_number_of_devices_that_does_not_divide_the_processes_is_refused():
    slurm = launched(SLURM | {"SLURM_NTASKS": "5"})
    with pytest.raises(UserError) as refused:
        with_processes(load_recipe(["sums"], ["devices_per_controller=2"]), slurm)
    said = str(refused.value)
    assert "srun started 5 processes, one for each device, and controllers of 2 need a multiple of 2" in said
    assert "start 6 processes (srun --ntasks), or set devices_per_controller=1" in said
    given = {5: "devices_per_controller=1", 6: "devices_per_controller=2"}
    for size, change in given.items():
        found = with_processes(load_recipe(["sums"], [change]), replace(slurm, size=size)).recipe
        assert found.controllers * found.devices_per_controller == size
    with pytest.raises(UserError, match=r"controllers: the recipe has 2 of 2 devices \(.*; set controllers=3 or leave"):
        with_processes(load_recipe(["sums"], ["devices_per_controller=2", "controllers=2"]), replace(slurm, size=6))


@pytest.mark.slow
def test_a_process_that_does_not_come_is_named(tmp_path):
    first, _ = job = tasks("sums", tmp_path / "x", *SMALL, "runtime.patience=3s")
    job[1].kill()
    code, said = ended(first)
    assert code == 2
    assert "of 2 processes 1 did not come within 3.0 s (runtime.patience)" in said


@pytest.mark.slow
def test_an_address_of_process_0_that_only_its_host_reaches_is_refused(tmp_path):
    first, second = tasks("sums", tmp_path / "x", *SMALL, "runtime.patience=3s", SLURM_NNODES=2)
    code, said = ended(first)
    second.kill()
    assert code == 2
    assert "on 2 hosts, and localhost is" in said
    assert "set MASTER_ADDR" in said


@pytest.mark.slow
def test_what_the_user_must_mend_in_one_process_ends_all_and_is_said_once(tmp_path):
    (tmp_path / "bad.py").write_text(
        "import os\nimport mmrl\n\n@mmrl.reward(inputs=('text',))\ndef score(samples, *, context):\n"
        "    if context.step == 1 and os.environ['SLURM_PROCID'] == '1':\n        raise ValueError('no luck')\n"
        "    return [0.5 * (s.id.sample % 2) for s in samples]\n"
    )
    reward = f'rewards=[{{name: "{tmp_path / "bad.py"}:score"}}]'
    (code, said), (other, silent) = [ended(task) for task in tasks("sums", tmp_path / "x", *SMALL, reward)]
    assert (code, other) == (2, 2)
    assert "controller 1 of 2: " in said
    assert "no luck" in said
    assert "steps up to 1 are saved; fix it, then: srun --ntasks 2 mmrl train" in said
    assert silent == ""


@pytest.mark.slow
def test_torchrun_starts_a_job_again_that_goes_on_where_it_was(tmp_path):
    out, printed = tmp_path / "run", tmp_path / "printed.txt"
    words = ["-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2", "--master-port", str(free_port())]
    words += ["--max-restarts", "1", "-m", "mmrl", "train", "sums", *SMALL, unhurried(out), "--out", out]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with printed.open("w") as said:
        job = subprocess.Popen([sys.executable, *words], stdout=said, stderr=said, env=environ)
    try:
        wait_for(job, out, 2)
        next(c for c in children(job.pid) if c.environ().get("RANK") == "1").kill()
        assert job.wait(300) == 0
    finally:
        for child in (*children(job.pid), job):
            child.kill()
    said = " ".join(printed.read_text().split())
    assert "error: controller 1 of 2 (process" in said
    assert re.search(r"resuming after step [123]", said)
    assert [row["step"] for row in rows(out)] == [1, 2, 3, 4]
    assert "done: 4 steps" in said


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_the_reward_in_whose_call_a_process_ends_is_named(victim, tmp_path):
    file = tmp_path / "kills.py"
    file.write_text(
        "import os, signal\nimport mmrl\n@mmrl.reward(inputs=('text',))\ndef score(samples, *, context):\n"
        f"    if context.step == 1 and os.environ['SLURM_PROCID'] == '{victim}':\n"
        "        os.kill(os.getpid(), signal.SIGKILL)\n    return [0.0] * len(samples)\n"
    )
    words = [*SMALL, "runtime.patience=120s", f"rewards=[{{name: '{file}:score'}}]"]
    both = [ended(task) for task in tasks("sums", tmp_path / "run", *words)]
    said = both[1 - victim][1]
    assert f"controller {victim} of 2" in said
    assert "has died, in a call of the reward kills.py:score" in said

"""One recipe with several devices a controller under Ray, torchrun and Slurm: equal to the bit, and it outlives the end
of a process and of a host; also where devices change roles and lend themselves."""

import os
import re
import shlex
import subprocess
import sys
from itertools import product

import pytest

from mmrl.config.loader import load_recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.runtime.launch_files import Job
from mmrl.runtime.launch_files import slurm as script
from tests.support.hosts import lose, network
from tests.support.ranks import Command, free_port
from tests.support.runs import ROOT, actors, children, ended, placed, rows, wait_for
from tests.support.slurm import MISSING, needed, slurm, until

allow_cpu_only()  # before transformers imports torchvision
pytestmark = pytest.mark.slow
SHAPE = ["controllers=2", "devices_per_controller=2", "device=cpu"]
RECIPE = [
    *("train.steps=3", "train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=4"),
    *("eval.every=3", "eval.samples=8", "checkpoint.every=1", "sampling.max_new_tokens=8"),
]
UNHURRIED = """
import time
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    time.sleep(0.5)  # so that there is time to kill a process
    return [float(sum(map(ord, sample.text or "")) % 7) for sample in samples]
"""
JUDGED = UNHURRIED.replace('inputs=("text",)', 'inputs=("text",), device=True')
ROLES = {
    "adaptive": ["placement=adaptive"],
    "lending": ["placement={type: disaggregated, trainers: 1, judges: 1, lend: true}"],
    "moving": ["placement={type: disaggregated, trainers: 1, judges: 1, split: adaptive, lend: true}"],
}
"""Of one controller with three devices and a reward that is computed on one."""
LOST = {
    "leader": r"controller 0 of 2 \(process \d+ on node0\) has ended",
    "host": r"controller 1 of 2 \(process \d+ on node1\) has given no sign of life",
}
"""What a run of two hosts loses, and what it says then."""
MEASURED = ("time/", "perf/", "plan/", "memory/", "sent/", "balance/", "features/", "placement/")


def words(folder, roles=()):
    """Of ``mmrl``, with the run in ``folder``; ``roles``: the override of three devices that judge, too."""
    reward = folder / "unhurried.py"
    reward.write_text(JUDGED if roles else UNHURRIED)
    shape = ["controllers=1", "devices_per_controller=3", "device=cpu", *roles] if roles else SHAPE
    given = [*RECIPE, *shape, f'rewards=[{{name: "{reward}:score"}}]', "--out", str(folder / "run")]
    return ["train", "sums", *given]


def by_torchrun(folder, roles=()):
    count = "3" if roles else "4"
    shape = ["--nnodes", "1", "--nproc-per-node", count, "--max-restarts", "1", "--master-port", free_port()]
    return Command("torch.distributed.run", [*shape, "-m", "mmrl", *words(folder, roles)], ROOT)


class Batch:
    """A job of Slurm, with what the test uses of ``Command``; ``each``: devices of a host."""

    returncode = None

    def __init__(self, cluster, folder, roles=(), each=None):
        self.cluster, self.log = cluster, folder / "printed"
        command = (sys.executable, "-m", "mmrl", *words(folder, roles))
        loaded = load_recipe(["sums"], [*SHAPE, "controllers=1", "devices_per_controller=3"] if roles else SHAPE)
        printed = script(Job(loaded.recipe, command, folder / "run", ROOT, per_node=each, cpus=1))
        (folder / "job.sh").write_text(printed.replace("--output=sums-%j.log", f"--output={self.log}"))
        self.number = cluster.said("sbatch", "--parsable", folder / "job.sh").strip()
        self.pid = os.getpid()

    def poll(self):
        found = self.cluster.said("scontrol", "show", "job", self.number)
        assert "Reason=launch_failed" not in found, (self.cluster.folder / "log").read_text()
        self.restarts = int(re.search(r"Restarts=(\d+)", found)[1])
        if (state := re.search(r"JobState=(\w+)", found)[1]) in ("COMPLETED", "FAILED", "CANCELLED"):
            self.returncode = int(state != "COMPLETED")
        return self.returncode

    def communicate(self, timeout=300):
        until(lambda: self.poll() is not None, lambda: self.log.read_text(), timeout)
        return self.log.read_text(), None


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbs."""
    folder = tmp_path_factory.mktemp("whole")
    code, printed = ended(by_torchrun(folder))
    assert code == 0, printed
    return folder / "run"


@pytest.fixture(scope="module")
def two_hosts():
    """A Slurm of two hosts, and these."""
    with network(2) as hosts, slurm(hosts, OMP_NUM_THREADS="1") as cluster:
        yield cluster, hosts


def killed(process, out, victim, name="device 1 of controller 1 of 2"):
    """A run whose process ``victim()``, of the ``name``, is killed after a step comes to its end."""
    goes_on(process, out, lambda: victim().kill(), rf"{name} .*died")


def goes_on(process, out, lost, says):
    """``lost()`` makes a run lose a process after a step, the run ``says`` so, and comes to its end."""
    wait_for(process, out, 1)
    lost()
    printed = process.communicate(timeout=400)[0]
    assert process.returncode == 0, printed
    assert re.search(says, printed), printed
    # The row of a step may be there before its checkpoint is.
    assert re.search(r"(resuming|start again) after step [12]|no checkpoint yet: starting", printed), printed
    assert "done: 3 steps" in printed


def same(out, other, controllers=2, devices=2):
    """Equal to the bit, but for what is measured in seconds and bytes; every device did something."""
    kept = [[{k: v for k, v in row.items() if not k.startswith(MEASURED)} for row in rows(o)] for o in (out, other)]
    assert kept[0] == kept[1]
    assert rows(out, "heldout.jsonl") == rows(other, "heldout.jsonl")
    weights = "checkpoints/step_000003/weights.safetensors"
    assert (out / weights).read_bytes() == (other / weights).read_bytes()
    assert {(line["controller"], line["device"]) for line in placed(out) if "device" in line} == set(
        product(range(controllers), range(devices))
    )


def process_of(number, processes, variable):
    return next(p for p in processes if p.environ().get(variable) == number)


def test_torchrun_starts_all_again(whole, tmp_path):
    process = by_torchrun(tmp_path)
    killed(process, tmp_path / "run", lambda: process_of("3", children(process.pid), "RANK"))
    same(whole, tmp_path / "run")


def test_ray_starts_all_again(whole, tmp_path):
    pytest.importorskip("ray")
    process = Command("mmrl.cli", words(tmp_path), ROOT)
    killed(process, tmp_path / "run", lambda: actors(process)[-1], r"(device \d of )?controller \d of 2")
    same(whole, tmp_path / "run")


@needed
def test_slurm_queues_the_job_again(whole, tmp_path):
    with slurm(OMP_NUM_THREADS="1") as cluster:
        job = Batch(cluster, tmp_path)
        killed(job, tmp_path / "run", lambda: cluster.task(3))
        assert job.restarts == 1
    same(whole, tmp_path / "run")


@needed
@pytest.mark.parametrize("lost", LOST)
def test_slurm_of_two_hosts_queues_the_job_again(two_hosts, whole, tmp_path, lost):
    cluster, hosts = two_hosts
    job = Batch(cluster, tmp_path, each=2)

    def lose_one():
        if lost == "leader":
            cluster.task(0).kill()
        else:
            lose(hosts[1])
            until(lambda: job.poll() is None and job.restarts, lambda: job.log.read_text(), 200)
            cluster.boot("node1")

    goes_on(job, tmp_path / "run", lose_one, LOST[lost])
    assert job.restarts == 1
    same(whole, tmp_path / "run")


@needed
def test_srun_of_two_hosts_saves_when_it_is_cancelled_and_its_own_command_continues(two_hosts, whole, tmp_path):
    cluster, _ = two_hosts

    def srun(*given):
        return cluster.start(["srun", *given], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=ROOT)

    mmrl = [sys.executable, "-m", "mmrl"]
    process = srun("--job-name=cancelled", "--ntasks=4", "--ntasks-per-node=2", *mmrl, *words(tmp_path))
    wait_for(process, tmp_path / "run", 1)
    cluster.said("scancel", "--name=cancelled")
    printed = process.communicate(timeout=200)[0]
    again = re.search(r"stopped after step [12]; continue with: srun (.*) mmrl (train .* --resume)", printed)
    assert again, printed
    process = srun(*shlex.split(again[1]), *mmrl, *shlex.split(again[2]))
    printed = process.communicate(timeout=200)[0]
    assert process.returncode == 0, printed
    assert "resuming after step" in printed
    same(whole, tmp_path / "run")


@pytest.mark.parametrize("name", ROLES)
def test_devices_change_roles_under_each_launcher(name, tmp_path):
    pytest.importorskip("ray")
    folders = {launcher: tmp_path / launcher for launcher in ("ray", "torchrun", "slurm")}
    for folder in folders.values():
        folder.mkdir()
    code, printed = ended(Command("mmrl.cli", words(folders["ray"], ROLES[name]), ROOT))
    assert code == 0, printed
    process, out = by_torchrun(folders["torchrun"], ROLES[name]), folders["torchrun"] / "run"
    killed(process, out, lambda: process_of("1", children(process.pid), "RANK"), "device 1 of controller 0 of 1")
    same(folders["ray"] / "run", out, 1, 3)
    if not MISSING:
        with slurm(OMP_NUM_THREADS="1") as cluster:
            job = Batch(cluster, folders["slurm"], ROLES[name])
            printed = job.communicate(timeout=400)[0]
        assert job.returncode == 0, printed
        same(folders["ray"] / "run", folders["slurm"] / "run", 1, 3)

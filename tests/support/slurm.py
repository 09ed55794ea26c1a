"""A Slurm of this machine alone, for tests: its controller, its nodes, and a munge by which they know each other.

Of one node, on ports of the loopback, or of a node in each of several hosts (``tests/support/hosts.py``). Any user may
start the first, and only root the second. All that it has started ends with it, also where a test fails.
"""

import getpass
import os
import shlex
import shutil
import subprocess
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

from tests.support.ranks import free_port

PROGRAMS = ("slurmctld", "slurmd", "srun", "sbatch", "scontrol", "munged", "setpriv")
MISSING = [name for name in PROGRAMS if not shutil.which(name)]
needed = pytest.mark.skipif(bool(MISSING), reason=f"Slurm lacks {', '.join(MISSING)} (Debian: slurm-wlm, munge)")
CONFIGURATION = """
ClusterName=test
SlurmctldHost={first}({address})
SlurmctldPort={port}
SlurmdPort={node_port}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge,cred_expire=30
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdTimeout=30
MessageTimeout=60
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
PartitionName=all Nodes=ALL Default=YES State=UP
"""
"""A job that is queued again waits for ``cred_expire``, 2 minutes by default; a node that is silent for
``SlurmdTimeout``, 5 minutes by default, is lost."""


@dataclass(frozen=True)
class Slurm:
    """``nodes``: the words before a command on each; ``environ``: the variables with which commands find it."""

    folder: os.PathLike
    environ: dict
    nodes: dict
    servers: list = field(default_factory=list)

    def start(self, words, node="", **more):
        """A process on ``node``, by default the first."""
        before = self.nodes[node or next(iter(self.nodes))]
        return subprocess.Popen([*before, *map(str, words)], env=self.environ, **more)

    def said(self, *words):
        return self.start(words, stdout=subprocess.PIPE, text=True).communicate()[0]

    def serve(self, words, node=""):
        """A server on ``node``. It ends at the latest with the test's process."""
        with (self.folder / "log").open("a") as log:
            server = self.start(["setpriv", "--pdeathsig", "KILL", *words], node, stdout=log, stderr=log)
        self.servers.append(server)

    def boot(self, node):
        self.serve(["slurmd", "-D", "-N", node], node)

    def processes(self):
        """All that belong to it: servers, the tasks that they have started, and commands."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("SLURM_CONF") == self.environ["SLURM_CONF"]:
                    found.append(process)
        return found

    def task(self, number):
        """The process of ``mmrl`` with this number."""
        for process in self.processes():
            with suppress(psutil.Error):
                if process.environ().get("SLURM_PROCID") == str(number) and "python" in process.exe():
                    return process
        raise AssertionError(f"no task {number}")

    def ready(self):
        """Wait for all nodes."""
        states = ["sinfo", "--noheader", "--Node", "--format=%T"]
        until(lambda: self.said(*states).split() == ["idle"] * len(self.nodes), (self.folder / "log").read_text)


@contextmanager
def slurm(hosts=(), **environ):
    """A ``Slurm`` of the loopback, or of one node for each of ``hosts``; ``environ``: more variables of its jobs."""
    with TemporaryDirectory(prefix="slurm-") as short:  # a socket's path has 107 characters at most
        yield from _in(Path(short), hosts, environ)


def _in(folder, hosts, environ):
    names = {f"node{i}": host for i, host in enumerate(hosts)} or {"localhost": None}
    for name in ("state", *(f"spool-{node}" for node in names)):
        (folder / name).mkdir(parents=True)
    configuration, known = folder / "slurm.conf", folder / "hosts"
    known.write_text("".join(f"{host.address} {node}\n" for node, host in names.items() if host))
    addresses = {node: host.address if host else "127.0.0.1" for node, host in names.items()}
    first, user, ports = next(iter(names)), getpass.getuser(), {"port": free_port(), "node_port": free_port()}
    text = CONFIGURATION.format(first=first, address=addresses[first], user=user, folder=folder, **ports)
    nodes = [f"NodeName={node} NodeAddr={address} CPUs=8 State=UNKNOWN\n" for node, address in addresses.items()]
    configuration.write_text(text + "".join(nodes))
    before = {node: _within(host, node, known) if host else [] for node, host in names.items()}
    cluster = Slurm(folder, {**os.environ, **environ, "SLURM_CONF": str(configuration)}, before)
    try:
        cluster.serve(_munge(folder))
        until((folder / "munge").exists, (folder / "log").read_text)
        cluster.serve(["slurmctld", "-D"])
        for node in names:
            cluster.boot(node)
        cluster.ready()
        yield cluster
    finally:
        for process in cluster.processes():
            with suppress(psutil.Error):
                process.kill()
        for server in cluster.servers:
            server.wait(60)


def _munge(folder):
    key = folder / "key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"socket": "munge", "key-file": "key", "pid-file": "munge.pid", "seed-file": "munge.seed"}
    # By force, as only the owner reads the folders of tests.
    return ["munged", "--foreground", "--force", *(f"--{option}={folder / name}" for option, name in files.items())]


def _within(host, node, known):
    """The words before a command on ``host``, where its name is ``node`` and the file ``known`` has the names of all.
    Not by ``ip netns exec``, which hides the control groups that slurmd looks for."""
    name = f'mount --bind {shlex.quote(str(known))} /etc/hosts && hostname {node} && exec "$@"'
    return ["nsenter", f"--net=/run/netns/{host.name}", "unshare", "--mount", "--uts", "sh", "-c", name, "sh"]


def until(condition, otherwise=str, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.2)

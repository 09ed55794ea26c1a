"""A Slurm of this machine alone, for tests: its controller and one node, on ports of the loopback."""

import getpass
import os
import shutil
import subprocess
import time
from contextlib import contextmanager

from tests.support.ranks import free_port

INSTALLED = all(map(shutil.which, ("slurmctld", "slurmd", "srun", "sbatch", "scontrol")))
"""The Debian package is slurm-wlm."""
CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmdPort={node_port}
AuthType=auth/none
CredType=cred/none
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
NodeName=localhost NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES State=UP
"""


@contextmanager
def slurm(folder):
    """The variables with which its commands find it."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    configuration = folder / "slurm.conf"
    given = {"port": free_port(), "node_port": free_port(), "user": getpass.getuser(), "folder": folder}
    configuration.write_text(CONFIGURATION.format(**given))
    environ = {**os.environ, "SLURM_CONF": str(configuration)}
    with (folder / "log").open("w") as log:
        servers = [
            subprocess.Popen(words, env=environ, stdout=log, stderr=log)
            for words in (["slurmctld", "-D"], ["slurmd", "-D", "-N", "localhost"])
        ]
    try:
        until(lambda: "idle" in said(["sinfo", "--noheader", "--format=%T"], environ), (folder / "log").read_text)
        yield environ
    finally:
        subprocess.run(["scancel", "--user", getpass.getuser(), "--full", "--signal=KILL"], env=environ, check=False)
        for server in reversed(servers):
            server.terminate()
            server.wait(60)


def said(words, environ):
    return subprocess.run(words, env=environ, capture_output=True, text=True, check=False).stdout


def until(condition, otherwise=str, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        time.sleep(0.2)

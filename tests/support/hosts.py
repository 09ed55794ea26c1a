"""Hosts of a network on one machine: network namespaces of Linux, each with an interface and an address of its own."""

import ctypes
import os
import shutil
import signal
import subprocess
import sys
import uuid
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.ranks import run, warm

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": str(ROOT),
    "RAY_AUTH_MODE": "token",  # what Ray asks for by itself where it listens beyond the loopback
    "RAY_AUTH_TOKEN": "t" * 40,
    "RAY_worker_niceness": "0",
}


def ip(*words):
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


@dataclass(frozen=True)
class Host:
    name: str
    address: str

    def start(self, command, **more):
        return subprocess.Popen(["ip", "netns", "exec", self.name, *command], **more)

    def warm(self, script, *words):
        """A process here that runs the file ``script`` with ``words``, forked from one that has the libraries."""
        process = warm.Process(
            target=_inside, args=(self.name, str(script), [str(word) for word in words]), daemon=True
        )
        process.start()
        return process

    def run(self, command, **more):
        return subprocess.run(["ip", "netns", "exec", self.name, *command], **more)

    def counted(self):
        """Bytes received and sent over the interface since it is there, as the kernel counts them."""
        files = [f"/sys/class/net/eth0/statistics/{way}_bytes" for way in ("rx", "tx")]
        return [int(n) for n in self.run(["cat", *files], capture_output=True, text=True, check=True).stdout.split()]

    def overhead(self):
        """Bytes that TCP itself has sent: headers and acknowledgements, and at most a packet for each sent again."""
        file = "/sys/class/net/eth0/statistics/tx_packets"
        packets = int(self.run(["cat", file], capture_output=True, text=True, check=True).stdout)
        return 66 * packets + 1514 * self.resent()  # Ethernet 14, IP 20, TCP with times 32

    def resent(self):
        """TCP segments that the host has sent again, as the kernel counts them."""
        told = self.run(["cat", "/proc/net/snmp"], capture_output=True, text=True, check=True).stdout
        names, values = (line.split() for line in told.splitlines() if line.startswith("Tcp:"))
        return int(values[names.index("RetransSegs")])


def _inside(name, script, words):
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{name}") as file:
        if libc.setns(file.fileno(), 0x40000000):  # CLONE_NEWNET
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")
    run(script, words)


@contextmanager
def network(n, subnet=None):
    """``n`` hosts on one wire, cut off from everything else. Skips the test where this user may make none."""
    if not shutil.which("ip") or os.geteuid() != 0:
        pytest.skip("network namespaces need Linux, root and iproute2")
    mark = uuid.uuid4().hex[:6]
    subnet = subnet or f"10.{200 + os.getpid() % 50}.{int(mark[:2], 16)}"
    wire = f"mmrl-{mark}-wire"
    hosts = [Host(f"mmrl-{mark}-{i}", f"{subnet}.{i + 1}") for i in range(n)]
    made = []
    try:
        try:
            for name in (wire, *(host.name for host in hosts)):
                ip("netns", "add", name)
                made.append(name)
            ip("-n", wire, "link", "add", "bridge", "type", "bridge")
            ip("-n", wire, "link", "set", "bridge", "up")
            for i, host in enumerate(hosts):
                ip("-n", wire, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", host.name)
                ip("-n", wire, "link", "set", f"port{i}", "master", "bridge", "up")
                ip("-n", host.name, "address", "add", f"{host.address}/24", "dev", "eth0")
                for interface in ("lo", "eth0"):
                    ip("-n", host.name, "link", "set", interface, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not to be had here: {error.stderr.strip()}")
        yield hosts
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def ray(host, *words, before="", cpus=1):
    """Start Ray on ``host``, after the shell command ``before``."""
    script = Path(sys.executable).parent / "ray"
    options = [f"--num-cpus={cpus}", "--object-store-memory=100000000", "--disable-usage-stats"]
    command = " ".join([before, str(script), "start", f"--node-ip-address={host.address}", *options, *words])
    done = host.run(["sh", "-c", command], env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def lose(host):
    """Kill all that runs there."""
    found = subprocess.run(["ip", "netns", "pids", host.name], capture_output=True, text=True).stdout
    for pid in found.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)

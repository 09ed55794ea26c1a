"""Processes of tests, forked from one that has imported the libraries (``tests/support/warm.py``) and does nothing
else: a process that imports them itself takes longer over it than over its test.

``launched`` runs the ranks of one process group; ``Command`` is a command line with the interface of
``subprocess.Popen``.
"""

import atexit
import faulthandler
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from multiprocessing.connection import wait
from random import SystemRandom
from tempfile import NamedTemporaryFile

import torch

warm = multiprocessing.get_context("forkserver")
warm.set_forkserver_preload(["tests.support.warm"])


def launched(script, outs, words_of):
    """What each rank saved into its file of ``outs``; ``words_of(rank, port, out)`` are the script's arguments."""
    port = free_port()
    each = [[str(word) for word in words_of(rank, port, out)] for rank, out in enumerate(outs)]
    ranks = [warm.Process(target=run, args=(str(script), words), daemon=True) for words in each]
    for rank in ranks:
        rank.start()
    at_work = {rank.sentinel: rank for rank in ranks}
    try:
        while at_work:
            ended = [at_work.pop(sentinel) for sentinel in wait(list(at_work))]
            for rank in ended:
                rank.join()
            assert all(rank.exitcode == 0 for rank in ended), [rank.exitcode for rank in ranks]
    finally:
        for rank in at_work.values():  # one that failed leaves the others waiting for it
            rank.kill()
            rank.join()
    return [torch.load(out, weights_only=True) for out in outs]


def free_port():
    """A port of the loopback that stays free until a process of the test listens there: the kernel gives those above to
    every connection that another test opens meanwhile."""
    while True:
        port = SystemRandom().randrange(20_000, 32_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port


HANGS = 600
"""Seconds after which a rank prints where it stands and ends: far longer than any takes."""


def run(script, words):
    faulthandler.dump_traceback_later(HANGS, exit=True)
    sys.argv = [script, *words]
    runpy.run_path(script, run_name="__main__")


class Command:
    """``python -m MODULE WORDS...`` as a forked process, with what tests use of ``subprocess.Popen``.

    What it prints goes into files; ``apart``: what it prints to ``stderr`` into one of its own.
    """

    def __init__(self, module, words, cwd, env=None, apart=False):
        self.stdout = NamedTemporaryFile("r", errors="replace")  # noqa: SIM115
        self.stderr = NamedTemporaryFile("r", errors="replace") if apart else None  # noqa: SIM115
        said = self.stdout.name, self.stderr.name if self.stderr else ""
        environment = dict(os.environ if env is None else env)
        self._process = warm.Process(target=command, args=(module, list(map(str, words)), *said, str(cwd), environment))
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("a forked process", timeout)
        return self.returncode

    def communicate(self, timeout=None):
        """All it printed from where ``stdout`` and ``stderr`` were read to."""
        self.wait(timeout)
        return self.stdout.read(), self.stderr and self.stderr.read()

    def send_signal(self, number):
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def terminate(self):
        self.send_signal(signal.SIGTERM)


def command(module, words, out, err, cwd, environment):
    """The work of a ``Command`` in its process."""
    flags = os.O_WRONLY | os.O_APPEND
    os.dup2(os.open(out, flags), 1)
    os.dup2(os.open(err, flags) if err else 1, 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    finally:
        atexit._run_exitfuncs()  # multiprocessing leaves them out

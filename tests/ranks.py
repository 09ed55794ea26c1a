"""Ranks of one process group, each the work of a test's own script. Their processes have imported the libraries once,
and do one test's work after the other."""

import faulthandler
import gc
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


class Server:
    """A process that does what it is told, until its stdin is closed or something fails."""

    def __init__(self):
        found = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # tests, of a script in it
        self.said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=self.said,
            stderr=self.said,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": found},
        )

    def begin(self, script, words, done):
        print(json.dumps([str(script), list(map(str, words)), str(done)]), file=self.process.stdin, flush=True)

    def end(self):
        """End it, and show the end of what it said."""
        self.process.kill()
        self.process.wait()
        self.said.seek(0)
        print(self.said.read()[-4000:])


idle = {}
"""By rank: a process is always the same one, since torch keeps where a mesh's ranks have their parts of a tensor."""


def launched(script, outs, words_of):
    """What each rank saved into its file of ``outs``; ``words_of(rank, port, out)`` are the script's arguments."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    at_work = [idle.pop(rank) if rank in idle else Server() for rank in range(len(outs))]
    ends = [out.with_suffix(".done") for out in outs]
    for end in ends:
        end.unlink(missing_ok=True)  # of an earlier call with these files
    try:
        for rank, (server, out) in enumerate(zip(at_work, outs, strict=True)):
            server.begin(script, words_of(rank, port, out), ends[rank])
        while not all(end.exists() for end in ends):
            # one that failed leaves the others waiting for it
            assert all(server.process.poll() is None for server in at_work), "a rank has failed"
            time.sleep(0.02)
        idle.update(enumerate(at_work))
        at_work = []
    finally:
        for server in at_work:
            server.end()
    return [torch.load(out, weights_only=True) for out in outs]


def serve():
    for line in sys.stdin:
        script, words, done = json.loads(line)
        sys.argv = [script, *words]
        runpy.run_path(script, run_name="__main__")
        faulthandler.cancel_dump_traceback_later()
        gc.collect()
        Path(done).touch()


if __name__ == "__main__":
    serve()

"""Ranks of one process group, each the work of a test's own script in a process of its own."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]


def launched(script, outs, words_of):
    """What each rank saved into its file of ``outs``; ``words_of(rank, port, out)`` are the script's arguments."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    each = [map(str, words_of(rank, port, out)) for rank, out in enumerate(outs)]
    found = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])  # tests, of a script in it
    env = {**os.environ, "PYTHONPATH": found}
    started = [subprocess.Popen([sys.executable, script, *words], cwd=ROOT, env=env) for words in each]
    try:
        while any(one.poll() is None for one in started) and not any(one.poll() for one in started):
            time.sleep(0.05)  # one that failed leaves the others waiting for it
        assert [one.poll() for one in started] == [0] * len(outs)
    finally:
        for one in started:
            one.kill()
    return [torch.load(out, weights_only=True) for out in outs]

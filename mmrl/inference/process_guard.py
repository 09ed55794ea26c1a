"""Run a command, and end it with all its children when the parent process is gone. Standard library only.

``python process_guard.py FOLDER COMMAND...`` in a session of its own, with a pipe as standard input that its starter
never writes to: the pipe closes when the starter closes it, ends or is killed, by whatever signal. Then the command
gets ``SIGTERM``, after ``GRACE_S`` the whole process group, the keeper with it, ``SIGKILL``; and FOLDER, the starter's
private one, is removed. The starter's own child may be killed with it: the keeper is a child of that one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading

GRACE_S = 5.0


def main() -> None:
    """Keep the command of ``sys.argv[2:]``. Ends by ``SIGKILL``, so that nothing of its process group outlives it."""
    if os.getpgrp() != os.getpid():
        raise SystemExit("keeper: start me in a session of my own")
    if os.fork():
        os.wait()  # Ray kills the children of a worker that it ends, and not theirs: this process is there to be killed
        os.killpg(0, signal.SIGKILL)  # the other keeper may have been killed before it could
    child = subprocess.Popen(sys.argv[2:], stdin=subprocess.DEVNULL)
    gone = threading.Event()
    threading.Thread(target=_end_with_starter, args=(child, gone), daemon=True).start()
    status = child.wait()
    print(f"ended with status {status}", file=sys.stderr, flush=True)
    _end(gone)


def _end_with_starter(child: subprocess.Popen[bytes], gone: threading.Event) -> None:
    while os.read(0, 4096):
        pass
    gone.set()
    child.terminate()
    try:
        child.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        _end(gone)


def _end(gone: threading.Event) -> None:
    if gone.is_set():  # else the starter is there, and may want to read what is in it
        shutil.rmtree(sys.argv[1], ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main()

"""Run a script in a separate process and send it requests over a pipe; it may hang or crash."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path


class ScriptProcess:
    """Runs ``script`` with the number of its end of ``pipe``; that pipe is all it shares with this process.

    ``quiet``: what it writes to stderr is dropped. ``own_session``: signals to the group of this process, and of its
    terminal, do not reach it.
    """

    def __init__(self, script: Path, *, quiet: bool = False, own_session: bool = False) -> None:
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-P", str(script), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL if quiet else None,
                start_new_session=own_session,
            )

    def end(self) -> None:
        """Kill the process."""
        self.pipe.close()
        self.process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)

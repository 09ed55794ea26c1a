"""Run math-verify in a separate process with a deadline, since some answers take very long to parse.

Its own timeout is a signal, which works in a main thread only, and not where a reward runs.
"""

from __future__ import annotations

import importlib.util
import json
import threading
from multiprocessing.connection import Connection
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.core.installing import install
from mmrl.core.script_process import ScriptProcess

START_S = 300.0
"""Seconds for the process to import what it needs."""
_WALL_S = 60.0
"""Seconds on the clock that a question has beyond its processor time: a busy machine may give it none for a while."""
_LARGEST = 1 << 16
_SCRIPT = Path(__file__).with_name("mathverify_child.py")


class MathVerify:
    """Asks one process, which is started when first needed, ended past ``deadline``, and then started anew.

    ``deadline``: seconds of processor time for one question, so that a busy machine changes no answer.

    Thread-safe: questions are answered one after another. ``late`` counts the questions that were given up.
    """

    def __init__(self, deadline: float) -> None:
        if importlib.util.find_spec("math_verify") is None:
            raise UserError(
                f"answer:math needs math-verify, which is not installed: {install('math')}, or take answer:boxed"
            )
        self.deadline, self.late = deadline, 0
        self._lock = threading.Lock()
        self._child: ScriptProcess | None = None

    def same(self, found: str, wanted: str) -> bool | None:
        """Whether two answers are equal; None where one of them is not understood, or is not in time.

        Raises ``UserError`` where the process cannot start.
        """
        question = {"found": found, "wanted": wanted, "seconds": self.deadline}
        with self._lock:
            pipe = self._open()
            try:
                pipe.send_bytes(json.dumps(question).encode())
                if not pipe.poll(self.deadline + _WALL_S):
                    raise EOFError
                answer = json.loads(pipe.recv_bytes(_LARGEST)).get("same")
            except (EOFError, OSError):  # it ended past its deadline, or for want of memory
                self.late += 1
                self._close()
                return None
            except BaseException:  # also an interrupt: this answer must not be taken for the next one
                self._close()
                raise
            return answer if isinstance(answer, bool) else None

    def close(self) -> None:
        """End the process. The next question starts another."""
        with self._lock:
            self._close()

    def _open(self) -> Connection:
        if self._child is not None:
            return self._child.pipe
        self._child = child = ScriptProcess(_SCRIPT, quiet=True)
        pipe = child.pipe
        try:
            said = json.loads(pipe.recv_bytes(_LARGEST)) if pipe.poll(START_S) else {"error": f"silent for {START_S} s"}
        except (EOFError, OSError):
            said = {"error": f"ended with status {child.process.wait()}"}
        if "ready" not in said:
            self._close()
            raise UserError(
                f"math-verify does not start: {said.get('error')}; install it anew: {install('math')}, or take "
                "answer:boxed"
            )
        return pipe

    def _close(self) -> None:
        if self._child is not None:
            self._child.end()
            self._child = None

"""The processes that decode clips (``mmrl.core.media.decoder``): started on first use, killed when they hang."""

from __future__ import annotations

import atexit
import importlib.util
import json
import os
import sys
import threading
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.core.installing import install
from mmrl.core.media.decoder import Failure, Header, Request
from mmrl.core.script_process import ScriptProcess

DECODERS = ("decord", "av")
"""In the order they are tried."""
_SCRIPT = Path(__file__).with_name("decoder.py")


class DecoderLostError(Exception):
    """The decoding process died or did not answer in time; the message says which. The next request starts another."""


def decoders() -> list[str]:
    """The decoders that are installed. Raises ``UserError`` where there is none."""
    found = [name for name in DECODERS if importlib.util.find_spec(name) is not None]
    if not found:
        raise UserError(f"video needs decord or PyAV, and neither is installed: {install('vlm')}")
    return found


def needs(package: str, why: str) -> None:
    """Raise ``UserError`` where an optional package is not installed. ``why`` says what it is for."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{why}, which is not installed: {install('vlm')}")


class Decoder:
    """One decoding process. Thread-safe: requests are answered one after another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: ScriptProcess | None = None
        self._owner = 0

    def ask(self, request: Request, data: bytes, timeout: float) -> tuple[Header | Failure, bytes]:
        """The header and the pixels that ``request`` brings. ``timeout`` is in seconds. Raises ``DecoderLostError``."""
        with self._lock:
            child = self._open()
            pipe = child.pipe
            try:
                pipe.send_bytes(json.dumps(request).encode())
                pipe.send_bytes(data)
                if not pipe.poll(timeout):
                    raise DecoderLostError(f"was not decoded within {timeout:g} s")
                return json.loads(pipe.recv_bytes()), pipe.recv_bytes()
            except (EOFError, OSError):
                raise DecoderLostError(f"ended the decoder's process (exit code {child.process.wait(5)})") from None
            finally:
                if sys.exc_info()[0] is not None:  # also an interrupt: the next request must not get this reply
                    self._close()

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._close()

    def _open(self) -> ScriptProcess:
        if self._owner != os.getpid():  # the pipe of a parent that forked belongs to the parent
            self._child, self._owner = None, os.getpid()
        if self._child is None:
            self._child = ScriptProcess(_SCRIPT)
        return self._child

    def _close(self) -> None:
        if self._owner == os.getpid() and self._child is not None:
            self._child.end()
            self._child = None


_running: dict[str, Decoder] = {}


def process_of(name: str) -> Decoder:
    """The process of the decoder ``name``: one for each, since both ship an FFmpeg, and the two conflict."""
    return _running.setdefault(name, Decoder())


@atexit.register
def close() -> None:
    """End the processes."""
    for decoder in _running.values():
        decoder.close()

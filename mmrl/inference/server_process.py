"""Start a server in a separate process, and send it plain JSON over HTTP.

The process ends with us, also where we are killed (``keeper``). It is reached over a Unix socket in a folder that only
our user can enter, or over loopback with a key. One that ends by itself, or is stopped (``SIGSTOP``), is found within
seconds (``vigil``), and whoever asks it hears ``LostServerError``.

A thread looks every second whether the server is alive. A process that is stopped (``SIGSTOP``) keeps its sockets, and
whoever waits for its answer waits on: so it is ended. What a server is slow at is not looked at; the phase that waits
for it has a usual time (``mmrl.runtime.stall_watchdog``).
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import httpx
import psutil
from PIL.Image import Image

from mmrl.core.errors import LostServerError, UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.media.images import png_bytes
from mmrl.core.notices import note, tell
from mmrl.inference import process_guard, server_devices

CONCURRENT = 256
"""Requests under way at once; the server batches them."""
PROGRESS_EVERY_S = 10.0
_LINES = 25
_CLOSE_S = process_guard.GRACE_S + 5.0
_ABORT_S = 10.0
_KNOWN_S = 5.0
"""Seconds within which a server that broke a connection is known to have ended."""
LOOK_S = 1.0
_MEMBERS = 5
"""Looks after which it is asked anew which processes there are: that reads those of the whole machine."""


@dataclass(frozen=True)
class Timeouts:
    """Seconds that a server may take until it is ready, and for a request."""

    start_s: float = 900.0
    request_s: float = 1800.0


class Process:
    """Final class. ``command`` kept running, its output in ``log``. ``name`` is what messages call it.

    Use ``wait_until`` before the first request. ``close`` ends it and everything it started, and removes ``folder``.
    ``up``: it was ready. ``lost``: what became of it, where it ended after that or stood still, and was not ``closed``.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path
    ) -> None:
        self.name, self.log, self._folder = name, log, folder
        self.lost = ""
        self._closing = threading.Lock()
        self.up = self.closed = False
        log.parent.mkdir(parents=True, exist_ok=True)
        kept = [sys.executable, "-I", "-S", str(Path(process_guard.__file__)), str(folder), *command]
        variables = {**environment, **server_devices.environment()}
        with open(log, "ab") as out:
            self._process = subprocess.Popen(
                kept, stdin=subprocess.PIPE, stdout=out, stderr=out, env=variables, start_new_session=True
            )
        Thread(target=_watch, args=(weakref.ref(self),), name="mmrl-vigil", daemon=True).start()

    def ended(self) -> bool:
        return self._process.poll() is not None

    def members(self) -> list[psutil.Process]:
        """Its processes."""
        try:
            first = psutil.Process(self._process.pid)
            return [first, *first.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def lose(self, why: str = "") -> LostServerError:
        """End the server at once because of ``why`` (empty: it has ended by itself). Everyone who waits for an answer
        gets the error. The first call prints a notice for the user. Returns the error to raise."""
        with self._closing:
            if not self.lost and not self.closed:
                why = why or self._how_it_ended()
                self.lost = f"{self.name} is lost: {why}. The end of {self.log}:\n{self.last_lines()}"
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                tell(self.lost)
        return LostServerError(self.lost or f"{self.name} is closed")

    def _how_it_ended(self) -> str:
        said = re.search(r"ended with status (-?\d+)\s*$", self.last_lines(1))
        if said is None:
            return "it was killed, and what kept it"
        status = int(said[1])
        return f"it ended with status {status}" + (f" ({signal.Signals(-status).name})" if status < 0 else "")

    def last_lines(self, n: int = _LINES) -> str:
        """The end of its log, indented."""
        with open(self.log, "rb") as file:
            file.seek(max(self.log.stat().st_size - 200 * n, 0))
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line}" for line in lines[-n:])

    def wait_until(self, ready: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``ready()``, with a line on stderr now and then. Raises ``UserError`` with its last lines where it
        ends before, or takes too long. Whatever interrupts the wait also ends it."""
        start = said = time.monotonic()
        try:
            while not ready():
                now = time.monotonic()
                if self.lost:
                    raise LostServerError(self.lost)
                if self.ended() or now - start > timeout_s:
                    why = "ended" if self.ended() else f"was not ready after {timeout_s:.0f} s (raise start_timeout_s)"
                    raise UserError(f"{self.name} did not start: it {why}. The end of {self.log}:\n{self.last_lines()}")
                if now - said > PROGRESS_EVERY_S:
                    last = self.last_lines(1).strip()[:100] or "..."
                    note(f"{self.name} is starting, {now - start:.0f} s: {last}")
                    said = now
                time.sleep(0.2)
        except BaseException:
            self.close()
            raise
        self.up = True

    def close(self) -> None:
        with self._closing:
            self.closed = True
        assert self._process.stdin is not None
        self._process.stdin.close()  # the keeper watches it
        try:
            self._process.wait(_CLOSE_S)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


class Client:
    """Final class. JSON over HTTP; every failure is a ``UserError``. Safe to call from several threads.

    ``process``: whose server it is, so that a message can tell why it is gone; None for one we did not start.
    """

    def __init__(
        self,
        name: str,
        url: str,
        key: str | None = None,
        socket_path: Path | None = None,
        process: Process | None = None,
        timeout_s: float = 1800.0,
    ) -> None:
        self.name, self.url, self.process, self._timeout_s = name, url, process, timeout_s
        self._http = httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            transport=httpx.HTTPTransport(
                uds=str(socket_path) if socket_path else None,
                limits=httpx.Limits(max_connections=CONCURRENT + 1, max_keepalive_connections=CONCURRENT + 1),
            ),
            timeout=httpx.Timeout(timeout_s, connect=30.0),
        )
        self._pool: ThreadPoolExecutor | None = None
        self._begun: dict[str, Future[Any]] = {}
        self._ended: SimpleQueue[str] = SimpleQueue()

    def healthy(self) -> bool:
        """Whether the server answers its health check."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def begin(self, name: str, path: str, body: JsonObject) -> None:
        """Send a request without waiting for its answer, which ``answers`` gives under ``name``."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(CONCURRENT, "mmrl-rollout")
        self._begun[name] = reply = self._pool.submit(self.post, path, body)
        reply.add_done_callback(lambda _: self._ended.put(name))

    def answers(self, names: Container[str], timeout_s: float | None) -> list[tuple[str, Any]]:
        """What ``post`` returns of those of ``names`` that are answered. Waits ``timeout_s`` for the first, None for
        as long as it takes. Raises ``UserError`` as ``post`` does."""
        try:
            ended = [self._ended.get(timeout=timeout_s)]
        except Empty:
            return []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return [(name, self._begun.pop(name).result()) for name in ended if name in names]

    def end(self, names: Iterable[str], path: str, body: Callable[[str], JsonObject]) -> None:
        """Drop requests; of those that were sent the server is told by ``body``."""
        for name in names:
            if name in self._begun and not self._begun.pop(name).cancel():
                with suppress(httpx.HTTPError):  # it runs to its end then
                    self._http.post(path, json=body(name), timeout=_ABORT_S)

    def close(self) -> None:
        """End the connections, and the server, if it is ours. Harmless when called twice."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
        self._http.close()
        if self.process is not None:
            self.process.close()

    def lost(self) -> LostServerError | None:
        """Why a server that mmrl started broke a connection or answered with an error; None if it is healthy."""
        if self.process is None:
            return None
        until = time.monotonic() + _KNOWN_S
        while not (self.process.lost or self.process.ended()):
            if self.healthy():
                return None
            if time.monotonic() > until:
                return self.process.lose("it breaks connections and does not answer health checks")
            time.sleep(0.1)
        return self.process.lose()

    def post(self, path: str, body: JsonObject | None = None) -> Any:
        """The answer: JSON, bytes if it is MessagePack, text if it is neither, or None if it is empty."""
        try:
            answer = self._http.post(path, json={} if body is None else body)
        except httpx.TimeoutException as error:
            raise UserError(
                f"{self.name} did not answer {path} within {self._timeout_s:.0f} s; raise request_timeout_s, or lower "
                "sampling.max_new_tokens (pictures: sampling.steps)"
            ) from error
        except httpx.HTTPError as error:
            said = UserError(f"{self.name} could not be asked ({path}): {error}{self._state()}")
            raise (self.lost() or said) from error
        if answer.status_code != 200:
            said = f"{self.name} refused {path} with status {answer.status_code}: {_reason(answer)}{self._state()}"
            raise (self.lost() if answer.status_code >= 500 else None) or UserError(said)
        if not answer.content:
            return None
        if answer.headers.get("content-type") == "application/msgpack":
            return answer.content
        try:
            return answer.json()
        except ValueError:
            return answer.text

    def _state(self) -> str:
        if self.process is None:
            return f". Is {self.url} the right server, and is it up?"
        return f" (its log is {self.process.log})"


def _reason(answer: httpx.Response) -> str:
    try:
        said = answer.json()
    except ValueError:
        return " ".join(answer.text.split())[:300]
    for key in ("error", "message", "detail"):
        if isinstance(said, dict) and key in said:
            said = said[key]
    return str(said)[:600]


def private_folder(prefix: str) -> Path:
    """A new folder that only our user can enter, with a path short enough for a Unix socket (108 bytes) in it."""
    usual = tempfile.gettempdir()  # eight characters come behind the prefix
    return Path(tempfile.mkdtemp(prefix=prefix, dir=usual if len(f"{usual}/{prefix}") < 72 else "/tmp"))


def free_port() -> int:
    """A loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def new_key() -> str:
    return secrets.token_urlsafe(32)


def flags(arguments: Mapping[str, Json | Path], off: str | None) -> list[str]:
    """Command-line flags from names and values: ``max_model_len=64`` is ``--max-model-len 64``.

    A mapping or list is JSON. True is the bare flag; False is the flag with ``off`` before its name, and nothing where
    ``off`` is None.
    """
    made = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            made += [f"--{flag}"] if value else [f"--{off}{flag}"] if off else []
        else:
            made += [f"--{flag}", json.dumps(value) if isinstance(value, Mapping | list | tuple) else str(value)]
    return made


def png_url(image: Image) -> str:
    """A picture as a ``data:`` URL, without loss."""
    content = png_bytes(image.convert("RGB"), compress_level=1)
    return "data:image/png;base64," + base64.b64encode(content).decode()


def _watch(there: weakref.ref[Process]) -> None:
    """Call ``lose`` of the process once it has ended after it was up, or one of its processes is seen stopped twice."""
    members: list[psutil.Process] = []
    before: set[psutil.Process] = set()
    for look in count():
        time.sleep(LOOK_S)
        process = there()  # not held while we sleep: who drops it ends it
        if process is None or process.closed:
            return
        if process.ended():
            if process.up:  # else who waits for it says so
                process.lose()
            return
        members = members if look % _MEMBERS else process.members()
        stopped = {member for member in members if _stopped(member)}
        if both := stopped & before:
            named = ", ".join(f"its process {member.pid}" for member in both)
            process.lose(f"{named} was stopped (SIGSTOP), and has been ended")
            return
        before = stopped
        del process


def _stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False

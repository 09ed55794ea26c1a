"""A controller's further devices: a process for each, on its host, that does what the controller sends it."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import traceback
from collections.abc import Mapping
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from mmrl import checkpoint
from mmrl.errors import UserError
from mmrl.placement.work import perform
from mmrl.runtime.wire import receive, send

if TYPE_CHECKING:
    from mmrl.batch import Run
    from mmrl.saving import Saver


class LostDeviceError(RuntimeError):
    """A device's process is gone, or has failed in a way that the user cannot mend."""


class Reception:
    """Final class: where a controller's workers call it, a socket in a folder that only this user may open."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="mmrl-")
        self.key = secrets.token_bytes(32)
        self.address = str(Path(self._folder) / "workers")
        self._listener = Listener(self.address, "AF_UNIX", authkey=self.key)

    def welcome(self, workers: int) -> list[Connection]:
        """Wait for the calls of ``workers`` workers, and return them by device."""
        found: dict[int, Connection] = {}
        while len(found) < workers:
            connection: Any = self._listener.accept()
            found[connection.recv()] = connection
        self.close()
        return [found[device] for device in sorted(found)]

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class There:
    """Final class: a device in a process of its own, as its controller sees it. Used by one thread."""

    def __init__(self, device: int, connection: Connection) -> None:
        self.device, self._connection = device, connection
        self.sent = 0
        """Bytes given to it so far."""
        self._has: set[str] = set()

    def perform(self, run: Run, name: str, arguments: tuple[Any, ...], features: Mapping[str, Any]) -> Any:
        """What ``mmrl.placement.work`` does there; ``features`` that it lacks go with it.

        Raises what the user must mend as ``UserError``, and ``LostDeviceError``.
        """
        fresh = {key: value for key, value in features.items() if key not in self._has}
        self._has |= fresh.keys()
        if name == "release":
            self._has.clear()
        try:
            self.sent += send(self._connection, (name, arguments, fresh))
            how, answer = receive(self._connection)
        except (EOFError, OSError) as error:
            raise LostDeviceError(f"device {self.device} is gone ({error or type(error).__name__})") from error
        if how == "mend":
            raise UserError(answer)
        if how == "failed":
            raise LostDeviceError(f"device {self.device} failed:\n{answer}")
        return answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()


def call(device: int, address: str, key: bytes) -> Connection:
    """Call the controller at ``address`` as its device ``device``."""
    connection: Any = Client(address, "AF_UNIX", authkey=key)
    connection.send(device)
    return connection


def serve(run: Run, connection: Connection, saver: Saver | None = None) -> None:
    """Do what the controller asks, until it hangs up. ``saver``: of this device's weights, where they lie in shards."""
    held: list[str] = []
    while True:
        try:
            name, arguments, features = receive(connection)
        except (EOFError, ConnectionError):
            return
        _keep(run, features, held)
        try:
            done = None
            if name == "release":
                run.pipeline.features.release(held)
                held.clear()
            elif name == "save" and saver is not None:
                saver.begin(checkpoint.of_run(run, *arguments))
            else:
                done = perform(run, name, arguments)
            answer = ("done", done)
        except UserError as error:
            answer = ("mend", str(error))
        except Exception:
            answer = ("failed", traceback.format_exc())
        send(connection, answer)


def _keep(run: Run, features: Mapping[str, dict[str, Tensor]], held: list[str]) -> None:
    """Take a prompt's features into this device's store until the step is over."""
    run.pipeline.features.hold(list(features))
    held += features
    for key, value in features.items():
        run.pipeline.features.put(key, value)

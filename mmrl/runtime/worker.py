"""A controller's other devices: one process each, on the same host, that runs the tasks it receives."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

from torch import Tensor

from mmrl.checkpoint.run_state import of_run
from mmrl.checkpoint.writer import Saver
from mmrl.core import notices
from mmrl.core.errors import NotFiniteError, UserError
from mmrl.core.out_of_memory import OutOfMemoryError
from mmrl.placement import device_tasks
from mmrl.runtime.stall_watchdog import StallWatchdog
from mmrl.runtime.wire import receive, send
from mmrl.step.step_context import StepContext

_KEY = "key"
"""The file beside the socket with the key that a worker shows."""


class LostDeviceError(RuntimeError):
    """A device's process is gone, or has failed with an error that is not the user's."""


class WorkerListener:
    """Final class: the socket on which a controller's workers connect, in a folder that only this user may open."""

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="mmrl-")
        key = secrets.token_bytes(32)
        (Path(self._folder) / _KEY).write_bytes(key)
        self.address = str(Path(self._folder) / "workers")
        self._listener = Listener(self.address, "AF_UNIX", authkey=key)

    def accept(self, workers: int) -> list[Connection]:
        """Wait until ``workers`` workers have connected, and return the connections by device."""
        found: dict[int, Connection] = {}
        while len(found) < workers:
            connection: Any = self._listener.accept()
            found[connection.recv()] = connection
        self.close()
        return [found[device] for device in sorted(found)]

    def close(self) -> None:
        self._listener.close()
        shutil.rmtree(self._folder, ignore_errors=True)


class RemoteWorker:
    """Final class: the controller's handle of a device in another process. Used by one thread.

    ``tell`` gets the device's log lines; ``starting()`` is entered while something starts there.
    """

    def __init__(
        self,
        device: int,
        connection: Connection,
        tell: Callable[[str], None] = print,
        starting: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.device, self._connection, self._tell, self._starting = device, connection, tell, starting
        self.sent = 0
        """Bytes sent to it so far."""
        self._has: set[str] = set()

    def perform(
        self, context: StepContext, call: Callable[..., Any], arguments: tuple[Any, ...], features: Mapping[str, Any]
    ) -> Any:
        """Run ``call``, a function of a module, there and return its result; ``features`` that it lacks are sent.

        Raises ``UserError`` for errors that the user must fix, and ``LostDeviceError``.
        """
        fresh = {key: value for key, value in features.items() if key not in self._has}
        self._has |= fresh.keys()
        if call is device_tasks.release:
            self._has.clear()
        try:
            self.sent += send(self._connection, (call, arguments, fresh))
            how, answer = self._answer()
        except (EOFError, OSError) as error:
            raise LostDeviceError(f"device {self.device} is gone ({error or type(error).__name__})") from error
        if how == "not finite":
            raise NotFiniteError(answer)
        if how == "out of memory":
            raise OutOfMemoryError(answer[0], f"device {self.device}: {answer[1]}")
        if how == "mend":
            raise UserError(answer)
        if how == "failed":
            raise LostDeviceError(f"device {self.device} failed:\n{answer}")
        return answer

    def _answer(self) -> tuple[str, Any]:
        with contextlib.ExitStack() as begun:
            while True:
                how, answer = receive(self._connection)
                if how == "line":
                    self._tell(f"device {self.device}: {answer}")
                elif how == "starting":
                    begun.enter_context(self._starting())
                elif how == "started":
                    begun.close()
                else:
                    return how, answer

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._connection.close()


class ControllerLink:
    """Final class: sends a device's messages to its controller, from any thread: log lines, whether something starts,
    and an answer to each task."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def say(self, how: str, what: Any = None) -> None:
        with self._lock:
            send(self._connection, (how, what))

    def tell(self, line: str) -> None:
        with contextlib.suppress(OSError):  # the controller is gone, and this process will end too
            self.say("line", line)


def connect(device: int, address: str) -> Connection:
    """Connect to the controller at ``address`` as its device ``device``."""
    key = (Path(address).parent / _KEY).read_bytes()
    connection: Any = Client(address, "AF_UNIX", authkey=key)
    connection.send(device)
    return connection


def serve(context: StepContext, connection: Connection, saver: Saver | None, pulse: StallWatchdog) -> None:
    """Run the controller's tasks until it disconnects. ``saver``: saves this device's shards of the weights. ``pulse``:
    entered with each task."""
    if saver is not None:
        context.compute.local.save = lambda step: saver.begin(of_run(context, step))
    link = ControllerLink(connection)
    pulse.on_starting = link.say
    notices.listen(link.tell, pulse)
    while True:
        try:
            call, arguments, features = receive(connection)
        except (EOFError, ConnectionError):
            return
        except Exception:
            link.say("failed", traceback.format_exc())  # the controller waits for an answer to every task
            continue
        with pulse(call.__name__):
            answer = _answer(context, call, arguments, features)
        try:
            link.say(*answer)
        except OSError:
            return
        except Exception:
            link.say("failed", traceback.format_exc())


def _answer(
    context: StepContext,
    call: Callable[..., Any],
    arguments: tuple[Any, ...],
    features: Mapping[str, dict[str, Tensor]],
) -> tuple[str, Any]:
    """Run a task; returns the kind of answer, and the result or the error."""
    try:
        _keep(context, features)
        return "done", device_tasks.perform(context, call, arguments)
    except NotFiniteError as error:
        return "not finite", str(error)
    except OutOfMemoryError as error:
        return "out of memory", (error.phase, error.what)
    except UserError as error:
        return "mend", str(error)
    except Exception:
        return "failed", traceback.format_exc()


def _keep(context: StepContext, features: Mapping[str, dict[str, Tensor]]) -> None:
    """Keep a prompt's features in this device's store until the step ends."""
    context.pipeline.features.hold(list(features))
    context.compute.local.held.extend(features)
    for key, value in features.items():
        context.pipeline.features.put(key, value)

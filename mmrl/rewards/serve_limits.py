"""The limits of clients of ``mmrl serve``: time, connections and memory. Imports no torch.

Each connection has a thread. A request must arrive within a deadline, so half a request holds nothing for long. Where
connections or memory run out, the slowest client is cut off: its next request begins anew.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_CONNECTIONS = 512
MAX_HELD_BYTES = 2**30
"""Of all requests together: bodies and decoded pictures. A request that is alone may hold more."""
MAX_HEAD_BYTES = 64 * 2**10
"""Of the request line and the headers together."""
IDLE_S = 60.0
"""How long a connection stays open between two requests."""
HEAD_S = 10.0
"""In which the request line and the headers arrive."""
BODY_S = 120.0
SILENCE_S = 10.0
"""Longest pause within a request."""
PATIENCE_S = 60.0
"""How long a request waits for its turn."""
_SLOW = 64 * 2**10
"""Bytes per second: a client below this rate is cut off where another needs its place."""
_GRACE_S = 1.0


class Connection(io.RawIOBase):
    """The bytes that a client sends, with the deadlines of a request. Final class; one thread reads.

    ``held``: bytes of memory that its request takes. ``reading``: the client has the word.
    """

    def __init__(self, client: socket.socket) -> None:
        self._client = client
        self.held = 0
        self.expect_head()

    def expect_head(self) -> None:
        """The next bytes, whenever they come, begin a request."""
        self._begin(float("inf"), MAX_HEAD_BYTES)
        self._waits = True

    def expect_body(self) -> None:
        """The next bytes are the rest of a request."""
        self._begin(BODY_S, float("inf"))

    def _begin(self, seconds: float, most: float) -> None:
        self.reading, self.began, self._received = True, time.monotonic(), 0
        self._waits, self._until, self._most = False, self.began + seconds, most

    def slow(self, now: float) -> bool:
        """Whether others may have its place."""
        seconds = now - self.began
        return self.reading and seconds > _GRACE_S and self._received < _SLOW * seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        """Raises ``TimeoutError`` where the client takes too long, or its head has no end."""
        left = self._until - time.monotonic()
        if left <= 0 or self._received >= self._most:
            raise TimeoutError("the request does not end")
        self._client.settimeout(IDLE_S if self._waits else min(SILENCE_S, left))
        count = self._client.recv_into(buffer)
        self._received += count
        if self._waits:
            self._waits, self._until = False, time.monotonic() + HEAD_S
        return count

    def end(self) -> None:
        """Cut the client off: the thread that reads finds an end."""
        self.reading = False
        with contextlib.suppress(OSError):
            self._client.shutdown(socket.SHUT_RDWR)


class Limits:
    """The connections of a server and the memory that their requests hold. Final class, thread-safe."""

    def __init__(self, connections: int = MAX_CONNECTIONS, held: int = MAX_HELD_BYTES) -> None:
        self._most, self._most_held, self._held = connections, held, 0
        self._open: set[Connection] = set()
        self._freed = threading.Condition()

    def enter(self, connection: Connection) -> bool:
        """Whether there is room for one more; the slowest client may have been cut off for it."""
        with self._freed:
            if len(self._open) >= self._most and not self._cut_off(holding=False):
                return False
            self._open.add(connection)
            return True

    def leave(self, connection: Connection) -> None:
        """The connection is over."""
        self.give_back(connection)
        with self._freed:
            self._open.discard(connection)

    def take(self, connection: Connection, count: int) -> bool:
        """Wait for ``count`` more bytes for the connection's request; False where there are none in time."""
        until = time.monotonic() + PATIENCE_S
        with self._freed:
            while self._held > connection.held and self._held + count > self._most_held:
                if not self._cut_off(holding=True) and time.monotonic() > until:
                    return False
                self._freed.wait(0.1)
            self._held += count
            connection.held += count
            return True

    def give_back(self, connection: Connection) -> None:
        """The request is over and holds nothing more."""
        with self._freed:
            self._held -= connection.held
            connection.held = 0
            self._freed.notify_all()

    def _cut_off(self, holding: bool) -> bool:
        now = time.monotonic()
        slow = [c for c in self._open if c.slow(now) and (c.held or not holding)]
        if slow:
            min(slow, key=lambda c: c.began).end()
        return bool(slow)


class Turns:
    """A semaphore whose waiters come in the order in which they asked. Final class, thread-safe.

    That of the standard library lets a newcomer pass those who wait, and some of them wait for long.
    """

    def __init__(self, free: int) -> None:
        self._free = free
        self._line: deque[threading.Event] = deque()
        self._lock = threading.Lock()

    def acquire(self, timeout: float) -> bool:
        """Whether it was our turn within ``timeout`` seconds."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            turn = threading.Event()
            self._line.append(turn)
        if not turn.wait(timeout):
            with self._lock:
                if not turn.is_set():
                    self._line.remove(turn)
                    return False
        return True

    def release(self) -> None:
        with self._lock:
            if self._line:
                self._line.popleft().set()
            else:
                self._free += 1

"""The rendezvous store: notes that all processes of a run read and write, in torch's TCPStore."""

from __future__ import annotations

import ipaddress
import json
import socket
import time
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

from mmrl.core.durations import duration
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json
from mmrl.runtime.launchers import Launched

_EVERY = 0.05


class GoneError(Exception):
    """The process that keeps the store does not answer: it has ended."""


class RendezvousStore:
    """Final class: notes by key, JSON. Each thread needs its own (``again``): a connection does one thing at a time."""

    def __init__(self, store: dist.Store, found: Launched, patience: float) -> None:
        self.store = dist.PrefixStore(f"mmrl/{found.restarts}", store)
        self._found, self._patience = found, patience

    def again(self) -> RendezvousStore:
        """A second connection to the same store."""
        return RendezvousStore(_connected(self._found, self._patience), self._found, self._patience)

    def write(self, key: str, value: Json) -> None:
        """Raises ``GoneError``."""
        try:
            self.store.set(key, json.dumps(value))
        except RuntimeError as error:
            raise GoneError(str(error)) from error

    def has(self, key: str) -> bool:
        """Raises ``GoneError``."""
        try:
            return self.store.check([key])
        except RuntimeError as error:
            raise GoneError(str(error)) from error

    def read(self, key: str) -> Json:
        """A note that is there. Raises ``GoneError``."""
        return self.read_all([key])[0]

    def read_all(self, keys: Sequence[str]) -> list[Json]:
        """Notes that are there. Raises ``GoneError``."""
        try:
            return [json.loads(value) for value in self.store.multi_get(list(keys))] if keys else []
        except RuntimeError as error:
            raise GoneError(str(error)) from error

    def first(self, key: str) -> bool:
        """Whether nobody asked this of ``key`` before. Raises ``GoneError``."""
        try:
            return self.store.add(key, 1) == 1
        except RuntimeError as error:
            raise GoneError(str(error)) from error

    def lacking(self, keys: Sequence[str], seconds: float, unless: str = "") -> list[str]:
        """Wait for notes, at most so long or until there is one at ``unless``; returns the keys without one.

        Raises ``GoneError``.
        """
        until, left = time.monotonic() + seconds, list(keys)
        while left and time.monotonic() < until:
            while left and self.has(left[-1]):
                left.pop()
            if left and unless and self.has(unless):
                break
            if left:
                time.sleep(_EVERY)
        return [key for key in keys if key in left and not self.has(key)]


def meet(found: Launched, patience: float, listening: socket.socket | None = None) -> RendezvousStore:
    """Open the store, in process 0 unless torchrun has opened it; ``listening``: a socket that it has there already.
    Raises ``UserError`` where that fails."""
    if found.agent or not found.leads:
        return RendezvousStore(_connected(found, patience), found, patience)
    store = dist.TCPStore(
        found.host,
        found.port,
        found.size,
        is_master=True,
        timeout=timedelta(days=1),
        wait_for_workers=False,
        master_listen_fd=(listening or _listening(found)).detach(),
    )
    return RendezvousStore(store, found, patience)


def _connected(found: Launched, patience: float) -> dist.Store:
    wait, address = timedelta(seconds=patience), "MASTER_ADDR and MASTER_PORT must name its host, and a port that is"
    if found.launcher == "ray":
        address = "Let the hosts reach each other at ports that are"
    try:
        return dist.TCPStore(found.host, found.port, found.size, timeout=wait, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:  # DistNetworkError is a RuntimeError
        raise UserError(
            f"{found.launcher}: process {found.rank} of {found.size} does not reach process 0 at "
            f"{found.host}:{found.port} within {duration(patience)} (runtime.patience). See whether process 0 runs and "
            f"what it printed. {address} open between the hosts"
        ) from error


def _listening(found: Launched) -> socket.socket:
    """Listen at the address that the launcher names, and at no other."""
    edit = "set MASTER_ADDR to the address at which the other hosts reach it"
    try:
        family, _, _, _, address = socket.getaddrinfo(found.host, found.port, type=socket.SOCK_STREAM)[0]
    except (OSError, OverflowError) as error:
        raise UserError(
            f"{found.launcher}: process 0 cannot resolve its own address {found.host}: {error}; {edit}"
        ) from error
    if found.nodes > 1 and ipaddress.ip_address(str(address[0]).partition("%")[0]).is_loopback:
        raise UserError(
            f"{found.launcher}: the processes are on {found.nodes} hosts, and {found.host} is {address[0]} on the host "
            f"of process 0, which no other reaches; {edit}"
        )
    try:
        return socket.create_server((str(address[0]), found.port), family=family)
    except OSError as error:
        raise UserError(
            f"{found.launcher}: process 0 cannot listen at {address[0]}:{found.port}: {error.strerror or error}; "
            f"{edit}, or MASTER_PORT to a free port"
        ) from error

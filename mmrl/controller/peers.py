"""Communication between controllers: sums of small tensors, gradients, and a few numbers."""

# What the watchdog asks of a process group has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import importlib
import os
import pickle
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mmrl.controller import preflight
from mmrl.controller.preflight import FirstSum

T = TypeVar("T")
importlib.import_module("torch.distributed.nn")
"""Imported before a group exists: otherwise its functions keep the group as a default argument after ``close``."""
_PATIENCE = timedelta(days=1)
"""Controllers may wait long for each other (a slow reward); the launcher finds dead and frozen processes."""
_FIRST = FirstSum()
_REQUEST = 26
"""Bytes of a request to a counter and its answer, beside its name: its kind, the lengths, and two numbers."""


class Counters:
    """Final class: numbered counters that all controllers see, in the process group's store; all begin at 0."""

    def __init__(self, store: dist.Store, name: str, sent: Counter[str]) -> None:
        self._name, self._sent = name, sent
        self._store: dist.Store | None = store

    def add(self, number: int, value: int) -> int:
        """Add to counter ``number`` and return its sum, as one step; 0 reads it. Does not wait for a controller."""
        key = f"{self._name}/{number}"
        assert self._store is not None
        self._sent["claims"] += len(key) + _REQUEST
        return self._store.add(key, value)

    def drop(self, number: int) -> None:
        """Have the store forget counter ``number``."""
        if self._store is not None:
            self._store.delete_key(f"{self._name}/{number}")

    def close(self) -> None:
        """Let go of the store, which has threads."""
        self._store = None


class Alone:
    """Final class: the ``Peers`` of a single controller."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        """Bytes sent so far, by kind."""
        self.waited = 0.0
        """Seconds spent in these calls so far."""
        self.ranks: dist.ProcessGroup | None = None
        """The process group of all ranks; None with a single controller."""

    def sum(self, values: Tensor, kind: str) -> Tensor:
        """Sum ``values`` over all controllers, in place (all-reduce). ``kind``: their key in ``sent``."""
        return values

    def gather(self, values: T) -> list[T]:
        """The values (JSON data) of all controllers, in the order of their ranks (all-gather)."""
        return [values]

    def again(self, backend: str) -> dist.ProcessGroup | None:
        """A second process group of the same ranks, for collectives that run in parallel with the first group's."""
        return None

    def divided(self, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup] | None:
        """The group of the ``size`` ranks next to one another that this one belongs to, and that of the ranks with its
        place in theirs. None with a single controller."""
        return None

    def counters(self, name: str) -> Counters:
        """Counters that all controllers share. A ``name`` is used once, by all controllers, and only after all are done
        with the counters before."""
        return Counters(dist.HashStore(), name, self.sent)


class Group:
    """Final class: controllers connected by ``torch.distributed``; the first listens at ``host``:``port``.

    NCCL sends tensors on a GPU and gloo all others, both over the network interface that leads to ``host``. A process
    has at most one such group.

    ``devices``: devices per controller. ``rank`` and ``size`` then count devices, and the first device of a controller
    represents it: gradients are summed over all devices, everything else over controllers. ``waiting()`` is entered
    while waiting for the others. ``store``: where they meet, if not in one of their own at ``host``:``port``.

    The ``first`` sum is made at once. Raises ``UnreachedError`` if it fails.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        host: str,
        port: int,
        devices: int = 1,
        waiting: Callable[[], AbstractContextManager[None]] = nullcontext,
        store: dist.Store | None = None,
        first: FirstSum = _FIRST,
    ) -> None:
        self.sent: Counter[str] = Counter()
        self.waited = 0.0
        self._devices, self._size, self._waiting = size, size // devices, waiting
        self._per_controller = devices
        self._counters: Counters | None = None
        self._divided: dict[int, tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
        if name := interface_to(host):  # their default is the interface of the host's own name
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
        store = store or dist.TCPStore(
            host, port, size, is_master=rank == 0, timeout=timedelta(minutes=3), wait_for_workers=False
        )
        self._store: dist.Store | None = store
        self._controllers: dist.ProcessGroup | None = None

        def connect() -> None:
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
            if devices > 1:
                self._controllers = dist.new_group(range(0, size, devices), timeout=_PATIENCE)  # pyright: ignore[reportAttributeAccessIssue]
            one = torch.ones(1, device=first.device)
            for group in [None, *(group for n in first.sizes for group in self.divided(n))]:
                dist.all_reduce(one, group=group)
                one = one.clamp(max=1)
            if one.item() != 1:
                raise RuntimeError(f"the sum is {one.item()}")

        with self._waiting():
            preflight.reach(store, rank, size, first, connect)
        self.ranks: dist.ProcessGroup | None = dist.group.WORLD

    def sum(self, values: Tensor, kind: str) -> Tensor:
        everywhere = kind == "gradients"
        with self._wait(values.is_cuda):
            dist.all_reduce(values, group=None if everywhere else self._controllers)
        n = self._devices if everywhere else self._size
        self.sent[kind] += 2 * (n - 1) * values.nbytes // n  # a ring all-reduce: reduce-scatter and all-gather
        return values

    def gather(self, values: T) -> list[T]:
        found = [values] * self._size
        with self._wait():
            dist.all_gather_object(found, values, group=self._controllers)
        self.sent["numbers"] += (self._size - 1) * max(len(pickle.dumps(one)) for one in found)  # padded to the longest
        return found

    def again(self, backend: str) -> dist.ProcessGroup | None:
        group = dist.new_group(backend=backend, timeout=_PATIENCE)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def divided(self, size: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        if size in self._divided:
            return self._divided[size]
        every, own = range(self._devices), dist.get_rank()
        together = [list(every[first : first + size]) for first in every[::size]]
        across = [list(every[place::size]) for place in range(size)]
        made = [(ranks, dist.new_group(ranks, timeout=_PATIENCE)) for ranks in [*together, *across]]  # by all ranks
        shards, replicas = (group for ranks, group in made if own in ranks)
        assert isinstance(shards, dist.ProcessGroup)
        assert isinstance(replicas, dist.ProcessGroup)
        self._divided[size] = shards, replicas
        return shards, replicas

    def counters(self, name: str) -> Counters:
        assert self._store is not None  # the group is not closed
        if self._counters is not None:
            self._counters.drop(dist.get_rank() // self._per_controller)
        self._counters = Counters(self._store, f"counters/{name}", self.sent)
        return self._counters

    @contextmanager
    def _wait(self, on_gpu: bool = False) -> Generator[None]:
        """Count the seconds of waiting; first the GPU finishes its own work, which does not count."""
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        with self._waiting():
            yield
            if on_gpu:
                torch.cuda.synchronize()
        self.waited += time.perf_counter() - began

    def close(self) -> None:
        """Destroy the group and its threads: a thread that is alive at exit may abort the process."""
        dist.destroy_process_group()
        self.ranks = self._controllers = self._store = None
        self._divided.clear()
        if self._counters is not None:
            self._counters.close()


Peers = Alone | Group
"""Collective communication: every controller must make the same calls in the same order."""


def begun() -> dict[str, int]:
    """How many collectives this process has begun, by process group: one that has begun fewer than another of the
    group is waited for. Any thread may ask."""
    found: dict[str, int] = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        for kind in ("cpu", "cuda"):
            with suppress(RuntimeError):  # it has no such backend
                backend = group._get_backend(torch.device(kind))
                found[f"{name} {kind}"] = backend._get_sequence_number_for_group()  # pyright: ignore[reportAttributeAccessIssue]
    return found


def interface_to(host: str) -> str | None:
    """The name of this machine's network interface that leads to ``host``; None if it is not known."""
    try:
        family, *_, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a datagram socket: finds the route without sending
            own = probe.getsockname()[0]
    except OSError:
        return None
    found = psutil.net_if_addrs().items()
    return next((name for name, its in found for one in its if one.address.partition("%")[0] == own), None)

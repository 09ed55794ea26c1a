"""Move frozen modules off their device while it does other work, and back.

On a device with memory of its own (a GPU) the weights wait in the host's memory, in one page-locked copy that is made
once: what is frozen needs no copying back. On the CPU nothing waits: it is read again from the disk. Imports torch
late.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from contextlib import contextmanager
from itertools import chain

import torch
from torch import Tensor, nn

SLAB = 256 << 20
"""Bytes of the host's memory that are taken at once, unless one storage is larger."""
REST = 8 << 20
"""Bytes that are taken together at the end."""
ALIGNED = 256


class Frozen:
    """A module whose parameters and buffers do not change. They stay the same objects, and tied ones stay tied.

    While it sleeps they are the host's copy, so that a state dict is right at any time. ``read`` loads the same module
    again, on the CPU; without it nothing is freed where the device is the CPU. There a parameter has no elements while
    it sleeps. What the module registers after it first slept stays on the device. Thread-safe.
    """

    def __init__(self, module: nn.Module, read: Callable[[], nn.Module] | None = None) -> None:
        self.module, self._read = module, read
        self._slabs: list[_Slab] = []
        self._at: torch.device | None = None
        """Where ``wake`` has brought it."""
        self._dropped = self._left = self._sleeps = False
        self._turn = threading.Lock()

    @property
    def host_bytes(self) -> int:
        """Bytes of the copy in the host's memory."""
        return sum(slab.host.numel() for slab in self._slabs)

    def sleep(self, device: torch.device | str) -> None:
        """Free the memory of ``device``, the one that it computes on. Harmless when called first, or twice."""
        device = torch.device(device)
        with self._turn, torch.inference_mode(False):
            self._at, self._sleeps = None, True
            if self._dropped or self._left:
                return
            if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in _tensors(self.module)):
                self.module.to("cpu")  # quantised weights of a class of their own know themselves how to move
            elif apart(device):
                if self._slabs:
                    for slab in self._slabs:
                        slab.leave()
                else:  # one by one: never two copies of all
                    self._slabs = [_Slab(group, device.type == "cuda") for group in _packed(_by_storage(self.module))]
                self._left = True
            elif self._read is not None:
                for parameter in self.module.parameters():
                    parameter.data = torch.empty(0, dtype=parameter.dtype)
                self._dropped = True

    def wake(self, device: torch.device | str, *, wait: bool = True) -> bool:
        """Have it on ``device``, all copying done: the time that takes is what waking costs.

        Without ``wait`` the host does not wait for the copying; what the device is given after it does. Returns whether
        it came there for good, so that no later waking takes as long. Raises what ``read`` raises.
        """
        device = torch.device(device)
        with self._turn, torch.inference_mode(False):
            if self._at == device:
                return False
            for slab in self._slabs:
                slab.come(device)
            if self._dropped and not self._slabs and self._read is not None:
                _take(self.module, self._read())
            self._dropped = self._left = False
            self.module.to(device)
            if apart(device) and wait:
                torch.accelerator.synchronize(device)
            self._at = device
            return apart(device) and not self._sleeps


class Offloaded:
    """Frozen modules of which only those in use are on ``device``. The host waits neither for coming nor for going.

    What was used stays until something else is, or until ``rest``: a phase that uses it again and again moves it once.
    Several threads may use modules at the same time.
    """

    def __init__(self, modules: Iterable[nn.Module], device: torch.device) -> None:
        self.device = device
        self._frozen = {id(module): Frozen(module) for module in modules}
        self._users: Counter[int] = Counter()
        self._turn = threading.RLock()
        self.rest()

    @contextmanager
    def using(self, *modules: nn.Module) -> Generator[None]:
        """Have ``modules`` on the device, as far as they are of these, and none of the others that nobody uses."""
        used = [id(module) for module in modules if id(module) in self._frozen]
        with self._turn:
            self._users.update(used)
            self.rest()
            for key in used:
                self._frozen[key].wake(self.device, wait=False)
        try:
            yield
        finally:
            with self._turn:
                self._users.subtract(used)

    def rest(self) -> None:
        """Move everything that is not in use off the device."""
        with self._turn:
            for key, frozen in self._frozen.items():
                if not self._users[key]:
                    frozen.sleep(self.device)

    @property
    def host_bytes(self) -> int:
        """Bytes of the copies in the host's memory."""
        return sum(frozen.host_bytes for frozen in self._frozen.values())


def apart(device: torch.device) -> bool:
    """Whether a device has memory of its own."""
    return device.type != "cpu"


class _Slab:
    """Storages of a module behind one another in the host's memory, and which tensors lie where in them."""

    def __init__(self, storages: Sequence[Sequence[Tensor]], pin: bool) -> None:
        starts = [0]
        for tensors in storages:
            starts.append(starts[-1] + _aligned(tensors))
        self.host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin)
        self._lying: list[tuple[Tensor, int, torch.Size, tuple[int, ...]]] = []
        for start, tensors in zip(starts, storages, strict=False):
            storage = tensors[0].untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(storage)
            self.host[start : start + whole.numel()].copy_(whole)
            lying = [(t, start // t.itemsize + int(t.storage_offset()), t.size(), t.stride()) for t in tensors]
            _lay(lying, self.host)  # frees what lay elsewhere before the next is copied
            self._lying += lying

    def leave(self) -> None:
        """Have the tensors be the host's copy."""
        _lay(self._lying, self.host)

    def come(self, device: torch.device) -> None:
        """Have the tensors on ``device``; the copying may go on."""
        _lay(self._lying, self.host.to(device, non_blocking=True, copy=True))


def _lay(lying: Iterable[tuple[Tensor, int, torch.Size, tuple[int, ...]]], where: Tensor) -> None:
    """Have every tensor at its place of ``where``: places count elements."""
    for tensor, place, size, stride in lying:
        empty = torch.empty(0, dtype=tensor.dtype, device=where.device)
        tensor.data = empty.set_(where.untyped_storage(), place, size, stride)


def _packed(storages: list[list[Tensor]]) -> list[list[list[Tensor]]]:
    """Storages that lie behind one another, by slab. torch rounds page-locked memory up to a power of two, so each slab
    is nearly one."""
    left = sorted(storages, key=_aligned, reverse=True)
    slabs: list[list[list[Tensor]]] = []
    while left:
        total = sum(map(_aligned, left))
        room = total if total <= REST else max(min(SLAB, 1 << total.bit_length() - 1), _aligned(left[0]))
        room = 1 << max(room - 1, 0).bit_length()
        slab: list[list[Tensor]] = []
        rest: list[list[Tensor]] = []
        for storage in left:
            fits = _aligned(storage) <= room
            room -= _aligned(storage) * fits
            (slab if fits else rest).append(storage)
        slabs.append(slab)
        left = rest
    return slabs


def _aligned(tensors: Sequence[Tensor]) -> int:
    """Bytes of the storage of ``tensors``, and up to where the next may begin."""
    return -(-tensors[0].untyped_storage().nbytes() // ALIGNED) * ALIGNED


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return chain(module.parameters(), module.buffers())


def _by_storage(module: nn.Module) -> list[list[Tensor]]:
    found: dict[tuple[int, int], list[Tensor]] = {}
    for tensor in _tensors(module):
        storage = tensor.untyped_storage()
        found.setdefault((storage.data_ptr(), storage.nbytes()), []).append(tensor)
    return list(found.values())


def _take(module: nn.Module, fresh: nn.Module) -> None:
    """Give the parameters of ``module`` the weights of ``fresh``, which is the same module, read again."""
    weights = dict(fresh.named_parameters(remove_duplicate=False))
    for name, parameter in module.named_parameters():
        parameter.data = weights[name].data

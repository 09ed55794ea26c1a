"""Frozen models that leave their device while it does other work (``placement.sleep``), and come back by ``wake``.

On a device with memory of its own (a GPU) the weights wait in the host's memory, in one pinned copy that is made once:
frozen weights need no copying back. On the CPU nothing waits: they are read again from the disk. Imports torch late.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

PIECE = 8 << 20
"""Bytes of pinned memory that are taken at once: torch rounds each piece up to a power of two."""

M = TypeVar("M", bound="nn.Module")


class Sleeping:
    """Base of a reward with frozen models, so that it has ``sleep`` and ``wake``.

    @mmrl.reward(device=True)
    class Mine(Sleeping):
        def __init__(self, path):
            self.model = self.frozen(load(path), lambda: load(path))

        def score(self, samples, *, context):
            self.wake(context.device)  # costs nothing where that has been done
    """

    _frozen: tuple[Frozen, ...] = ()

    def frozen(self, module: M, read: Callable[[], nn.Module] | None = None) -> M:
        """Have ``module`` sleep and wake with the others; ``read`` as in ``Frozen``. Returns the module."""
        self._frozen = (*self._frozen, Frozen(module, read))
        return module

    def sleep(self, device: torch.device | str) -> None:
        """Free the memory of ``device``. Harmless when called first, or twice."""
        for one in self._frozen:
            one.sleep(device)

    def wake(self, device: torch.device | str) -> bool:
        """Have the models on ``device``, all copying done; returns whether they came there for good."""
        came = [one.wake(device) for one in self._frozen]
        return any(came)


class Frozen:
    """A module whose parameters and buffers do not change. They stay the same objects, and tied ones stay tied.

    ``read`` loads the same module again, on the CPU; without it nothing is freed where the device is the CPU. While it
    sleeps a parameter has no elements. What it registers after it first slept stays on the device. Thread-safe.
    """

    def __init__(self, module: nn.Module, read: Callable[[], nn.Module] | None = None) -> None:
        self.module, self._read = module, read
        self._storages: list[_Storage] = []
        self._at: torch.device | None = None
        """Where ``wake`` has brought it."""
        self._dropped = self._sleeps = False
        self._turn = threading.Lock()

    def sleep(self, device: torch.device | str) -> None:
        """Free the memory of ``device``, the one that it computes on. Harmless when called first, or twice."""
        import torch

        device = torch.device(device)
        with self._turn:
            self._at, self._sleeps = None, True
            if self._dropped:
                return
            if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in _tensors(self.module)):
                self.module.to("cpu")  # quantised weights of a class of their own know themselves how to move
            elif apart(device):
                kept = self._storages or (_Storage(t, device.type == "cuda") for t in _by_storage(self.module))
                self._storages = [storage.dropped() for storage in kept]  # one by one: never two copies of all
            elif self._read is not None:
                _drop(self.module.parameters())
                self._dropped = True

    def wake(self, device: torch.device | str) -> bool:
        """Have it on ``device``, all copying done: the time that takes is what waking costs.

        Returns whether it came there for good, so that no later waking takes as long. Raises what ``read`` raises.
        """
        import torch

        device = torch.device(device)
        with self._turn, torch.inference_mode(False):
            if self._at == device:
                return False
            for storage in self._storages:
                storage.restore(device)
            if self._dropped and not self._storages and self._read is not None:
                _take(self.module, self._read())
            self._dropped = False
            self.module.to(device)
            if apart(device):
                torch.accelerator.synchronize(device)
            self._at = device
            return apart(device) and not self._sleeps


def apart(device: torch.device) -> bool:
    """Whether a device has memory of its own."""
    return device.type != "cpu"


class _Storage:
    """A storage of a module: its bytes in the host's memory, and which tensors lie where in it."""

    def __init__(self, tensors: Sequence[Tensor], pin: bool) -> None:
        import torch

        whole = torch.empty(0, dtype=torch.uint8, device=tensors[0].device).set_(tensors[0].untyped_storage())
        self._bytes = whole.numel()
        self.pieces = [
            torch.empty(len(part), dtype=torch.uint8, pin_memory=pin).copy_(part) for part in whole.split(PIECE)
        ]
        self._lying = [(t, t.storage_offset(), t.size(), t.stride()) for t in tensors]

    def dropped(self) -> _Storage:
        """Itself, with the tensors emptied."""
        _drop(tensor for tensor, *_ in self._lying)
        return self

    def restore(self, device: torch.device) -> None:
        """Have the tensors on ``device``; the copying may go on."""
        import torch

        whole = torch.empty(self._bytes, dtype=torch.uint8, device=device)
        for part, piece in zip(whole.split(PIECE), self.pieces, strict=True):
            part.copy_(piece, non_blocking=True)
        for tensor, offset, size, stride in self._lying:
            empty = torch.empty(0, dtype=tensor.dtype, device=device)
            tensor.data = empty.set_(whole.untyped_storage(), offset, size, stride)


def _tensors(module: nn.Module) -> Iterable[Tensor]:
    return chain(module.parameters(), module.buffers())


def _by_storage(module: nn.Module) -> list[list[Tensor]]:
    found: dict[tuple[int, int], list[Tensor]] = {}
    for tensor in _tensors(module):
        storage = tensor.untyped_storage()
        found.setdefault((storage.data_ptr(), storage.nbytes()), []).append(tensor)
    return list(found.values())


def _drop(tensors: Iterable[Tensor]) -> None:
    import torch

    for tensor in tensors:
        tensor.data = torch.empty(0, dtype=tensor.dtype)


def _take(module: nn.Module, fresh: nn.Module) -> None:
    """Give the parameters of ``module`` the weights of ``fresh``, which is the same module, read again."""
    weights = dict(fresh.named_parameters(remove_duplicate=False))
    for name, parameter in module.named_parameters():
        parameter.data = weights[name].data

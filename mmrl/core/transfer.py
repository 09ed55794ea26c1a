"""Copies between host and device without needless waits: tensors go to the device through page-locked memory,
and numbers of the device are read many at once."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """``tensor`` on ``device``. The host does not wait until the GPU has finished earlier work."""
    if device.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(device)
    return (tensor if tensor.is_pinned() else tensor.pin_memory()).to(device, non_blocking=True)


def to_host(tensor: Tensor, room: Tensor | None = None) -> Tensor:
    """A copy of ``tensor`` in page-locked memory of the host, in ``room`` where one is given. The host does not wait
    for it: who reads it there waits before (``arrived``); what goes to the device from there comes after it."""
    import torch

    if room is None:
        room = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
    return room.copy_(tensor.detach(), non_blocking=tensor.device.type == "cuda")


def arrived(device: torch.device) -> None:
    """Wait for the copies that ``to_host`` has started."""
    import torch

    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def picked(tensor: Tensor, index: Sequence[int], dim: int = 0) -> Tensor:
    """``tensor[index]``, for which the host would wait; or that along another dimension."""
    import torch

    return tensor.index_select(dim, to_device(torch.tensor(index, dtype=torch.long), tensor.device))


def read(numbers: Sequence[Tensor]) -> list[float]:
    """The values of tensors of one number each. The host waits once for a device, and once more for each further
    dtype."""
    import torch

    found = [0.0] * len(numbers)
    together: defaultdict[tuple[torch.device, torch.dtype], list[int]] = defaultdict(list)
    for n, number in enumerate(numbers):
        if number.device.type == "cpu":
            found[n] = number.item()
        else:
            together[number.device, number.dtype].append(n)
    for places in together.values():
        values = torch.stack([numbers[n].detach().reshape(()) for n in places]).tolist()
        for n, value in zip(places, values, strict=True):
            found[n] = value
    return found

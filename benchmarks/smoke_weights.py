"""The check of ``gpu_smoke.py`` for weights that reach another process without a file: by handles of GPU memory."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path
from typing import Any

from smoke_place import MissedError, Place

BACKENDS = {True: "ipc", False: "gloo"}
"""On a GPU and elsewhere."""


def weights_to_another_process(place: Place) -> dict[str, Any]:
    """Sends weights twice; the other process adds up what it got."""
    import torch

    from mmrl.inference.weight_groups import WeightGroup

    count, width = (3, 64) if place.small else (16, 4096)
    made = torch.Generator().manual_seed(0)
    named = {f"w{n}": torch.randn(width, width, generator=made).to(place.device) for n in range(count)}
    meeting, said = place.folder / "meeting", place.folder / "said.pt"
    other = multiprocessing.get_context("spawn").Process(target=receive, args=(meeting, place.device, said))
    other.start()
    group = WeightGroup(meeting, 0, 2, BACKENDS[place.gpu], torch.device(place.device), patience=60)
    group.send(named.items(), 2**28)
    began = time.perf_counter()
    group.send(named.items(), 2**28)
    seconds = time.perf_counter() - began
    other.join(60)
    size = sum(tensor.nbytes for tensor in named.values()) / 2**30
    figures = {"transport": BACKENDS[place.gpu], "GiB": round(size, 4), "seconds": round(seconds, 4)}
    got = torch.load(said, weights_only=True)
    if not all(torch.equal(got[name], tensor.cpu()) for name, tensor in named.items()):
        raise MissedError("the weights that arrived differ", figures)
    return figures


def receive(meeting: Path, device: str, said: Path) -> None:
    """The other process."""
    import torch

    from mmrl.inference.weight_groups import WeightGroup

    gpu = device.startswith("cuda")
    if gpu:
        torch.cuda.set_device(torch.device(device).index or 0)
    group = WeightGroup(meeting, 1, 2, BACKENDS[gpu], torch.device(device), patience=60)
    got = {}
    for _ in range(2):
        got = {name: tensor.clone() for name, tensor in group.received()}  # to the host only when all is sent
    torch.save({name: tensor.cpu() for name, tensor in got.items()}, said)

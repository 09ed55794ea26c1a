"""Tell a controller's processes on which devices they start servers, where devices that train share a server."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mmrl.config.replicas import leaders
from mmrl.config.schema import Recipe
from mmrl.engines.server_devices import ServerDevices


def settle(recipe: Recipe, actors: Mapping[tuple[int, int], Any], get: Callable[[Any], Any], gpus: int) -> None:
    """``actors``: those of all controllers, by rank and device. ``get``: waits for an answer of one. ``gpus``: of each,
    0 or 1."""
    led, n = leaders(recipe), recipe.devices_per_controller
    sampling = n - recipe.placement.judging(n)
    for rank in range(recipe.controllers) if led else ():
        own = [get(actors[rank, device].visible.remote()) for device in range(n)] if gpus else []
        for device in range(n):
            together = ",".join(filter(None, own[device : device + led.get(device, 0)]))
            samples = device in led and device < sampling
            get(actors[rank, device].start_servers_on.remote(ServerDevices(together, samples)))

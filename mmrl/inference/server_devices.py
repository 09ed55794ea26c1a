"""The devices of the servers that this process starts (engines, judges), where they are not its own device alone.

A server on several devices that also train is started by the process of the first, its leader
(``mmrl.config.replicas``). The launcher settles that before the process loads anything; in every other process nothing
is settled.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ServerDevices:
    """``visible``: the GPUs of a server, as in ``CUDA_VISIBLE_DEVICES``; empty: those of the process. ``samples``: this
    process asks an engine for samples, and so starts it."""

    visible: str = ""
    samples: bool = True


_here = ServerDevices()


def settle(devices: ServerDevices) -> None:
    """Have servers of this process start on ``devices``."""
    global _here
    _here = devices


def here() -> ServerDevices:
    return _here


def environment() -> dict[str, str]:
    """The variables of a server's process."""
    return {"CUDA_VISIBLE_DEVICES": _here.visible} if _here.visible else {}

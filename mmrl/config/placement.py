"""The section ``placement`` of a recipe: which devices of a controller sample, judge and train."""

from __future__ import annotations

from typing import Literal

from mmrl.config.section import Count, Few, Section


class Placement(Section):
    """Which devices of a controller sample, judge and train, and when (docs/placement.md)."""

    type: Literal["colocate", "partial", "disaggregated", "adaptive"] = "colocate"
    """``colocate``: all devices sample, then all judge; ``partial``: some judge while the others sample; ``adaptive``:
    as many as the load asks for. Then all train. ``disaggregated``: some train, some judge and the rest sample, all at
    once, on samples of weights that are a few steps old."""
    judges: Few | None = None
    """Devices of a controller that judge. None is half of them (disaggregated: of those that do not train); of an
    adaptive placement, which then begins with all devices in turn and measures both roles, this is how many judge at
    first."""
    trainers: Few | None = None
    """Disaggregated: devices of a controller that train. None is half of them."""
    staleness: Count | None = None
    """Disaggregated: how many steps old the weights are that a step's samples are drawn with; 1 by default."""
    inside: bool = True
    """Adaptive: a device whose role has run dry inside a step takes up the other one where that saves time."""
    sleep: bool = False
    """Have judges, and an engine of the device's own, free its memory while it does other work; on one device: while
    it trains. On a CPU judges are read from disk again, and engines end and start again."""

    @property
    def apart(self) -> bool:
        """Whether devices that train do nothing else."""
        return self.type == "disaggregated"

    def training(self, devices: int) -> int:
        """How many of a controller's ``devices`` train."""
        return (self.trainers or max(1, devices // 2)) if self.apart else devices

    def judging(self, devices: int) -> int:
        """How many of a controller's ``devices`` judge and do nothing else at first, where a reward is asked there."""
        if self.type == "colocate" or (self.type == "adaptive" and self.judges is None):
            return 0
        left = devices - self.training(devices) if self.apart else devices
        return self.judges or left // 2


def placement_settings(value: object) -> object:
    """A section from its ``type`` alone, with the default of ``staleness`` where it applies."""
    settings = {"type": value} if isinstance(value, str) else value
    if isinstance(settings, dict) and settings.get("type") == "disaggregated":  # what is drawn depends on it
        return settings | {"staleness": settings.get("staleness") or 1}
    return settings

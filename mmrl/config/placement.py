"""The section ``placement`` of a recipe: which devices of a controller sample, judge and train."""

from __future__ import annotations

from typing import Any, Literal

from mmrl.config.section import Count, Few, Section

_ROLES = {"type", "judges", "split", "trainers", "staleness", "lend", "inside"}
"""The keys that say which devices sample, judge and train."""


class Placement(Section):
    """Which devices of a controller sample, judge and train, and when (docs/placement.md)."""

    type: Literal["colocate", "partial", "disaggregated", "greedy", "adaptive"] = "colocate"
    """``colocate``: all devices sample, then all judge; ``partial``: some judge while the others sample; ``greedy``: a
    device without work takes the other role if that saves time; ``adaptive``: as ``greedy``, and the number of devices
    that judge from the start follows the measured load. Then all devices train. ``disaggregated``: some devices train,
    some judge and the rest sample, at the same time; the samples come from weights that are a few steps old."""
    judges: Few | None = None
    """Devices of a controller that judge. None: half of them (disaggregated: half of those that do not train).
    Greedy: the number that judge when a step begins; adaptive: when the first step begins. None: 0, all sample.
    ``split`` greedy or adaptive: the same."""
    split: Literal["fixed", "greedy", "adaptive"] = "fixed"
    """Disaggregated: how the devices that do not train are divided into those that sample and those that judge. Fixed:
    ``judges`` judge for the whole run. Greedy and adaptive: as the placements of these names, beside training."""
    trainers: Few | None = None
    """Disaggregated: devices of a controller that train; None: half of them."""
    staleness: Count | None = None
    """Disaggregated: by how many steps the sampling weights are behind the trained ones; 1 by default."""
    lend: bool = False
    """Disaggregated: a device that trains and waits for samples samples or judges for that step until they are there.
    The samples stay the same. It needs memory for a second copy of the trained weights there."""
    inside: bool = True
    """Adaptive (the ``type`` or the ``split``): a device without work in its role switches to the other role within a
    step if that saves time."""
    sleep: bool = False
    """Judges, and an engine that runs beside the device's trainer, free their memory while the device does other work;
    with one device: while it trains. On a CPU judges are loaded from disk again, and engines restart."""

    one_judge: bool = False
    """With ``sleep`` and several judges: a device has one of them awake at a time, so that it needs no memory for them
    together. To ask another one it puts the first to sleep. False: a device keeps those that it is asked for until it
    samples or trains."""
    log: bool = False
    """Several devices to a controller: ``placement.jsonl`` also has what the scheduler hears and decides, which ``mmrl
    verify RUN --decisions`` replays. About 60 bytes for each event; a task has four."""

    @property
    def follows(self) -> bool:
        """Whether the split follows the measured load between steps."""
        return self.type == "adaptive" or (self.apart and self.split == "adaptive")

    @property
    def moves(self) -> bool:
        """Whether devices switch their roles within a step to save time."""
        greedy = self.type == "greedy" or (self.apart and self.split == "greedy")
        return greedy or (self.follows and self.inside)

    @property
    def apart(self) -> bool:
        """Whether some devices train while the others sample and judge."""
        return self.type == "disaggregated"

    @property
    def where_refused(self) -> tuple[str, Placement]:
        """What a run goes on with where a decision of the policy cannot be: its name and the section."""
        if self.apart:
            return "a greedy split", self.model_copy(update={"split": "greedy", "judges": None})
        return "colocate", self.with_roles()

    def with_roles(self, **roles: Any) -> Placement:
        """The section with other ``roles`` (``type``, ``judges``, ``split``, ...) in place of its own. Settings that
        give no device a role stay."""
        return Placement(**{**self.model_dump(exclude=_ROLES), **roles})

    def training(self, devices: int) -> int:
        """How many of a controller's ``devices`` train."""
        return (self.trainers or max(1, devices // 2)) if self.apart else devices

    def judging(self, devices: int) -> int:
        """How many of a controller's ``devices`` only judge at first, if a reward runs on devices."""
        left = devices - self.training(devices) if self.apart else devices
        if self.type == "colocate" or (self.judges is None and self.all_sample_first):
            return 0
        return self.judges or left // 2

    @property
    def all_sample_first(self) -> bool:
        """Whether no device judges from the start where ``judges`` is not set."""
        return self.moves or self.type == "adaptive"


def placement_settings(value: object) -> object:
    """A section from its ``type`` alone, with the default of ``staleness`` where it applies."""
    settings = {"type": value} if isinstance(value, str) else value
    if isinstance(settings, dict) and settings.get("type") == "disaggregated":  # the samples depend on it
        return settings | {"staleness": settings.get("staleness") or 1}
    return settings

"""The data of a plan. ``mmrl.planner.plan`` fills it, ``mmrl.planner.render`` prints it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.config.schema import Recipe
from mmrl.planner.counts import Counts
from mmrl.planner.estimate import Estimate
from mmrl.planner.gpus import Gpu
from mmrl.planner.judges import Asked
from mmrl.planner.memory import Measured


@dataclass(frozen=True)
class Role:
    """A line of the roles' table. ``where``: when it is on the device; ``bytes`` while it is."""

    name: str
    what: str
    parameters: int
    bytes: int
    where: str


@dataclass(frozen=True)
class PhaseMemory:
    """What is on the device during a phase of the step, by part, at the phase's highest moment."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


PHASES = ("encode", "sample", "decode", "train", "optimizer")


@dataclass
class Plan:
    """A resolved recipe, what it leaves to the plan settled.

    Bytes throughout; ``phases`` and ``roles`` are empty where a problem prevents them.

    ``problems`` are why it cannot run, each with the edit that mends it; ``device_memory`` is None where the device is
    not on this machine.
    """

    recipe: Recipe
    device: str
    device_memory: int | None
    source: str = ""
    counts: Counts | None = None
    measured: Measured | None = None
    roles: list[Role] = field(default_factory=list)
    phases: list[PhaseMemory] = field(default_factory=list)
    load: PhaseMemory | None = None
    """What the device holds while the run is loaded; None of a CPU, where weights are read from their files."""
    host: int = 0
    asked: list[Asked] = field(default_factory=list)
    """The rewards that compute on a device."""
    inside: dict[str, int] = field(default_factory=dict)
    """Bytes that go between a controller and its further devices in a step, the most, by kind."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    gpu: Gpu | None = None
    """A GPU to plan for that need not be on this machine, and how many ``gpus`` of it there are to be."""
    gpus: int | None = None
    time: Estimate | None = None
    """Of a step on that GPU."""

    @property
    def peak(self) -> PhaseMemory | None:
        """The phase that needs most, loading among them."""
        phases = [*self.phases, *([self.load] if self.load else [])]
        return max(phases, key=lambda phase: phase.total, default=None)

    @property
    def where(self) -> str:
        """What it computes on, as the user calls it."""
        return self.gpu.name if self.gpu else self.device

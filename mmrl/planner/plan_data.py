"""The data of a plan. ``mmrl.planner.plan`` fills it, ``mmrl.planner.render`` prints it."""

from __future__ import annotations

from dataclasses import dataclass, field

from mmrl.config.model import Quantize
from mmrl.config.schema import Recipe
from mmrl.planner.counts import Counts
from mmrl.planner.estimate import Episodes, Estimate
from mmrl.planner.gpus import Gpu
from mmrl.planner.judges import Asked
from mmrl.planner.memory import Measured


@dataclass(frozen=True)
class Role:
    """A line of the roles' table. ``where``: the phases in which it is on the device; ``bytes``: its size there."""

    name: str
    what: str
    parameters: int
    bytes: int
    where: str


@dataclass(frozen=True)
class PhaseMemory:
    """What is on the device at the peak of a phase, by part."""

    name: str
    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


PHASES = ("encode", "sample", "decode", "train", "optimizer")


@dataclass
class Plan:
    """A resolved recipe, with the plan's choices for ``auto``.

    All sizes are in bytes; ``phases`` and ``roles`` are empty if a problem prevents them.

    ``problems``: why the recipe cannot run, each with the edit that fixes it; ``device_memory`` is None if the device
    is not on this machine.
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
    """What the device holds while the run is loaded; None for a CPU with whole weights, which lie in their files."""
    by_rows: bool = False
    """Whether each rank reads only its part of the checkpoint."""
    quantized: dict[Quantize, dict[str, int]] = field(default_factory=dict)
    """Of each ``model.quantize`` that a frozen base could have: the bytes that it would save, by role; the most bits
    first."""
    host: int = 0
    asked: list[Asked] = field(default_factory=list)
    """The rewards that run on a device."""
    inside: dict[str, int] = field(default_factory=dict)
    """The most bytes sent between a controller and its other devices in a step, by kind."""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    gpu: Gpu | None = None
    """A GPU to plan for, which need not be on this machine; ``gpus``: their number."""
    gpus: int | None = None
    episodes: Episodes | None = None
    """What a run measured of the environment; None where no run was named."""
    time: Estimate | None = None
    """The estimated time of a step on that GPU or on this machine's device."""
    encoding: float = 0.0
    """Seconds in which this machine's processor encodes a prompt of text."""
    recordable: bool = False
    """Text: whether a step of sampling in the process can be recorded and replayed."""
    uncalibrated: str = ""
    """Why the estimate is not of this machine's calibration, and what to do; empty where it is, or for another GPU."""

    @property
    def known(self) -> tuple[Counts, Measured]:
        """What is counted and measured of a step. Raises ``ValueError`` where a problem has prevented that."""
        if self.counts is None or self.measured is None:
            raise ValueError("the plan has a problem, and counts nothing")
        return self.counts, self.measured

    @property
    def lasts(self) -> float:
        """Seconds of the whole run without evaluation, an estimate; 0: not known."""
        return 0.0 if self.time is None else self.recipe.train.steps * self.time.step

    @property
    def peak(self) -> PhaseMemory | None:
        """The phase that needs the most memory, loading included."""
        phases = [*self.phases, *([self.load] if self.load else [])]
        return max(phases, key=lambda phase: phase.total, default=None)

    @property
    def of_a_step(self) -> dict[str, float]:
        """What every row of metrics.jsonl says of the plan: ``plan/step_seconds``, and on an accelerator the peak in
        MiB (a CPU's is of the whole process, which the plan does not count)."""
        found = {} if self.time is None else {"plan/step_seconds": self.time.step}
        if self.peak is not None and self.device != "cpu":
            found["plan/peak"] = self.peak.total / 2**20
        return found

    @property
    def where(self) -> str:
        """The device, by the user's name for it."""
        return self.gpu.name if self.gpu else self.device

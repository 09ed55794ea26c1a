"""The context of a step, and the protocols of its parts: devices, rollout strategies, and parts with state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar, TypeVarTuple

import torch

from mmrl.algorithms.objective import Objective
from mmrl.checkpoint.reader import PartState, Saved
from mmrl.config.schema import Recipe
from mmrl.controller import Controller
from mmrl.engines.policy import Policy, Version
from mmrl.pipelines.protocol import Pipeline
from mmrl.report.clock import Clock
from mmrl.rewards.scoring import RewardSet
from mmrl.training.batch import Batch, Groups, MicroBatch, Round
from mmrl.training.step_metrics import StepMetrics
from mmrl.trajectory import Prompt, Sample, SampleId, Slot, Trajectory

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

Chunk = tuple[Sequence[Slot], Sequence[SampleId]]
Drawn = tuple[int, Trajectory, list[Sample]]


@dataclass(frozen=True)
class SamplingSpec:
    """How the micro-batches of a phase are sampled: ``actions`` as in ``Pipeline.sample``, under the copy ``weights``
    of the policy; ``inputs`` are what rewards see of a sample. ``step`` and ``round``: of training, that they are for;
    -1 outside it."""

    actions: Sequence[int]
    weights: str
    seed: int
    inputs: frozenset[str]
    evaluate: bool = False
    step: int = -1
    round: int = 0


class Devices(Protocol):
    """What of a step may be computed on several devices. Used by one thread.

    A task is a function of a module (``mmrl.placement.device_tasks`` has most): another process finds it by its name.
    """

    def alone(self, context: StepContext, weights: str) -> AbstractContextManager[None]:
        """Inside, each device computes without the others, under the copy ``weights`` of the policy. All controllers
        enter and leave together."""
        ...

    def sample(
        self,
        context: StepContext,
        chunks: Iterable[Chunk],
        how: SamplingSpec,
        clock: Clock,
        version: Version | None = None,
    ) -> Iterator[Drawn]:
        """Each micro-batch sampled and decoded, with its number: in the order in which they are done.

        ``version``: the weights to sample with, where devices that sample do not train; None is those of now.
        """
        ...

    def continue_generation(
        self,
        context: StepContext,
        parts: Sequence[Trajectory],
        most: int,
        how: SamplingSpec,
        version: Version | None = None,
    ) -> list[Trajectory]:
        """Responses that are under way, each with at most ``most`` further tokens; ``version`` as in ``sample``."""
        ...

    def version(self, context: StepContext, name: str) -> Version:
        """The policy's copy ``name`` as it is now, to sample with later."""
        ...

    def in_step(self, context: StepContext, n: int) -> int:
        """How many micro-batches ``slices`` makes for ``spread`` where there are ``n``. All controllers must ask."""
        ...

    def spread(
        self,
        context: StepContext,
        task: Callable[[StepContext, Iterable[MicroBatch], *Ts], R],
        micro_batches: Iterable[MicroBatch],
        *arguments: *Ts,
    ) -> list[R]:
        """What ``task(run, its micro-batches, *arguments)`` returns on each device that was dealt some."""
        ...

    def everywhere(self, context: StepContext, task: Callable[[StepContext, *Ts], R], *arguments: *Ts) -> R:
        """Do ``task`` on every device that trains; returns what the first one said."""
        ...

    def others(self, context: StepContext, task: Callable[[StepContext, *Ts], object], *arguments: *Ts) -> None:
        """Do ``task`` on every device that trains but the first."""
        ...

    def beside(
        self, context: StepContext, task: Callable[[StepContext, *Ts], object], *arguments: *Ts
    ) -> AbstractContextManager[None]:
        """As ``others``, while the caller does what is inside."""
        ...

    def begin_step(self) -> None:
        """Count time from now."""
        ...

    def end_step(self, context: StepContext, step: int) -> dict[str, float]:
        """Metrics of the step just done; every controller must call it."""
        ...

    def lines(self) -> list[dict[str, Any]]:
        """Of placement.jsonl: what each device of every controller did when in the last step, and what was decided."""
        ...

    def cpu_seconds(self, context: StepContext) -> float:
        """CPU time of the controller's processes so far."""
        ...

    def state_dict(self) -> PartState: ...

    def load_state_dict(self, numbers: Any, saved: Saved, /) -> None:
        """Go on from what ``state_dict`` gave, where it is of as many devices."""
        ...

    def close(self) -> None: ...


class RolloutStrategy(Protocol):
    """How a step gets its groups: sampled in the step, in parts over several steps, or before it."""

    @property
    def staleness(self) -> int:
        """By how many steps the weights that sample are older than those that train; 0: they are the same."""
        ...

    @property
    def replaces_groups(self) -> bool:
        """Whether other groups may stand in for some, so that rewards are scaled over those that do."""
        ...

    def groups(
        self, context: StepContext, slots: list[Slot], step: int, clock: Clock, metrics: StepMetrics
    ) -> tuple[list[Round], Groups]:
        """The rounds that were sampled and scored for ``step``, and the (round, group) that stands in each slot.

        Raises ``RewardError`` and ``UserError``.
        """
        ...


@dataclass(frozen=True)
class FinishedStep:
    """What a part may learn from a step: ``slots`` are those that this controller began with, ``seconds`` what it
    worked without waiting for the others, ``metrics`` those of all controllers."""

    step: int
    batch: Batch
    slots: Sequence[Slot]
    seconds: float
    metrics: Mapping[str, float]


class StepPart:
    """Base of the optional features of a step. The loop and the checkpoint call all that a recipe has; each overrides
    what it needs."""

    own = False
    """Whether no other controller has its tensors."""

    def end_step(self, context: StepContext, done: FinishedStep) -> dict[str, float]:
        """Learn from a step that is done; returns further metrics. All controllers call it together."""
        return {}

    def state_dict(self) -> PartState:
        return PartState({})

    def load_state_dict(self, numbers: Any, saved: Saved, context: StepContext) -> None:
        """As ``Stateful``'s, in ``context``."""


@dataclass
class DeviceState:
    """What one device holds between tasks, whichever process it is in."""

    at_once: dict[str, int] = field(default_factory=dict)
    """Rows of a micro-batch that the phases ``sample`` and ``decode`` have memory for, once it has run out."""
    phase: ExitStack = field(default_factory=ExitStack)
    """What this device has entered beside others, and leaves with them (``mmrl.placement.device_tasks``)."""
    held: list[str] = field(default_factory=list)
    """Features that the controller sent to this process for this step."""
    save: Callable[[int], None] | None = None
    """Saves this device's shards after so many steps, with the others."""


@dataclass(frozen=True)
class Compute:
    """Where a step computes."""

    device: torch.device
    """Of this process."""
    devices: Devices
    """All devices of this controller: this process, or several."""
    local: DeviceState = field(default_factory=DeviceState)


@dataclass(frozen=True)
class Rollout:
    """How a step gets its samples."""

    strategy: RolloutStrategy
    """How it gets its groups."""
    parts: Mapping[str, StepPart] = field(default_factory=dict)
    """The optional features of the recipe, by the names that their state has in a checkpoint."""
    cost: Callable[[Prompt], float] | None = None
    """How much work a prompt's group is; None where all are the same, or begin before that is known."""


@dataclass(frozen=True)
class StepContext:
    """What a step works with; built once by ``mmrl.run``."""

    recipe: Recipe
    controller: Controller
    pipeline: Pipeline
    policy: Policy
    objective: Objective
    rewards: RewardSet
    prompts: Sequence[Prompt]
    compute: Compute
    rollout: Rollout
    critic: Policy | None = None
    """The critic's weights and optimizer, where the objective has one."""

    @property
    def another_drew(self) -> bool:
        """Whether the log-probs that sampling recorded of pictures are not those of the first replay: older weights
        drew them, or code that rounds otherwise, or they were drawn in batches of another shape, as replaced groups."""
        strategy = self.rollout.strategy
        return strategy.staleness > 0 or self.recipe.replays_first or strategy.replaces_groups

    @property
    def trained(self) -> dict[str, Policy]:
        """Every model that has an optimizer, by the name that its state has in a checkpoint."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

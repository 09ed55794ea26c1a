"""The context of a step, and the protocols of its parts: devices, rollout strategies, and parts with state."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, TypeVarTuple

import torch
from torch import Tensor

from mmrl.algorithms.objective import Objective
from mmrl.config.schema import Recipe
from mmrl.controller import Controller
from mmrl.core.checkpoint_reader import PartState, Saved
from mmrl.core.clock import Clock
from mmrl.core.json_types import JsonObject
from mmrl.core.trajectory import Prompt, Rows, Sample, SampleId, Slot, TextRows
from mmrl.models.policy import Policy, Version
from mmrl.models.protocol import Pipeline
from mmrl.rewards.scoring import RewardSet
from mmrl.step.batch import Batch, Groups, MicroBatch
from mmrl.step.step_metrics import StepMetrics

R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class Chunk(NamedTuple):
    """A micro-batch to sample: for each row its slot and the id that its randomness depends on."""

    slots: Sequence[Slot]
    ids: Sequence[SampleId]
    begun: Rows | None = None
    """Its rows after the first denoising steps or tokens, to be finished (``midway``); None: from the start."""


class ComingChunks(ABC, Iterator[Chunk]):
    """Micro-batches that are claimed one after another, each when a device can begin it."""

    @property
    @abstractmethod
    def left(self) -> int:
        """About how many are still to come."""

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether none can come any more. If not, there may be one after the next that was drawn or judged."""

    @abstractmethod
    def tell(self, open: float, each: float) -> None:
        """Tell the others the device-seconds of what was begun here and is not done, and of a micro-batch."""


Drawn = tuple[int, Rows, list[Sample]]
"""A micro-batch that was sampled: its number, its rows, and the samples for the rewards."""


@dataclass(frozen=True)
class SamplingSpec:
    """How the micro-batches of a phase are sampled.

    ``actions``: the denoising steps to record, as in ``Pipeline.sample``. ``weights``: the copy of the policy that
    samples. ``inputs``: what rewards read of a sample. ``step`` and ``round``: the training step and its round of
    sampling; ``step`` is -1 outside training. ``until``: denoise only these first steps and predict the results;
    of text: draw only these first tokens. ``draft``: in so many denoising steps, without noise in them.
    """

    actions: Sequence[int]
    weights: str
    seed: int
    inputs: frozenset[str]
    evaluate: bool = False
    step: int = -1
    round: int = 0
    until: int | None = None
    draft: int | None = None


class Devices(ABC):
    """The devices of one controller, and the work of a step that they do. Only one thread calls it.
    Methods with a body are those of a single device.

    A *task* is a module-level function whose first argument is the ``StepContext`` of the device
    (``mmrl.placement.device_tasks`` has most): other processes find it by its name. The *trainers* are the devices that
    hold the trained weights; with ``placement.type: disaggregated`` the others only sample and judge.
    """

    @abstractmethod
    def sampling_phase(self, context: StepContext, weights: str) -> AbstractContextManager[None]:
        """A context in which each device can sample without collectives, with the copy ``weights`` of the policy.
        Sharded weights are gathered for it. All controllers enter and leave together."""

    @abstractmethod
    def sample(
        self,
        context: StepContext,
        chunks: Iterable[Chunk],
        how: SamplingSpec,
        clock: Clock,
        version: Version | None = None,
    ) -> Iterator[Drawn]:
        """Sample and decode every micro-batch; yields each with its number, in the order in which they finish.

        ``version``: the weights to sample with, if the devices that sample do not train; None takes the current ones.
        """

    @abstractmethod
    def continue_generation(
        self,
        context: StepContext,
        parts: Sequence[TextRows],
        most: int,
        how: SamplingSpec,
        version: Version | None = None,
    ) -> list[TextRows]:
        """Continue unfinished responses by at most ``most`` tokens each; ``version`` as in ``sample``."""

    def lending(self, context: StepContext, step: int) -> AbstractContextManager[None]:
        """A context in which the caller waits for the samples of ``step``: trainers may sample and judge for it
        (``placement.lend``). After it they have their own weights again."""
        return nullcontext()

    @abstractmethod
    def version(self, context: StepContext, name: str) -> Version:
        """The current weights of the policy's copy ``name``, to sample with later."""

    @abstractmethod
    def lockstep_count(self, context: StepContext, n: int) -> int:
        """The number of micro-batches that every rank must run, if this controller has ``n``: the maximum over all
        controllers if a forward pass is collective, else ``n``. All controllers must call it."""

    @abstractmethod
    def map_micro_batches(
        self,
        context: StepContext,
        task: Callable[[StepContext, Iterable[MicroBatch], *Ts], R],
        micro_batches: Iterable[MicroBatch],
        *arguments: *Ts,
    ) -> list[R]:
        """Divide the micro-batches over the trainers, and call ``task(context, micro-batches, *arguments)`` on each
        trainer that got some. Returns one result per trainer (per group of trainers that share a model)."""

    @abstractmethod
    def run_on_trainers(self, context: StepContext, task: Callable[[StepContext, *Ts], R], *arguments: *Ts) -> R:
        """Call ``task(context, *arguments)`` on every trainer; returns the result of the first."""

    def run_on_other_trainers(  # noqa: B027
        self, context: StepContext, task: Callable[[StepContext, *Ts], object], *arguments: *Ts
    ) -> None:
        """Call ``task`` on every trainer except the first, which is the controller's own process."""

    def running_on_other_trainers(
        self, context: StepContext, task: Callable[[StepContext, *Ts], object], *arguments: *Ts
    ) -> AbstractContextManager[None]:
        """A context during which the trainers except the first run ``task``; leaving it waits for them."""
        return nullcontext()

    @abstractmethod
    def begin_step(self) -> None:
        """Start the step's clock."""

    @abstractmethod
    def end_step(self, context: StepContext, step: int) -> dict[str, float]:
        """Metrics of the finished step; every controller must call it."""

    def lines(self) -> Sequence[JsonObject]:
        """Rows for placement.jsonl: what each device of every controller did in the last step and when, and the
        decision on roles."""
        return ()

    def cpu_seconds(self, context: StepContext) -> float:
        """CPU time of all processes of this controller so far."""
        return time.process_time()

    def state_dict(self) -> PartState:
        return PartState({})

    def load_state_dict(self, numbers: JsonObject, saved: Saved, /) -> None:  # noqa: B027
        """Restore ``state_dict``; ignored if it is of a different number of devices."""

    def close(self) -> None:  # noqa: B027
        """End what was started."""


class RolloutStrategy(ABC):
    """How a step gets its samples: sampled in the step, in parts over several steps, or ahead of it."""

    staleness = 0
    """By how many steps the sampling weights are behind the trained ones; 0 is on-policy."""
    replaces_groups = False
    """Whether groups may be replaced (dynamic sampling); rewards are then normalised over the remaining groups."""

    @abstractmethod
    def groups(self, context: StepContext, slots: list[Slot], step: int, clock: Clock, metrics: StepMetrics) -> Groups:
        """Sample and score the groups of ``step``. Raises ``RewardError`` and ``UserError``."""


@dataclass(frozen=True)
class FinishedStep:
    """The data of a finished step for ``StepPart``. ``slots``: this controller's first slots, without replacements.
    ``seconds``: its wall time without waits for other controllers. ``metrics``: of all controllers."""

    step: int
    batch: Batch
    slots: Sequence[Slot]
    seconds: float
    metrics: Mapping[str, float]


class StepPart:
    """Base class of the optional features of a step. The loop and the checkpoint call every part of the recipe; a part
    overrides the methods it needs."""

    own = False
    """Whether each controller has its own tensors and saves them."""

    def end_step(self, context: StepContext, done: FinishedStep) -> dict[str, float]:
        """Called after each step; returns more metrics. All controllers call it together."""
        return {}

    def state_dict(self) -> PartState:
        return PartState({})

    def load_state_dict(self, numbers: JsonObject, saved: Saved, context: StepContext) -> None:
        """``Stateful.load_state_dict`` with the ``context`` of the run."""


@dataclass
class DeviceState:
    """What a device keeps between tasks."""

    at_once: dict[str, int] = field(default_factory=dict)
    """For the phases ``sample`` and ``decode``: the rows that fit into memory, once memory has run out."""
    phase: ExitStack = field(default_factory=ExitStack)
    """The sampling phase that this device has entered (``device_tasks.enter_sampling``)."""
    held: list[str] = field(default_factory=list)
    """Keys of the features that the controller sent to this process for this step."""
    borrowed: tuple[tuple[int, str], dict[str, Tensor]] | None = None
    """Of a device that trains, while it is lent to sampling: the weights to sample with, and their ``Policy.tag``."""
    save: Callable[[int], None] | None = None
    """Saves this device's shards; takes the number of finished steps. All ranks call it together."""


@dataclass(frozen=True)
class Compute:
    """The devices of a step."""

    device: torch.device
    """The device of this process."""
    devices: Devices
    """All devices of this controller: this process, or several."""
    local: DeviceState = field(default_factory=DeviceState)


@dataclass(frozen=True)
class Rollout:
    """How a step gets its samples."""

    strategy: RolloutStrategy
    """Synchronous, partial or asynchronous rollout, or dynamic sampling."""
    parts: Mapping[str, StepPart] = field(default_factory=dict)
    """The optional features that the recipe uses, by the names of their state in a checkpoint."""
    cost: Callable[[Prompt], float] | None = None
    """Predicted work of a prompt's group, which balances prompts over controllers; None divides them equally."""


@dataclass(frozen=True)
class StepContext:
    """Everything that a step uses; ``mmrl.app.build`` builds it once per process."""

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
    """The critic's weights and optimizer, if the objective has one."""

    @property
    def recomputes_old_log_probs(self) -> bool:
        """Pictures: whether the recorded log-probs are not exactly the old policy's and are recomputed before the
        updates: because older weights sampled, or code that rounds differently, or batches of a different shape
        (replaced groups, or steps before a group was pruned)."""
        strategy, recipe = self.rollout.strategy, self.recipe
        cut = recipe.midway is not None and recipe.midway.records_before(recipe.sampling)
        return strategy.staleness > 0 or recipe.replays_first or strategy.replaces_groups or cut

    def close(self) -> None:
        """Give back what the pipeline and the devices hold."""
        self.pipeline.close()
        self.compute.devices.close()

    @property
    def trained(self) -> dict[str, Policy]:
        """Every model with an optimizer, by the name of its state in a checkpoint."""
        return {"policy": self.policy} | ({} if self.critic is None else {"critic": self.critic})

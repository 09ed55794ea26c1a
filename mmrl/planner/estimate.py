"""Estimate the time per step on a GPU that this machine does not have: operations divided by a stated share of the
vendor's peak rate; for memory-bound work (tokens, the optimizer, judges), bytes divided by the bandwidth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from mmrl.algorithms.objective import Objective, prepared_by
from mmrl.config.replicas import of_engine
from mmrl.planner.operations import Work
from mmrl.planner.rates import CALIBRATED, UNCALIBRATED, Rates, seconds

if TYPE_CHECKING:
    from mmrl.config.schema import Recipe
    from mmrl.models.description import Description
    from mmrl.planner.counts import Counts
    from mmrl.planner.judge_work import Answering
    from mmrl.planner.memory import Measured

FUSED = 4
"""The elementwise operators that compiled code computes in one pass."""
_AT_ONCE = 256
"""The most rows that an engine decodes at once (vLLM's default)."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step by phase, for the controller with the most work. ``beside``: training runs at the same time as
    the other phases (disaggregated)."""

    seconds: dict[str, float]
    beside: bool = False
    spread: float = 1.0
    """The estimate is between its value divided and multiplied by this."""
    calibrated: bool = False
    basis: str = ""
    """What it rests on, in words."""

    @property
    def step(self) -> float:
        """Seconds of a whole step."""
        total, training = sum(self.seconds.values()), sum(self.seconds.get(name, 0.0) for name in _TRAINING)
        return max(training, total - training) if self.beside else total

    @property
    def interval(self) -> tuple[float, float]:
        """The least and the most seconds of a step."""
        return self.step / self.spread, self.step * self.spread


_TRAINING = ("prepare", "train", "optimizer")


@dataclass(frozen=True)
class Episodes:
    """What a run measured of an episode, in the mean: the ``seconds`` of its environment's calls, and the share of the
    tokens behind its prompt that were ``told``. ``run``: which one."""

    seconds: float
    told: float
    run: str


@dataclass(frozen=True)
class Step:
    """The work of a controller's devices: ``samplers`` of them, or of its engines, sample, ``models`` slices are
    computed at once, and the device with the largest judges reads ``judged`` bytes of weights."""

    recipe: Recipe
    counts: Counts
    measured: Measured
    samplers: int
    models: int
    judged: int
    answering: Sequence[tuple[Answering, float]] = ()
    """The judges whose operators are known, and how many of its batches each answers."""
    encoding: float = 0.0
    """Seconds of this machine's processor to encode a prompt, beside its operators."""


def estimated(
    step: Step, rates: Rates, description: Description, objective: Objective, episodes: Episodes | None = None
) -> Estimate | None:
    """The estimate by ``rates``; None if the work of a step is not known. ``episodes``: what a run measured of them."""
    bandwidth = rates.bandwidth
    c, o, recipe = step.counts, step.measured.operations, step.recipe
    if not o.train:
        return None

    def lasts(work: Work, times: float = 1.0) -> float:
        return times * seconds(work, rates)

    found = {"encode": lasts(o.encode, c.prompts) + c.prompts * step.encoding}
    if c.micro_batches and recipe.sampling.type == "text":
        found["sample"] = _tokens(step, description, rates, episodes)
        found["environment"] = _calls(step, episodes)
    elif c.micro_batches:
        width = recipe.train.width  # devices that draw a sample together
        turns = c.samples / c.batch if step.samplers == 1 else ceil(c.micro_batches * width / step.samplers)
        computed = c.sample_steps / (c.samples * recipe.denoising.taken) / width
        found["sample"] = lasts(policy(o.sample, recipe), turns * computed)
        found["decode"] = lasts(o.decode, turns * (1 + (c.begun + c.predicted) / c.samples))
    found["judge"] = step.judged / bandwidth
    found["judge"] += sum(n * one.seconds(lasts, rates.token) for one, n in step.answering)
    slices = c.optimizer_steps * ceil(c.slices / c.optimizer_steps / step.models) / recipe.train.width
    if recipe.sampling.type == "text" or recipe.placement.apart or recipe.replays_first or recipe.algorithm.attempts:
        times = slices * len(_prepared(objective, c.optimizer_steps))
        found["prepare"] = lasts(policy(o.forward, recipe), times)
    found["train"] = lasts(policy(o.train, recipe), slices)
    moved = (
        3 * step.measured.trained + 2 * step.measured.adam
    )  # weights, gradients and state are read; weights and state are written
    found["optimizer"] = c.optimizer_steps * max(moved / bandwidth, lasts(o.optimizer))
    return Estimate(
        {name: n for name, n in found.items() if n},
        recipe.placement.apart,
        CALIBRATED if rates.calibrated else UNCALIBRATED,
        rates.calibrated,
        basis(rates, recipe, episodes),
    )


def policy(work: Work, recipe: Recipe) -> Work:
    """The operators of the policy as they run: compiled, neighbours that are no products become one kernel."""
    if not recipe.performance.compile or recipe.sampling.type == "text":
        return work
    made = Work()
    for call, n in work.items():
        fused = not call.flops and call.kind != "view"
        made[call] += n / FUSED if fused else n  # type: ignore[assignment]  # a Counter holds any number
    return made


def _prepared(objective: Objective, updates: int) -> frozenset[str]:
    """The tensors that are recomputed before the first update, one forward each."""
    moves = updates > 1 and "log_probs" in objective.needs
    return prepared_by(objective) | (frozenset({"log_probs"}) if moves else frozenset())


def _calls(step: Step, episodes: Episodes | None) -> float:
    """Seconds of the environment's calls, with as many at the same time as may be, if nothing is sampled beside them;
    0 where no run has measured them."""
    section, mine = step.recipe.environment, ceil(step.counts.samples / step.samplers)
    if section is None or episodes is None:
        return 0.0
    together = min(step.counts.batch, mine)
    return mine / together * episodes.seconds * max(1.0, together / section.workers)


def _tokens(step: Step, description: Description, rates: Rates, episodes: Episodes | None) -> float:
    """Seconds of sampling a step's responses, of which one of each batch has the greatest length: a batch ends with its
    longest. Of the pipeline's own sampling the operators are counted; an engine takes for every token the operations of
    the active rows, or reading the weights and the rows' caches, whichever takes longer. Its devices divide both. What
    an environment tells is not written token by token: an engine computes it as a prompt, with what it kept of the
    turns before, and the pipeline's own sampling begins each turn with all that is before it."""
    c, o, recipe = step.counts, step.measured.operations, step.recipe
    mine, new = ceil(c.samples / step.samplers), recipe.written_tokens
    if episodes is not None:
        new = max(1, min(new, round(recipe.response_tokens * (1 - episodes.told))))
    each = seconds(o.forward, rates) / (c.slice_rows * c.row_tokens)
    if o.token:
        whole = seconds(o.sample, rates) + max(0, new - 2) * seconds(o.token, rates) + new * rates.token
        further = 0 if recipe.environment is None else recipe.environment.max_turns - 1
        again = mine * further * (c.row_tokens - recipe.response_tokens / 2) * each
        return mine / min(c.batch, mine) * whole + again
    rows = min(_AT_ONCE, mine)
    module = next(one.module for one in description.components if one.role == "policy")
    width = {"float32": 4}.get(recipe.model.dtype, 2)
    weights = width * sum(p.numel() for p in module.parameters())
    read = weights + rows * width * description.cache_numbers(c.row_tokens - new / 2)
    alone = mine * each * (c.row_tokens - new) + ceil(mine / rows) * new * max(rows * each, read / rates.bandwidth)
    return alone / of_engine(recipe)


def basis(rates: Rates, recipe: Recipe, episodes: Episodes | None) -> str:
    """What an estimate rests on; it is printed with it."""
    known = calls = ""
    if episodes is not None:
        known = f"The calls of the environment and the tokens it tells are those of {episodes.run}. "
    elif recipe.environment is not None:
        calls = "calls of the environment (--trace RUN has them), "
    how = f"by what mmrl doctor --calibrate measured on {rates.name}" if rates.calibrated else f"by {rates.name}"
    return (
        f"Every operator is counted: its operations, its bytes and its start, {how}. Responses have their greatest "
        f"length. {known}Not counted: loading, evaluation, {calls}rewards without a known time, traffic between GPUs."
    )

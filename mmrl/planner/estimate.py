"""Estimate the time per step on a GPU that this machine does not have: operations divided by a stated share of the
vendor's peak rate; for memory-bound work (tokens, the optimizer, judges), bytes divided by the bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from mmrl.algorithms.objective import Objective, prepared_by
from mmrl.config.replicas import of_engine

if TYPE_CHECKING:
    from mmrl.config.schema import Recipe
    from mmrl.pipelines.description import Description
    from mmrl.planner.counts import Counts
    from mmrl.planner.gpus import Gpu
    from mmrl.planner.operations import Operations

OF_PEAK = 0.4
"""The share of a GPU's peak operations that sampling and training reach."""
OF_BANDWIDTH = 0.6
"""The share of a GPU's memory bandwidth that is reached."""
_AT_ONCE = 256
"""The most rows that an engine decodes at once (vLLM's default)."""


@dataclass(frozen=True)
class Estimate:
    """Seconds of a step by phase, for the controller with the most work. ``beside``: training runs at the same time as
    the other phases (disaggregated)."""

    seconds: dict[str, float]
    beside: bool = False

    @property
    def step(self) -> float:
        """Seconds of a whole step."""
        total, training = sum(self.seconds.values()), sum(self.seconds.get(name, 0.0) for name in _TRAINING)
        return max(training, total - training) if self.beside else total


_TRAINING = ("prepare", "train", "optimizer")


@dataclass(frozen=True)
class Step:
    """The work of a controller's devices: ``samplers`` of them, or of its engines, sample, ``models`` slices are
    computed at once, and the device with the largest judges reads ``judged`` bytes of weights."""

    recipe: Recipe
    counts: Counts
    operations: Operations
    adam: int
    """Bytes of the optimizer's state."""
    trained: int
    """Bytes of the trained weights."""
    samplers: int
    models: int
    judged: int


def estimated(step: Step, gpu: Gpu, description: Description, objective: Objective) -> Estimate | None:
    """The estimate for ``gpu``; None if the work of a step is not known."""
    c, o, recipe = step.counts, step.operations, step.recipe
    if not o.train:
        return None
    rate, bandwidth = OF_PEAK * gpu.rate(recipe.model.dtype), OF_BANDWIDTH * 1e9 * gpu.bandwidth
    found = {"encode": c.prompts * o.encode / rate}
    if c.micro_batches and recipe.sampling.type == "text":
        found["sample"] = _tokens(step, description, rate, bandwidth)
    elif c.micro_batches:
        turns = c.samples / c.batch if step.samplers == 1 else ceil(c.micro_batches / step.samplers)
        computed = c.sample_steps / (c.samples * recipe.denoising.steps)
        found["sample"] = turns * computed * o.sample / rate
        found["decode"] = (
            turns * (1 + c.begun / c.samples) * o.decode / (OF_PEAK * gpu.rate("float32"))
        )  # a VAE stays float32
    found["judge"] = step.judged / bandwidth
    slices = c.optimizer_steps * ceil(c.slices / c.optimizer_steps / step.models)
    if recipe.sampling.type == "text" or recipe.placement.apart or recipe.replays_first or recipe.algorithm.attempts:
        found["prepare"] = slices * len(_prepared(objective, c.optimizer_steps)) * o.forward / recipe.train.width / rate
    found["train"] = slices * o.train / recipe.train.width / rate
    moved = 3 * step.trained + 2 * step.adam  # weights, gradients and state are read; weights and state are written
    found["optimizer"] = c.optimizer_steps * moved / bandwidth
    return Estimate({name: seconds for name, seconds in found.items() if seconds}, recipe.placement.apart)


def _prepared(objective: Objective, updates: int) -> frozenset[str]:
    """The tensors that are recomputed before the first update, one forward each."""
    moves = updates > 1 and "log_probs" in objective.needs
    return prepared_by(objective) | (frozenset({"log_probs"}) if moves else frozenset())


def _tokens(step: Step, description: Description, rate: float, bandwidth: float) -> float:
    """Seconds of sampling a step's responses, all of the greatest length: the prompts' forwards, then for every token
    the operations of the active rows, or reading the weights and the rows' caches, whichever takes longer. The devices
    of an engine divide both."""
    c, recipe = step.counts, step.recipe
    own, devices = recipe.rollout.engine == "transformers", of_engine(recipe)
    mine = ceil(c.samples / step.samplers)
    rows, new = min(c.batch if own else _AT_ONCE, mine), recipe.decoding.max_new_tokens
    each = step.operations.forward / (c.slice_rows * c.row_tokens)
    policy = next(one.module for one in description.components if one.role == "policy")
    width = {"float32": 4}.get(recipe.model.dtype, 2)
    weights = sum(p.numel() * (p.element_size() if own else width) for p in policy.parameters())
    read = weights + rows * width * description.cache_numbers(c.row_tokens - new / 2)
    alone = mine * each * (c.row_tokens - new) / rate + ceil(mine / rows) * new * max(
        rows * each / rate, read / bandwidth
    )
    return alone / devices


def assumptions(gpu: Gpu, dtype: str) -> str:
    """The assumptions of an estimate; they are printed with it."""
    return (
        f"Operations at {OF_PEAK:.0%} of {gpu.rate(dtype) / 1e12:,.0f} TFLOP/s ({dtype}; {gpu.source}); tokens, "
        f"optimizer and judges at {OF_BANDWIDTH:.0%} of {gpu.bandwidth:,.0f} GB/s where that takes longer. A judge is "
        "counted as reading its weights once per call, which is a lower limit. Not counted: loading, evaluation, "
        "rewards on the host, traffic between GPUs, and the time of Python and of starting kernels, which dominates "
        "with a small model."
    )

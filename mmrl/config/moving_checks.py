"""Find settings with which ``train.balance`` has no effect, or prompts cannot move between controllers."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from mmrl.config.schema import Recipe

_EDIT = "set train.balance to predicted"


def of_moving(recipe: Recipe) -> Iterator[str]:
    """Contradictions with ``train.balance``; a single controller ignores it."""
    algorithm, placement = recipe.algorithm, recipe.placement
    if recipe.train.balance == "measured":
        if recipe.makes != "text":
            yield f"train.balance: only the work of texts is measured; {_EDIT}"
        elif placement.apart or recipe.rollout.partial is not None:
            yield f"train.balance: a prompt begins in a step before, when its work is not known; {_EDIT}"
    if recipe.train.balance != "moving":
        return
    if algorithm.kind in ("pathwise", "offline"):
        yield f"train.balance: {algorithm.type} samples nothing before its update, so no prompt can move; {_EDIT}"
        return
    if placement.apart:
        yield (
            "train.balance: with placement disaggregated devices sample for later steps, and prompts that move between "
            f"controllers are of the step in training; {_EDIT}, or placement to adaptive"
        )
    if recipe.rollout.partial is not None:
        yield (
            "train.balance: with rollout.partial a response goes on in a later step where it began, so its prompt "
            f"cannot move; {_EDIT}, or remove rollout.partial"
        )
    if not recipe.rollout.in_process:
        yield (
            f"train.balance: {recipe.rollout.engine_name} begins all prompts of a step at once, so none is left to "
            f"move; {_EDIT}, or rollout.engine to transformers"
        )
    if recipe.midway is not None:
        yield (
            "train.balance: with midway all samples of a step are begun before any is finished, so no prompt is left "
            f"to move; {_EDIT}, or remove midway"
        )
    yield from _portions(recipe)


def slots_at_once(recipe: Recipe) -> int:
    """The prompts that move together: the fewest whose samples fill whole micro-batches of sampling."""
    return recipe.sampled_at_once // gcd(recipe.sampled_at_once, recipe.train.group_size)


def _portions(recipe: Recipe) -> Iterator[str]:
    """Check that a controller has more prompts than those that it begins with."""
    together, share = slots_at_once(recipe), -(-recipe.train.prompts_per_step // recipe.controllers)
    if recipe.controllers > 1 and share <= together:
        key = "sampling.batch_size" if recipe.sampling.batch_size else "train.micro_batch_size"
        yield (
            f"train.balance: a controller has {share} of {recipe.train.prompts_per_step} prompts, and begins "
            f"{together} at once (whole micro-batches of {key}), so none is left to move; lower {key}, raise "
            f"train.prompts_per_step, or {_EDIT}"
        )

"""Choose ``train.steps_per_forward: auto``: the number of recorded denoising steps of a micro-batch per forward.

Stacking steps saves time if a forward is too small to keep the device busy, and costs memory. So the number is limited
by the rows of a forward and by the free memory. The gradient does not depend on it.
"""

from __future__ import annotations

from dataclasses import replace

from mmrl.config.left_to_plan import with_values
from mmrl.planner.plan_data import PhaseMemory, Plan

ROWS = 16
"""The most rows of a stacked forward, guidance's included: more gained next to nothing (docs/speed.md)."""
SHARE = 0.8
"""The largest share of a device's memory for an update with stacked steps: the plan is an estimate."""


def settle(made: Plan) -> None:
    """Choose the number for a plan whose recipe has ``auto`` (planned with one step per forward); count again, and add
    a note."""
    if made.recipe.train.steps_per_forward != "auto":
        return
    n, why = _chosen(made)
    made.recipe = with_values(made.recipe, {"train.steps_per_forward": n})
    made.notes.append(f"train.steps_per_forward: auto is {n}, {why}")
    c, m = made.counts, made.measured
    if c is None or m is None or n == 1:
        return
    made.counts = replace(c, slices=c.slices // c.passes * -(-c.entries // n), at_once=n)
    work = replace(m.operations, train=m.operations.train.times(n), forward=m.operations.forward.times(n))
    made.measured = replace(m, train=m.train + (n - 1) * m.train_step, operations=work)
    for i, phase in enumerate(made.phases):
        if phase.name == "train":
            made.phases[i] = replace(phase, parts=phase.parts | {"working memory": made.measured.train})


def _chosen(made: Plan) -> tuple[int, str]:
    """The number and the reason for it."""
    c, m, recipe = made.counts, made.measured, made.recipe
    if c is None or m is None or made.peak is None:
        return 1, "because the memory of a step is not known"
    if c.entries == 1:
        return 1, "because one step of a sample trains"
    rows = c.slice_rows * (2 if m.guided_loss else 1)
    pays, fit = max(1, ROWS // rows), 1 + max(0, _room(made, made.peak)) // max(1, m.train_step)
    n = even(c.entries, min(pays, fit))
    if pays == 1:
        return 1, f"because a forward of one step has {rows} rows, and more than {ROWS} gain next to nothing"
    if recipe.model.dtype != "float32":
        n = c.batch // c.slice_rows
        if n < 2 or n * c.slice_rows != c.batch or c.entries % n or n > min(pays, fit):
            return 1, (
                f"because {recipe.model.dtype} rounds differently if the batch is not sampling's (of {c.batch}), and "
                "first ratios might not be 1"
            )
    elif n < even(c.entries, pays):
        limit = f"{SHARE:.0%} of the device's"
        if made.device_memory is None:
            limit = "the other phases do, and the device's memory is not known"
        return n, f"because {even(c.entries, pays)} would take more memory than {limit}"
    return n, f"{n * rows} rows in a forward ({rows} of each step, {ROWS} at most)"


def even(count: int, most: int) -> int:
    """At most ``most`` at once, so that all parts of ``count`` are equal or nearly."""
    return -(-count // -(-count // most))


def _room(made: Plan, peak: PhaseMemory) -> int:
    """Free bytes for the update beyond its need with one denoising step per forward."""
    most = peak.total  # a different phase may need it anyway
    if made.device_memory is not None:
        recipe = made.recipe
        here = made.device == "cpu" and recipe.ray == "local"  # processes that share the memory
        n = recipe.controllers * recipe.devices_per_controller if here else 1
        most = max(most, int(SHARE * made.device_memory) // n)
    return most - next(phase.total for phase in made.phases if phase.name == "train")

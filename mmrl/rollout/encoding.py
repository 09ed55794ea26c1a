"""Have the features of a step's prompts in the store, and replace prompts that cannot be used."""

from __future__ import annotations

from collections.abc import Callable

from mmrl.core.errors import BadPromptError
from mmrl.core.out_of_memory import in_phase
from mmrl.core.trajectory import SampleId, Slot
from mmrl.rewards.scoring import Failure
from mmrl.step.step_context import StepContext

MOST_REPLACED = 4
"""A step fails after this many unusable prompts per slot: the data set does not fit the recipe."""


def encode(
    context: StepContext,
    slots: list[Slot],
    other: Callable[[Slot, int], Slot] | None = None,
    most: int | None = None,
) -> tuple[list[Slot], list[str], list[Failure]]:
    """Encode the prompts. An unusable prompt is recorded as a failure and replaced.

    ``other``: returns the slot with the prompt of attempt ``n``; None takes it from the training prompts. Returns the
    slots, the keys of their features, and the failures. Raises ``UserError`` after too many, ``most`` or
    ``MOST_REPLACED`` for each slot.
    """
    most = MOST_REPLACED * len(slots) if most is None else most
    bad: list[Failure] = []
    other = other or (lambda slot, attempt: context.controller.replacement(slot, attempt, context.prompts))
    while True:
        try:
            with in_phase("encode"):
                return slots, context.pipeline.encode(slots), bad
        except BadPromptError as error:
            places = [n for n, slot in enumerate(slots) if slot.prompt.id == error.prompt]
            if not places or len(bad) >= most:
                raise
            for n in places:
                slot = slots[n]
                name = SampleId(slot.step, slot.index, slot.attempt, 0)
                bad.append(Failure(name, slot.prompt.text, "prompt", error.reason))
                last = max(s.attempt for s in slots if (s.step, s.index) == (slot.step, slot.index))
                slots = [*slots[:n], other(slot, last + 1), *slots[n + 1 :]]

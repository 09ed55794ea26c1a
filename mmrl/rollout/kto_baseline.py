"""Pair each prompt with the response of a different prompt, across all controllers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mmrl.core.trajectory import Prompt, Slot
from mmrl.models.text.given import Responses
from mmrl.step.step_context import StepContext

Place = tuple[int, int]
"""The index and the attempt of a slot, which determine its prompt on every controller."""


def mismatched(context: StepContext, slots: Sequence[Slot], prompt_at: Callable[[Place], Prompt]) -> list[Slot]:
    """``slots``, each with the response of the previous slot of all controllers' slots; the first has the response of
    the last. Only places are exchanged. All controllers call it together."""
    given = context.pipeline.pairs
    if not isinstance(given, Responses):
        raise TypeError(f"{type(given).__name__} has no responses that could be exchanged")
    everyone = sorted(
        place for own in context.controller.gather([(s.index, s.attempt) for s in slots]) for place in own
    )
    before = {place: everyone[n - 1] for n, place in enumerate(everyone)}
    return [given.beside(slot, prompt_at(before[slot.index, slot.attempt])) for slot in slots]


def prompt_of_step(context: StepContext, step: int) -> Callable[[Place], Prompt]:
    """A function that returns the prompt of training step ``step`` at a place."""
    per_step = context.recipe.train.prompts_per_step

    def prompt_at(place: Place) -> Prompt:
        index, attempt = place
        (slot,) = context.controller.slots_at([index], step, context.prompts, per_step)
        return context.controller.replacement(slot, attempt, context.prompts).prompt if attempt else slot.prompt

    return prompt_at

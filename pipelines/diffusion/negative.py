"""Negative prompts: what classifier-free guidance moves away from, the recipe's or a record's own."""

from __future__ import annotations

from collections.abc import Sequence

from mmrl.config.sampling import Sampling
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt, Slot

from .adapter import Adapter
from .pictures import digest
from .sizes import Sizes


class Negatives:
    """Final class. The negative prompts of a run; ``used``: whether sampling or the loss is guided by two predictions.

    Raises ``UserError`` where the recipe gives one to a model of one prediction.
    """

    def __init__(self, adapter: Adapter, sampling: Sampling, *, used: bool) -> None:
        self.adapter, self.sampling, self.used = adapter, sampling, used
        self.sizes = Sizes(adapter)
        if self.sampling.negative_prompt is not None and not adapter.combines:
            raise UserError(f"sampling.negative_prompt: {self._one_prediction()}; remove sampling.negative_prompt")

    def given(self, prompt: Prompt) -> str | None:
        """The negative prompt for ``prompt``, its own before the recipe's; None where nobody gives one."""
        return self.sampling.negative_prompt if prompt.negative_prompt is None else prompt.negative_prompt

    def key(self, prompt: Prompt) -> str:
        """Names the features that guidance moves away from. The text of no prompt has the character 0."""
        given = self.given(prompt)
        name = self.adapter.negative if given is None else f"\0negative {given}"
        if self.adapter.sees:
            name = f"\0beside {digest(prompt)} {name}"
        return self.sizes.key(name, prompt)

    def needed(self, slots: Sequence[Slot]) -> dict[str, Prompt]:
        """A prompt of these for each negative prompt, by its key; nothing without guidance. Raises ``UserError`` for a
        prompt whose negative prompt would not be used."""
        for slot in slots:
            if why := self.unused(slot.prompt):
                raise UserError(why)
        if not self.used:
            return {}
        return {self.key(slot.prompt): slot.prompt for slot in slots}

    def unused(self, prompt: Prompt) -> str | None:
        """Why the negative prompt that ``prompt`` carries would not be used, with the edit; None where it is."""
        if prompt.negative_prompt is None or self.used:
            return None
        why = f"data: the prompt {prompt.id} has a negative_prompt, and "
        edit = "take negative_prompt out of the records"
        if not self.adapter.combines:
            return f"{why}{self._one_prediction()}; {edit}"
        scale = f"sampling.guidance_scale is {self.sampling.guidance_scale:g}"
        return f"{why}{scale}, which samples without guidance; set it above 1 (4.5, say), or {edit}"

    def _one_prediction(self) -> str:
        return f"this {self.adapter.family} makes one prediction, so that guidance moves away from nothing"

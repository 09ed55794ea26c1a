"""Predict the work of a run's prompts before they are loaded, and learn from the measured work.

Every controller holds the same state, for all learn the same numbers in the same order
(``mmrl.controller.workload_balance``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from mmrl.checkpoint.reader import PartState, Saved
from mmrl.config.schema import Recipe
from mmrl.controller.workload_balance import TERMS, Lengths, Size, Workload, residual, unevenness
from mmrl.json_types import JsonObject, as_object
from mmrl.media import Media
from mmrl.training.step_context import FinishedStep, StepContext, StepPart
from mmrl.trajectory import Prompt, Trajectory

CHARACTERS = 4.0
"""Of a token. Estimates of tokens need not be right: their price per second is measured."""
PIXELS = 28 * 28
"""Of a token of a picture; of a clip two frames share one."""
_PER_BYTE = {"image": 4.0, "video": 30.0}
"""Pixels of an encoded byte, about, where the data set does not say how large a medium is."""
_UNKNOWN = 512 * 512


class _Measured(TypedDict):
    """What a controller says of its step to all others."""

    seconds: float
    cost: float
    predicted: float
    terms: list[float]
    groups: list[tuple[list[int], str, float, float]]
    coefficients: Sequence[float] | None


class Balance(StepPart):
    """Final class. Text: how much work each prompt's group is."""

    def __init__(self, recipe: Recipe) -> None:
        self.lengths = Lengths(recipe.decoding.max_new_tokens)
        self.workload = Workload()
        """What was measured: costs of ``train.balance: measured``, and seconds of the metrics."""
        self._costs = self.workload if recipe.train.balance == "measured" else Workload()
        self._rows = recipe.train.group_size
        self._given = [*recipe.algorithm.given_texts.values()]

    def cost(self, prompt: Prompt) -> float:
        """Of the group of ``prompt``, in a unit of its own; ``train.balance: measured``: in seconds, once known.

        In its own unit it depends on the recipe and the responses so far: equal runs divide their prompts equally.
        """
        return self._rows * self._costs.cost(self._expected(prompt).terms)

    def seconds(self, prompt: Prompt) -> float:
        """Predicted for the group of ``prompt``, once something was measured."""
        return self._rows * self.workload.cost(self._expected(prompt).terms)

    def end_step(self, context: StepContext, done: FinishedStep) -> dict[str, float]:
        """Take in a step of all controllers; returns its metrics, where there are several."""
        controller, known = context.controller, self.workload.calibrated
        mine: _Measured = {
            "seconds": done.seconds,
            "cost": sum(self.cost(slot.prompt) for slot in done.slots),
            "predicted": sum(self.seconds(slot.prompt) for slot in done.slots),
            "terms": self._terms(done.batch.micro_batches),
            "groups": [] if self._given else self._groups(done.batch.micro_batches),
            "coefficients": self.workload.fitted() if controller.leads and controller.size > 1 else None,
        }
        everyone = controller.gather(mine)
        self.workload.adopt(everyone[0]["coefficients"])
        self.workload.learn((one["terms"], one["seconds"]) for one in everyone)
        for _, prompt, length, response in sorted(group for one in everyone for group in one["groups"]):
            self.lengths.learn(prompt, length, response)
        if controller.size == 1:
            return {}
        predicted, measured = ([one[name] for one in everyone] for name in ("predicted", "seconds"))
        error = {"balance/residual": residual(predicted, measured)} if known else {}
        divided = unevenness([one["cost"] for one in everyone])
        return {"balance/load": unevenness(measured), "balance/load_predicted": divided, **error}

    def state_dict(self) -> PartState:
        return PartState({"lengths": self.lengths.state(), "workload": self.workload.state()})

    def load_state_dict(self, numbers: JsonObject, saved: Saved, context: StepContext) -> None:
        self.lengths.load_state(as_object(numbers["lengths"]))
        self.workload.load_state(as_object(numbers["workload"]))

    def _expected(self, prompt: Prompt) -> Size:
        size = self._size(prompt)
        return size if self._given else self._size(prompt, self.lengths.expect(prompt.id, size.prompt))

    def _size(self, prompt: Prompt, response: float = 0.0) -> Size:
        text = (len(prompt.conversation) + len(prompt.system or "")) / CHARACTERS
        image = sum(pixels(m) / PIXELS for m in prompt.media if m.kind == "image")
        frames = sum(pixels(m) / PIXELS / 2 for m in prompt.media if m.kind == "video")
        if times := len(self._given):  # a row is all its texts, each behind the prompt
            texts = sum(len(str(prompt.meta.get(name, ""))) for name in self._given) / CHARACTERS
            return Size(times * text + texts, times * image, times * frames)
        return Size(text, image, frames, response)

    def _terms(self, micro_batches: Sequence[Trajectory]) -> list[float]:
        """Summed over all rows, with the responses that they got."""
        total = [0.0] * len(TERMS)
        for trajectory in micro_batches:
            for slot, response in zip(trajectory.slots, _responses(trajectory), strict=True):
                terms = self._size(slot.prompt, response).terms
                total = [a + b for a, b in zip(total, terms, strict=True)]
        return total

    def _groups(self, micro_batches: Sequence[Trajectory]) -> list[tuple[list[int], str, float, float]]:
        """Of each group its place, its prompt's id and length, and the mean length of its responses."""
        found: dict[tuple[int, int, int], tuple[Prompt, list[int]]] = {}
        for trajectory in micro_batches:
            for slot, response in zip(trajectory.slots, _responses(trajectory), strict=True):
                place = (slot.step, slot.index, slot.attempt)
                found.setdefault(place, (slot.prompt, []))[1].append(response)
        return [
            ([*place], prompt.id, self._size(prompt).prompt, sum(lengths) / len(lengths))
            for place, (prompt, lengths) in found.items()
        ]


def pixels(medium: Media) -> float:
    """Of a picture, or of all frames shown of a clip: what the data set's index says, else a guess. Decodes nothing."""
    if medium.pixels is not None:
        return medium.pixels
    size = len(medium.data) if medium.data is not None else medium.size
    return _UNKNOWN if size is None else size * _PER_BYTE[medium.kind]


def _responses(trajectory: Trajectory) -> list[int]:
    """Tokens of each row's response; 0 where nothing was sampled."""
    return [0] * len(trajectory) if trajectory.mask is None else trajectory.responses

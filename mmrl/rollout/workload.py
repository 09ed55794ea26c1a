"""Predict the work of a run's prompts before they are loaded, and learn from the measured work.

Every controller has the same state, because all learn the same numbers in the same order
(``mmrl.controller.workload_balance``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypedDict

from mmrl.config.schema import Recipe
from mmrl.controller.workload_balance import TERMS, Lengths, Size, Workload, residual, unevenness
from mmrl.core.checkpoint_reader import PartState, Saved
from mmrl.core.json_types import JsonObject, as_object
from mmrl.core.media import Media
from mmrl.core.trajectory import Prompt, Rows, TextRows
from mmrl.step.step_context import FinishedStep, StepContext, StepPart

CHARACTERS = 4.0
"""Characters per token. The estimate need not be right, because the seconds per token are measured."""
PIXELS = 28 * 28
"""Pixels per token of a picture; in a clip two frames share a token."""
_PER_BYTE = {"image": 4.0, "video": 30.0}
"""Approximate pixels per encoded byte, if the data set does not give the size of a medium."""
_UNKNOWN = 512 * 512


class _Measured(TypedDict):
    """The measurements of a step that a controller sends to all others."""

    seconds: float
    cost: float
    predicted: float
    terms: list[float]
    groups: list[tuple[list[int], str, float, float]]
    coefficients: Sequence[float] | None


class Balance(StepPart):
    """Final class. Text: predicts the work of each prompt's group."""

    def __init__(self, recipe: Recipe) -> None:
        self.lengths = Lengths(recipe.response_tokens)
        self.workload = Workload()
        """Fitted to measurements: the costs of ``train.balance: measured``, and the seconds in the metrics."""
        self._costs = self.workload if recipe.train.balance == "measured" else Workload()
        self._rows = recipe.train.group_size
        self._given = [*recipe.algorithm.given_texts.values()]

    def cost(self, prompt: Prompt) -> float:
        """The predicted cost of the group of ``prompt``, in arbitrary units; with ``train.balance: measured``, in
        seconds after the first measurement.

        In arbitrary units it depends only on the recipe and earlier responses, so equal runs divide prompts equally.
        """
        return self._rows * self._costs.cost(self._expected(prompt).terms)

    def seconds(self, prompt: Prompt) -> float:
        """The predicted seconds of the group of ``prompt``; needs a measurement."""
        return self._rows * self.workload.cost(self._expected(prompt).terms)

    def end_step(self, context: StepContext, done: FinishedStep) -> dict[str, float]:
        """Learn from a step of all controllers; returns its metrics if there are several."""
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
        if times := len(self._given):  # a row has all its texts, each after the prompt
            texts = sum(len(str(prompt.meta.get(name, ""))) for name in self._given) / CHARACTERS
            return Size(times * text + texts, times * image, times * frames)
        return Size(text, image, frames, response)

    def _terms(self, micro_batches: Sequence[Rows]) -> list[float]:
        """The terms summed over all rows, with their sampled responses."""
        total = [0.0] * len(TERMS)
        for rows in micro_batches:
            for slot, response in zip(rows.slots, _responses(rows), strict=True):
                terms = self._size(slot.prompt, response).terms
                total = [a + b for a, b in zip(total, terms, strict=True)]
        return total

    def _groups(self, micro_batches: Sequence[Rows]) -> list[tuple[list[int], str, float, float]]:
        """For each group its place, its prompt's id and length, and the mean length of its responses."""
        found: dict[tuple[int, int, int], tuple[Prompt, list[int]]] = {}
        for rows in micro_batches:
            for slot, response in zip(rows.slots, _responses(rows), strict=True):
                place = (slot.step, slot.index, slot.attempt)
                found.setdefault(place, (slot.prompt, []))[1].append(response)
        return [
            ([*place], prompt.id, self._size(prompt).prompt, sum(lengths) / len(lengths))
            for place, (prompt, lengths) in found.items()
        ]


def pixels(medium: Media) -> float:
    """Pixels of a picture, or of all sampled frames of a clip: from the data set's index, else a guess. Decodes
    nothing."""
    if medium.pixels is not None:
        return medium.pixels
    size = len(medium.data) if medium.data is not None else medium.size
    return _UNKNOWN if size is None else size * _PER_BYTE[medium.kind]


def _responses(rows: Rows) -> list[int]:
    """Tokens of each row's response; 0 without sampling."""
    return rows.responses if isinstance(rows, TextRows) else [0] * len(rows)

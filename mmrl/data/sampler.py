"""Samplers of prompts: a class of a user's own says which prompts each step takes (``data.sampler``).

Every controller has a sampler of its own, and all must choose the same prompts. A choice may therefore depend only on
what all of them have: the prompts, the run's seed, the number of the step, and what ``learn`` was told. ``learn`` gets
the groups of all controllers in one order. Clocks, ranks, files that change and the random state of the process are
not such things; draw from ``random.Random(f"{seed}|{step}")``. Controllers compare their choices after each step.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mmrl.config.data import Sampler
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json
from mmrl.core.plugins.loading import LoadError, load_from_file
from mmrl.core.plugins.user_code import blaming, defined_at, option_problems
from mmrl.core.trajectory import Prompt
from mmrl.data.fields import digest_of
from mmrl.data.mixture import Mixture
from mmrl.data.records import Records

T = TypeVar("T")
_KEY = "data.sampler"


@dataclass(frozen=True)
class GroupResult:
    """What became of a prompt in a step: its ``index``, and the rewards of its group by label, as their authors
    returned them; nan for a sample without a score. ``score``: their weighted sum, mean over the samples that have
    one; nan where none has."""

    index: int
    rewards: Mapping[str, Sequence[float]]
    score: float


class PromptSampler:
    """Base of samplers, built as ``Class(prompts, seed, **options)``. ``choose`` must be written, the rest may be."""

    def __init__(self, prompts: Sequence[Prompt], seed: int) -> None:
        self.prompts, self.seed = prompts, seed

    def choose(self, step: int, n: int) -> Sequence[int]:
        """The indices of the ``n`` prompts of ``step``; called once for a step, in order."""
        raise NotImplementedError

    def replace(self, number: int) -> int:
        """The index of a prompt by a random ``number``, for the place of one that cannot be used."""
        return self.prompts.draw(number) if isinstance(self.prompts, Mixture) else number % len(self.prompts)

    def learn(self, step: int, groups: Sequence[GroupResult]) -> Mapping[str, float] | None:
        """What the groups of ``step`` on all controllers got; of an algorithm that samples no groups, none. May return
        metrics, which are called ``sampler/<name>``."""
        return None

    def state_dict(self) -> Mapping[str, Json]:
        """What a checkpoint keeps: JSON values."""
        return {}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Go on from what ``state_dict`` gave."""


class Chosen(Records):
    """``prompts`` in the order of a sampler; ``per_step`` of them make a step. Raises ``UserError`` from the sampler's
    mistakes."""

    def __init__(self, prompts: Sequence[Prompt], settings: Sampler, seed: int, per_step: int) -> None:
        self.prompts, self.per_step = prompts, per_step
        self._settings = settings
        super().__init__(len(prompts), prompts.__getitem__, getattr(prompts, "bad", ()), getattr(prompts, "seen", 0))
        found = find(settings)
        self.sampler: PromptSampler = self.asked(lambda: found(prompts, seed, **settings.options))
        self._step, self._indices = -1, list[int]()

    def place(self, seed: int, number: int) -> int:
        """The index of the prompt at place ``number`` of training; steps are asked for in order."""
        step, at = divmod(number, self.per_step)
        if step != self._step:
            self._indices = self._checked(self.asked(lambda: list(self.sampler.choose(step, self.per_step))), step)
            self._step = step
        return self._indices[at]

    def draw(self, number: int) -> int:
        return self._checked([self.asked(lambda: self.sampler.replace(number))], self._step, 1)[0]

    @property
    def digest(self) -> str:
        """A digest of the prompts that were chosen last, for controllers to compare."""
        return digest_of(json.dumps(self._indices))

    def state(self) -> Mapping[str, Json]:
        """The sampler's state. Raises ``UserError`` where it is no JSON."""
        state = self.asked(self.sampler.state_dict)
        try:
            json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{_KEY}: what state_dict of {self._settings.name} returned is no JSON ({error}); return lists, texts "
                "and numbers"
            ) from error
        return state

    def asked(self, ask: Callable[[], T]) -> T:
        """What ``ask``, a call of the sampler, returns."""
        with blaming(f"{_KEY}: {self._settings.name}", self._settings.name.rpartition(":")[0]):
            return ask()

    def _checked(self, indices: Sequence[int], step: int, n: int | None = None) -> list[int]:
        wanted = n or self.per_step
        wrong = [i for i in indices if isinstance(i, bool) or not hasattr(i, "__index__") or not 0 <= i < len(self)]
        if len(indices) != wanted or wrong:
            said = f"{wrong[0]!r}, which is no index" if wrong else f"{len(indices)} indices"
            raise UserError(
                f"{_KEY}: {self._settings.name} chose {said} for step {step + 1}; give {wanted} from 0 to "
                f"{len(self) - 1}"
            )
        return [int(i) for i in indices]


def find(settings: Sampler) -> type[PromptSampler]:
    """The class that the recipe names, fit to be built. Raises ``UserError``."""
    name = settings.name
    file = name.rpartition(":")[0]
    try:
        with blaming(f"{_KEY}: importing {name}", file):
            found = load_from_file(name)
    except LoadError as error:
        raise UserError(f"{_KEY}: {error}") from None
    if not (inspect.isclass(found) and issubclass(found, PromptSampler)):
        raise UserError(
            f"{_KEY}: {name} is no PromptSampler; write class {name.rpartition(':')[2]}(PromptSampler), with "
            "from mmrl.data.sampler import PromptSampler"
        )
    first = list(inspect.signature(found).parameters)[:2]
    if wrong := option_problems(found.__name__, found, settings.options, {*first}):
        place = defined_at(found, file, name)
        raise UserError("\n".join(f"{_KEY}: {place}: {problem}" for problem in wrong))
    return found


def score_of(rewards: Mapping[str, Sequence[float]], weights: Mapping[str, float]) -> float:
    """The weighted sum of ``rewards``, mean over the samples that have all of them."""
    columns = [(weights[label], values) for label, values in rewards.items() if weights.get(label)]
    rows = list(zip(*(values for _, values in columns), strict=True))
    totals = [sum(w * v for (w, _), v in zip(columns, row, strict=True)) for row in rows]
    finite = [total for total in totals if math.isfinite(total)]
    return math.fsum(finite) / len(finite) if finite else math.nan

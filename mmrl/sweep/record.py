"""The file sweep.json: what is tried, and what each trial has reached in each round."""

from __future__ import annotations

import json
import shlex
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from mmrl.errors import UserError
from mmrl.files import write_atomic
from mmrl.json_types import JsonObject
from mmrl.stored import Number, Text, read_as

NAME = "sweep.json"


_Place = Annotated[int, Field(ge=1, le=10**6, strict=True)]


_Seed = Annotated[int, Field(ge=0, strict=True)]


class _Row(BaseModel):
    round: _Place
    trial: _Place
    seed: _Seed | None = None
    value: Number | None
    cpu_seconds: Number
    failed: Text


class _Said(BaseModel):
    """The schema of ``sweep.json``."""

    recipe: tuple[Text, ...]
    overrides: tuple[Text, ...]
    trials: tuple[tuple[Text, ...], ...]
    factor: _Place
    seeds: Annotated[tuple[_Seed, ...], Field(min_length=1)] = (0,)
    results: list[_Row]


@dataclass(frozen=True)
class Result:
    """What one seed of a trial came to in a round.

    ``value``: its held-out figure as training wants it, higher is better; None where it failed, with ``why``.
    ``seconds``: of CPU time."""

    value: float | None
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Sweep:
    """A search in the folder ``path``.

    ``trials``: the overrides of each, without secrets, as are ``overrides``, which all have. ``results``: by round and
    number of a trial, both from 1, and seed. ``seeds``: those of every trial.
    """

    path: Path
    recipe: tuple[str, ...]
    overrides: tuple[str, ...]
    trials: tuple[tuple[str, ...], ...]
    factor: int
    seeds: tuple[int, ...] = (0,)
    results: Mapping[tuple[int, int, int], Result] = field(default_factory=dict)

    def asks(self) -> tuple[object, ...]:
        """What another search has to share to go on with this one."""
        return self.recipe, self.overrides, self.trials, self.factor, self.seeds

    def run(self, number: int, round_: int, seed: int, *, goes_on: bool) -> Path:
        """The directory of a trial's run: its own of each round unless the run ``goes_on`` from round to round."""
        folder = self.path / (f"trial-{number}" if goes_on else f"round-{round_}/trial-{number}")
        return folder / f"seed-{seed}" if len(self.seeds) > 1 else folder

    def values(self, round_: int, number: int) -> dict[int, float | None]:
        """What a trial has reached in a round, by seed; None where it failed."""
        found = {seed: self.results.get((round_, number, seed)) for seed in self.seeds}
        return {seed: of.value for seed, of in found.items() if of is not None}

    def mean(self, round_: int, number: int) -> float | None:
        """The mean over seeds of what a trial has reached; None where it has not with each of them."""
        values = [value for value in self.values(round_, number).values() if value is not None]
        return statistics.fmean(values) if len(values) == len(self.seeds) else None

    def found(self, round_: int, number: int, seed: int, result: Result) -> Sweep:
        """The same with this result, on the disk too."""
        made = replace(self, results={**self.results, (round_, number, seed): result})
        made.write()
        return made

    def train(self, number: int) -> str:
        """The command that trains the recipe with the settings of a trial."""
        return shlex.join(["mmrl", "train", *self.recipe, *self.overrides, *self.trials[number - 1]])

    def rows(self) -> list[JsonObject]:
        """The results as JSON, round by round."""
        return [
            {"round": n, "trial": trial, "seed": seed, "value": of.value, "cpu_seconds": of.seconds, "failed": of.why}
            for (n, trial, seed), of in sorted(self.results.items())
        ]

    def write(self) -> None:
        """Write sweep.json, and the folder where it is not there."""
        content: JsonObject = {
            "recipe": self.recipe,
            "overrides": self.overrides,
            "trials": self.trials,
            "factor": self.factor,
            "seeds": self.seeds,
            "results": self.rows(),
        }
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / NAME, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_sweep(path: Path) -> Sweep:
    """The search in the folder ``path``. Raises ``UserError`` where there is none, or its file is damaged."""
    try:
        said = read_as(_Said, path / NAME)
    except FileNotFoundError:
        raise UserError(f"{path} holds no search: it has no {NAME}; leave out --resume, or correct --out") from None
    results = {
        (row.round, row.trial, said.seeds[0] if row.seed is None else row.seed): Result(
            row.value, row.cpu_seconds, row.failed
        )
        for row in said.results
    }
    return Sweep(path, said.recipe, said.overrides, said.trials, said.factor, said.seeds, results)

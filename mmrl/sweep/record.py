"""The file sweep.json: what is tried, and what each trial has reached in each round."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from mmrl.errors import UserError
from mmrl.files import write_atomic
from mmrl.json_types import Json, JsonObject, as_integer, as_list, as_number, as_object, as_text

NAME = "sweep.json"


@dataclass(frozen=True)
class Result:
    """Of a trial in a round. ``value``: its held-out figure as training wants it, higher is better; None where it
    failed, with ``why``. ``seconds``: of CPU time."""

    value: float | None
    seconds: float = 0.0
    why: str = ""


@dataclass(frozen=True)
class Sweep:
    """A search in the folder ``path``.

    ``trials``: the overrides of each, without secrets, as are ``overrides``, which all have. ``results``: by round and
    number of a trial, both from 1.
    """

    path: Path
    recipe: tuple[str, ...]
    overrides: tuple[str, ...]
    trials: tuple[tuple[str, ...], ...]
    factor: int
    results: Mapping[tuple[int, int], Result] = field(default_factory=dict)

    def asks(self) -> tuple[object, ...]:
        """What another search has to share to go on with this one."""
        return self.recipe, self.overrides, self.trials, self.factor

    def run(self, number: int, round_: int, *, goes_on: bool) -> Path:
        """The directory of a trial's run: its own of each round unless the run ``goes_on`` from round to round."""
        return self.path / (f"trial-{number}" if goes_on else f"round-{round_}/trial-{number}")

    def found(self, round_: int, number: int, result: Result) -> Sweep:
        """The same with this result, on the disk too."""
        made = replace(self, results={**self.results, (round_, number): result})
        made.write()
        return made

    def train(self, number: int) -> str:
        """The command that trains the recipe with the settings of a trial."""
        return shlex.join(["mmrl", "train", *self.recipe, *self.overrides, *self.trials[number - 1]])

    def rows(self) -> list[JsonObject]:
        """The results as JSON, round by round."""
        return [
            {"round": round_, "trial": number, "value": of.value, "cpu_seconds": of.seconds, "failed": of.why}
            for (round_, number), of in sorted(self.results.items())
        ]

    def write(self) -> None:
        """Write sweep.json, and the folder where it is not there."""
        content: JsonObject = {
            "recipe": self.recipe,
            "overrides": self.overrides,
            "trials": self.trials,
            "factor": self.factor,
            "results": self.rows(),
        }
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / NAME, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_sweep(path: Path) -> Sweep:
    """The search in the folder ``path``. Raises ``UserError`` where there is none, or its file is damaged."""
    try:
        said = as_object(json.loads((path / NAME).read_text(encoding="utf-8")))
        results: dict[tuple[int, int], Result] = {}
        for row in map(as_object, as_list(said["results"])):
            value = None if row["value"] is None else as_number(row["value"])
            result = Result(value, as_number(row["cpu_seconds"]), as_text(row["failed"]))
            results[as_integer(row["round"]), as_integer(row["trial"])] = result
        trials = tuple(_texts(one) for one in as_list(said["trials"]))
        return Sweep(
            path, _texts(said["recipe"]), _texts(said["overrides"]), trials, as_integer(said["factor"]), results
        )
    except FileNotFoundError:
        raise UserError(f"{path} holds no search: it has no {NAME}; leave out --resume, or correct --out") from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path / NAME} cannot be read ({error!r}); put it back from a copy") from error


def _texts(found: Json) -> tuple[str, ...]:
    return tuple(map(as_text, as_list(found)))

"""The file soup.json: what a soup is made of, and which of its backbones are trained."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.json_types import JsonObject
from mmrl.core.stored import BadFileError, Layers, Number, Text, fitted, read_object
from mmrl.studies.soup.formulas import combination

NAME = "soup.json"
AUTO = "auto"
"""What ``--beta`` is called where it is to be chosen."""


class Trial(NamedTuple):
    """A beta that was tried, with the hypervolume of its merges."""

    beta: Number
    hypervolume: Number


@dataclass(frozen=True)
class Soup:
    """The backbones of ``rewards`` (labels) in the folder ``path``, one for each.

    ``units``: the weight of each reward in the recipe, which is its unit: the paper's ``r_i`` is ``units[i]`` times
    what reward ``i`` gives. ``recipe``: files; ``overrides``: ``a.b=c`` on top of them, without secrets. ``finished``:
    the numbers, from 1, of the backbones that are trained. ``trials``: where ``beta`` was chosen among
    them.
    """

    path: Path
    rewards: Annotated[tuple[Text, ...], Field(min_length=1, max_length=1000)]
    units: tuple[Number, ...]
    beta: Number
    recipe: tuple[Text, ...]
    overrides: tuple[Text, ...]
    finished: tuple[Layers, ...] = ()
    trials: tuple[Trial, ...] = ()

    @property
    def matrix(self) -> Tensor:
        """``B`` [n, n]. Raises ``UserError`` where ``beta`` is out of its range."""
        return combination(len(self.rewards), self.beta)

    @property
    def backbones(self) -> list[Path]:
        """The run directories, in the order of ``rewards``."""
        return [self.path / f"backbone-{j + 1}" for j in range(len(self.rewards))]

    @property
    def command(self) -> str:
        """The command line that trains the rest of it."""
        words = ["mmrl", "soup", "train", *self.recipe, *self.overrides, "--out", str(self.path)]
        beta = AUTO if self.trials else f"{self.beta:g}"
        return shlex.join([*words, "--beta", beta, "--rewards", ",".join(self.rewards), "--resume"])

    def done(self, number: int) -> Soup:
        """The same with the backbone ``number`` finished, on the disk too."""
        soup = replace(self, finished=tuple(sorted({*self.finished, number})))
        soup.write()
        return soup

    def write(self) -> None:
        """Write soup.json, and the folder where it is not there."""
        content: JsonObject = {
            "rewards": self.rewards,
            "units": self.units,
            "beta": self.beta,
            "matrix": self.matrix.tolist(),
            "backbones": [path.name for path in self.backbones],
            "finished": self.finished,
            "recipe": self.recipe,
            "overrides": self.overrides,
        }
        if self.trials:
            content["trials"] = [Trial(*one)._asdict() for one in self.trials]
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / NAME, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_soup(path: Path) -> Soup:
    """The soup in the folder ``path``. Raises ``UserError`` where there is none, or its file is damaged."""
    try:
        soup = fitted(Soup, {**read_object(path / NAME), "path": str(path)}, str(path / NAME))
    except FileNotFoundError:
        raise UserError(f"{path} is no soup: it has no {NAME}; name a folder that mmrl soup train made") from None
    if len(soup.units) != len(soup.rewards):
        raise BadFileError(f"{path / NAME}, units: one for each of rewards is needed; put it back from a copy")
    return soup

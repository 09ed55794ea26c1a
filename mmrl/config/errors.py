"""Errors of a recipe: the file and line, the key, and the edit that fixes it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mmrl.core.errors import UserError
from mmrl.core.errors import did_you_mean as did_you_mean

KeyPath = tuple[str | int, ...]
COMMAND_LINE = "command line"


@dataclass(frozen=True, order=True)
class Source:
    """A place in one layer of the recipe; ``line`` 0 means the whole file, or the command line."""

    layer: int
    line: int
    label: str = field(compare=False)

    def __str__(self) -> str:
        return f"{self.label}:{self.line}" if self.line else self.label


@dataclass(frozen=True)
class Finding:
    """A mistake and its place in the recipe; findings of all checks can be sorted into reading order."""

    source: Source
    path: KeyPath
    message: str


@dataclass(frozen=True)
class Problem:
    """One line of a ``RecipeError``."""

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}  {self.key}: {self.message}" if self.key else f"{self.where}  {self.message}"


class RecipeError(UserError, ValueError):
    """A recipe that cannot run; ``problems`` lists all mistakes in reading order."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems]
        super().__init__("\n".join(lines if len(lines) == 1 else [f"{len(lines)} problems in the recipe", *lines]))


def recipe_error(findings: Sequence[Finding]) -> RecipeError:
    """The findings as one error, sorted by file and line; the command line comes last."""
    unique = dict.fromkeys(sorted(findings, key=lambda finding: finding.source))
    return RecipeError([Problem(str(f.source), format_key(f.path), f.message) for f in unique])


def format_key(path: KeyPath) -> str:
    """``("rewards", 0, "weight")`` as ``rewards[0].weight``."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).removeprefix(".")

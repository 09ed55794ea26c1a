"""The list of commands in ``mmrl --help``, by what a person wants to do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from typer.core import TyperGroup

GROUPS = {
    "Train": ("train", "continue", "plan", "init", "cp", "ls"),
    "Look at runs": ("report", "compare", "eval", "sample", "export", "verify"),
    "Rewards, judges and labels": ("score", "check", "judge", "label", "spread", "distill", "serve"),
    "Search": ("sweep", "soup"),
    "Data, models and machines": ("data", "fetch", "doctor", "launch", "simulate"),
}
"""A command that no group names comes last, under ``Others``."""


class Page(Protocol):
    """A page of help that is being written: what typer gives."""

    width: int

    def section(self, name: str) -> AbstractContextManager[None]: ...

    def write_dl(self, rows: Sequence[tuple[str, str]]) -> None: ...


class Grouped(TyperGroup):
    """Final class. A group of commands whose help has them under headings, each on one line."""

    def format_commands(self, ctx: object, formatter: Page) -> None:
        named = {name for names in GROUPS.values() for name in names}
        others = tuple(name for name in self.commands if name not in named)
        width = max(map(len, self.commands), default=0)
        for heading, names in (*GROUPS.items(), ("Others", others)):
            about = {name: self.commands[name].help or "" for name in names if name in self.commands}
            shown = [(name.ljust(width), short(said, formatter.width - width - 6)) for name, said in about.items()]
            if shown:
                with formatter.section(heading):
                    formatter.write_dl(shown)


def short(about: str, limit: int) -> str:
    """The first sentence of ``about``; where it is longer than ``limit``, what stands before a mark in it."""
    said = " ".join(about.split("\n\n")[0].split())
    first = re.split(r"(?<=\w)[.](?:\s|$)", said, maxsplit=1)[0]
    for mark in ";:,":
        while len(first) > limit and mark in first:
            first = first[: first.rfind(mark)]
    return first if len(first) <= limit else f"{first[: limit - 3].rstrip()}..."

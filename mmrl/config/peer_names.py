"""Names of settings in TRL, verl, diffusers' training scripts, sd-scripts and ai-toolkit, and their equivalents here.

They stand in ``peer_names.yaml``. An error about an unknown key uses them, and ``tools/from_others_page.py`` makes
docs/reference/from_others.md from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

_FILE = Path(__file__).with_suffix(".yaml")


class Here(NamedTuple):
    """The equivalent of a setting: keys of a recipe, or an option of ``mmrl train``; empty if mmrl has none."""

    keys: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        return " and ".join(self.keys) + (f" ({self.note})" if self.keys and self.note else self.note)


@cache
def tools() -> Mapping[str, Mapping[str, Here]]:
    """By the name of a tool: its settings' names, and what they are here."""
    read: dict[str, dict[str, Any]] = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {
        tool: {
            name: Here(tuple(of["keys"]), of["note"]) if "keys" in of else Here(tuple(of)) for name, of in names.items()
        }
        for tool, names in read.items()
    }


def peer_message(key: str, written: object = None) -> str:
    """``; verl's rollout.n is train.group_size here`` for a key of these tools, else an empty text.

    ``key``: a dotted path, or the last part of one. ``written``: the section under it; up to three of its settings are
    named.
    """
    if isinstance(written, Mapping) and written:
        said = [peer_message(f"{key}.{inner}", value) for inner, value in written.items()]
        return "".join([text for text in said if text][:3])
    for name in (key, key.rpartition(".")[2]):
        for tool, names in tools().items():
            if name in names:
                return _said(tool, name, names[name])
    verl = tools()["verl"]
    ends = [name for name in verl if name.endswith(f".{key}")]
    return _said("verl", ends[0], verl[ends[0]]) if ends else ""


def _said(tool: str, name: str, here: Here) -> str:
    return f"; {tool}'s {name} is {here} here" if here.keys else f"; {tool}'s {name}: {here}"

"""The marks that models put around their thoughts: ``<think>``, ``</think>`` and other names of them."""

from __future__ import annotations

import re

_THOUGHT = r"(?:think|thinking|thought|reasoning|seed:think)"
_OPENS = rf"(?:<{_THOUGHT}>|\[THINK\]|\u25c1think\u25b7)"
BEGINS = re.compile(rf"^[ \t]*{_OPENS}", re.MULTILINE | re.IGNORECASE)
IS_OPEN = re.compile(rf"{_OPENS}\Z", re.IGNORECASE)
ENDS = re.compile(rf"</{_THOUGHT}>|\[/THINK\]|\u25c1/think\u25b7", re.IGNORECASE)
_LEFT_OPEN = re.compile(rf"{_OPENS}\s*\Z", re.IGNORECASE)


def left_open(text: str) -> str:
    """The mark, and the white space behind it, of a thought that ``text`` begins at its end; empty for none."""
    found = _LEFT_OPEN.search(text)
    return "" if found is None else found[0]

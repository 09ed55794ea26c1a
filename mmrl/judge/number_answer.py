"""Find the number that a judge's written answer ends in, in the forms in which models write one."""

from __future__ import annotations

import re
from functools import lru_cache

LABELS = ("score", "rating", "grade", "mark", "points", "verdict", "answer")
"""What a number may be called where the recipe names no label."""
_NUMBER = r"[-+]?\d+(?:\.\d+)?"
_RATIO = rf"{_NUMBER}(?:\s*(?:/|out of)\s*{_NUMBER})?"
_DIGITS = re.compile(_NUMBER)
_MARKUP = re.compile(r"(?<![^\W_])[*_`]+|[*_`]+(?![^\W_])|^[ \t]*#+")
_WIDE = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)} | {0x3000: 0x20}
_INVISIBLE = dict.fromkeys(
    [0xAD, 0x61C, *range(0x200B, 0x2010), *range(0x202A, 0x202F), *range(0x2060, 0x206A), 0xFEFF]
)


def plain(text: str) -> str:
    """``text`` with full-width characters as ASCII and without invisible ones and outer space."""
    return text.translate(_WIDE).translate(_INVISIBLE).strip()


def number_in(text: str, labels: tuple[str, ...]) -> tuple[float, float | None]:
    """The number of the last line and what it is out of (``7/10``), if said. Raises ``ValueError``."""
    verdict, label, other = _forms(labels)
    lines = (_MARKUP.sub("", line).strip().casefold() for line in reversed(text.splitlines()) if line.strip())
    passed = ""
    for line in filter(None, lines):
        if other.fullmatch(line) and not label.match(line):
            passed = passed or line
            continue
        if not verdict.fullmatch(line):
            break
        number, *of = _DIGITS.findall(line[named.end() if (named := label.match(line)) else 0 :])
        return float(number), float(of[0]) if of else None
    if passed:
        name = re.split("[:=]", passed)[0].strip()[:40]
        raise ValueError(
            f"is no number (its last line is {name!r}; if that is the verdict, name it in options.answer.label)"
        )
    raise ValueError("is no number")


@lru_cache(64)
def _forms(labels: tuple[str, ...]) -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    """A line that is a verdict, how one with a label begins, and a line with any label."""
    names = "|".join(re.escape(label) for label in labels)
    label = rf"(?:(?:the|my|final|overall|total) )*(?:{names})\s*[:=]\s*"
    marked = (_RATIO, rf"\[\[\s*{_RATIO}\s*\]\]", rf"\$*\\boxed\s*\{{\s*{_RATIO}\s*\}}\$*")
    verdict = rf"(?:{label})?(?:{'|'.join(marked)})[.\u3002]?"
    other = rf"[^\W\d_][\w ()-]{{0,40}}[:=]\s*(?:{_RATIO}%?|\w+)\.?"
    return re.compile(verdict), re.compile(label), re.compile(other)

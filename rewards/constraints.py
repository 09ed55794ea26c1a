"""Does a response keep the constraint of its prompt? Checked by code, for the tasks of ``datasets/instructions.py``.

``prompt.meta["constraint"]`` names the ``kind`` and its numbers or words, and with ``least`` the number of words that a
response must have at any rate: one word alone keeps most constraints. Responses are data: they are split, counted and
parsed as JSON, and never evaluated.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mmrl
from mmrl.core.reward_contract import Context, Failed, Value
from mmrl.core.trajectory import Sample

PARTS = ("score", "kept", "close", "words", "copied")
RUN = 4
"""Words in a row that are a copy of the prompt's."""
_WORD = re.compile(r"[A-Za-z0-9]+(?:['\u2019-][A-Za-z0-9]+)*")
_QUOTED = re.compile(r'["\u201c][^"\u201c\u201d]+["\u201d]')

Rows = dict[str, Sequence[Value]]
Asked = Mapping[str, Any]


@mmrl.reward(inputs=("text",), checks=True)
def score(samples: Sequence[Sample], *, context: Context, close_weight: float = 0.3) -> Rows:
    """Judge each response by its prompt's constraint. All parts but ``words`` are in [0, 1].

    - ``kept``: 1 if the constraint is kept. A response cut at the length limit keeps none.
    - ``close``: how near the response comes, 1 where it is kept; half of it for one that was cut.
    - ``score``: ``close_weight * close``, the rest ``kept``.
    - ``words``, ``copied``: its number of words, and the share of its runs of four words that stand in the prompt. They
      do not count; they show whether a run learns to say little, or to repeat the prompt.

    A sample without a known constraint fails. Raises ``ValueError`` for a weight outside of [0, 1].
    """
    if not 0 <= close_weight <= 1:
        raise ValueError(f"close_weight is {close_weight}; it must be in [0, 1]")
    rows = [_judged(sample, close_weight) for sample in samples]
    return {part: [row[part] for row in rows] for part in PARTS}


def _judged(sample: Sample, close_weight: float) -> Mapping[str, Value]:
    """The parts of one response."""
    asked = sample.prompt.meta.get("constraint")
    check = CHECKS.get(str(asked.get("kind"))) if isinstance(asked, Mapping) else None
    if check is None or not isinstance(asked, Mapping):
        why = "its prompt has no constraint of a known kind; use the data set instructions"
        return dict.fromkeys(PARTS, Failed(why))
    text = (sample.text or "").strip()
    words = len(words_of(text))
    near = check(text, asked) * min(1.0, words / asked.get("least", 1)) if words else 0.0
    kept = float(near == 1 and not sample.truncated)
    near = near / 2 if sample.truncated else near
    return {
        "score": close_weight * near + (1 - close_weight) * kept,
        "kept": kept,
        "close": near,
        "words": float(words),
        "copied": copied(text, sample.prompt.text),
    }


def words_of(text: str) -> list[str]:
    """The words of ``text``, in small letters."""
    return [word.lower() for word in _WORD.findall(text)]


def copied(text: str, prompt: str) -> float:
    """The share of the runs of ``RUN`` words in ``text`` that ``prompt`` has too."""
    said, asked = words_of(text), words_of(prompt)
    there = {tuple(asked[i : i + RUN]) for i in range(len(asked) - RUN + 1)}
    runs = [tuple(said[i : i + RUN]) for i in range(len(said) - RUN + 1)]
    return sum(run in there for run in runs) / len(runs) if runs else 0.0


def _most(have: int, most: int) -> float:
    """1 up to ``most``, then falling to 0 at three times as many."""
    return max(0.0, 1 - max(0, have - most) / (2 * most))


def _near(have: int, want: int) -> float:
    return max(0.0, 1 - abs(have - want) / max(want, 2))


def _keywords(text: str, asked: Asked) -> float:
    said = words_of(text)
    return sum(word in said for word in asked["words"]) / len(asked["words"])


def _order(text: str, asked: Asked) -> float:
    """The longest beginning of the words that stands in the text in this order."""
    said, begin, kept = words_of(text), 0, 0
    for word in asked["words"]:
        if word not in said[begin:]:
            break
        begin, kept = said.index(word, begin) + 1, kept + 1
    return kept / len(asked["words"])


def _both(text: str, asked: Asked) -> float:
    """Half for each of the two subjects that is named, in the singular or the plural."""
    said = " ".join(words_of(text))
    named = [re.search(rf"\b{asked[key].removesuffix('s')}(s|es)?\b", said) for key in ("subject", "other")]
    return sum(found is not None for found in named) / 2


def _letter(text: str, asked: Asked) -> float:
    return 1 / (1 + text.lower().count(asked["letter"]))


def _sentences(text: str, asked: Asked) -> float:
    near = _near(len([part for part in re.split(r"(?<=[.!?])\s+", text) if part]), asked["count"])
    return near if re.search(r"[.!?][\"\u201d']?$", text) else near / 2


def _json(text: str, asked: Asked) -> float:
    """1 for one JSON object with exactly these keys, and something under each."""
    wanted = set(asked["keys"])
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        shown = sum(f'"{key}"' in text for key in wanted) / len(wanted)
        return 0.3 * shown + 0.15 * text.startswith("{") + 0.15 * text.endswith("}")
    if not isinstance(found, dict):
        return 0.1
    have = {key for key, value in found.items() if value not in (None, "", [], {})}
    return 0.6 + 0.4 * len(wanted & have) / len(wanted | set(found))


def _list(text: str, asked: Asked) -> float:
    parts = [part.strip(" .\n") for part in text.split(",")]
    single = sum(bool(re.fullmatch(r"[A-Za-z-]+", part)) for part in parts) / len(parts)
    return _near(len(parts), asked["count"]) * (1 + single) / 2


def _lower(text: str, asked: Asked) -> float:
    letters = [letter for letter in text if letter.isalpha()]
    return sum(letter.islower() for letter in letters) / len(letters) if letters else 0.0


def _question(text: str, asked: Asked) -> float:
    return float(text.endswith("?") and not re.search(r"[.!?]", text[:-1]))


CHECKS: Mapping[str, Callable[[str, Asked], float]] = {
    "words": lambda text, asked: _most(len(words_of(text)), asked["most"]),
    "characters": lambda text, asked: _most(len(text), asked["most"]),
    "sentences": _sentences,
    "keywords": _keywords,
    "order": _order,
    "both": _both,
    "letter": _letter,
    "begin": lambda text, asked: float(words_of(text)[:1] == [asked["word"].lower()]),
    "end": lambda text, asked: float(words_of(text)[-1:] == [asked["word"].lower()]),
    "json": _json,
    "list": _list,
    "lower": _lower,
    "question": _question,
    "quoted": lambda text, asked: float(_QUOTED.fullmatch(text) is not None),
}
"""How near a response comes to each kind of constraint, 0 to 1; 1 keeps it."""

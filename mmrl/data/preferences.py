"""Records of published preference data about pictures, as a better picture and a worse one.

- Pick-a-Pic (arXiv 2305.01569): ``caption``, ``jpg_0``, ``jpg_1``, ``label_0``, ``label_1`` (1 and 0, or 0.5 each for a
  tie).
- HPD v2 (arXiv 2306.09341): ``prompt``, ``image_path`` (``file_path`` in train.json, ``image`` in tables), and
  ``human_preference`` (1 for the preferred one), ``rank`` (averaged over annotators, the lowest is the best) or
  ``raw_annotation`` (a list of ``{rank, user_hash}``).

HPD v2's test set ranks up to nine pictures of a prompt. A record is one pair here: the best and the worst of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from mmrl.core.json_types import Cell

Form = Literal["pick_a_pic", "hpd"]
BETTER, WORSE = "better picture", "worse picture"
"""The columns of what ``as_pair`` returns, beside ``prompt``."""


class TieError(ValueError):
    """Nobody preferred one of the two: a good record that no pair is made of."""


def as_pair(record: Cell, form: str) -> Mapping[str, Cell]:
    """``record`` with its text under ``prompt`` and its pictures under ``BETTER`` and ``WORSE``.

    Raises ``TieError``, and ``ValueError`` for a record that is not of this form.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"is a JSON {type(record).__name__}, not an object")
    text, pictures, scores = FORMS[form](record)
    if len(pictures) < 2 or len(pictures) != len(scores):
        raise ValueError(f"has {len(pictures)} pictures and {len(scores)} preferences")
    best, worst = (scores.index(edge) for edge in (max(scores), min(scores)))
    if scores[best] == scores[worst]:
        raise TieError("is a tie")
    return {**record, "prompt": text, BETTER: pictures[best], WORSE: pictures[worst]}


def _pick_a_pic(record: Mapping[str, Cell]) -> tuple[Cell, Sequence[Cell], list[float]]:
    names = ("caption", "jpg_0", "jpg_1", "label_0", "label_1")
    missing = [name for name in names if record.get(name) is None]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}, which records of Pick-a-Pic have")
    labels = [_number(record[name], name) for name in names[3:]]
    if not math.isclose(sum(labels), 1.0):
        raise ValueError(f"has the labels {labels[0]:g} and {labels[1]:g}, which do not add up to 1")
    return record["caption"], [record["jpg_0"], record["jpg_1"]], labels


def _hpd(record: Mapping[str, Cell]) -> tuple[Cell, Sequence[Cell], list[float]]:
    found = [record[name] for name in ("image_path", "file_path", "image") if record.get(name)]
    if not found or not isinstance(found[-1], Sequence) or isinstance(found[-1], str | bytes):
        raise ValueError("has no list of pictures under image_path, file_path or image")
    # Tables have the pictures themselves, and beside them the paths they once had.
    pictures = found[-1]
    for name in ("human_preference", "rank"):
        if values := record.get(name):
            sign = 1 if name == "human_preference" else -1
            return record.get("prompt"), pictures, [sign * _number(value, name) for value in _listed(values, name)]
    raw = record.get("raw_annotation") or record.get("raw_annotations")
    if not raw:
        raise ValueError("has no human_preference, rank or raw_annotation, one of which records of HPD have")
    ranks = [
        _listed(one.get("rank") if isinstance(one, Mapping) else one, "raw_annotation")
        for one in _listed(raw, "raw_annotation")
    ]
    if len({len(one) for one in ranks}) != 1:
        raise ValueError("has annotations of different numbers of pictures")
    return (
        record.get("prompt"),
        pictures,
        [-sum(_number(v, "rank") for v in column) for column in zip(*ranks, strict=True)],
    )


def _listed(values: Cell, name: str) -> Sequence[Cell]:
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise ValueError(f"{name!r} is no list")
    return values


def _number(value: Cell, name: str) -> float:
    try:
        if value is None or (isinstance(value, Mapping | Sequence) and not isinstance(value, str)):
            raise TypeError
        found = float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name!r} is {value!r}, no number") from None
    if not math.isfinite(found):
        raise ValueError(f"{name!r} is {found}, no number")
    return found


FORMS: Mapping[str, Callable[[Mapping[str, Cell]], tuple[Cell, Sequence[Cell], list[float]]]] = {
    "pick_a_pic": _pick_a_pic,
    "hpd": _hpd,
}

"""The transcripts of a run for its report: each judge's lowest and highest first. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.core.json_types import Json, JsonObject
from mmrl.core.lines import rows_of
from mmrl.rewards.judging.store import TRANSCRIPTS


@dataclass
class Extremes:
    """Transcripts of one judge: ``lowest`` and ``highest`` rows (see ``mmrl.rewards.judging.store``), and counts of
    questions."""

    lowest: list[JsonObject] = field(default_factory=list)
    highest: list[JsonObject] = field(default_factory=list)
    questions: int = 0
    failed: int = 0
    cached: int = 0
    seconds: float = 0.0
    reasons: dict[str, int] = field(default_factory=dict)
    """How often a question had no verdict, by reason, the commonest first."""


def extremes(folder: Path | str, n: int = 4) -> dict[str, Extremes]:
    """The ``n`` lowest and ``n`` highest transcripts of each judge by label, in the run directory ``folder``.

    Sorted by the score of the first sample a question is about; the later step first where scores are equal. What a
    resumed run asked again counts once. None where the run has no transcripts. The file is read as a stream, twice.
    """
    path = Path(folder) / TRANSCRIPTS
    last: dict[str, int] = {}
    for number, row in enumerate(rows_of(path)):
        last[_key(row)] = number
    wanted = set(last.values())
    found: dict[str, Extremes] = {}
    for number, row in enumerate(rows_of(path)):
        if number not in wanted:
            continue
        of = found.setdefault(str(row.get("judge", "")), Extremes())
        of.questions += 1
        of.cached += bool(row.get("cached"))
        of.seconds += _number(row.get("seconds")) or 0.0
        if row.get("reason"):
            of.failed += 1
            of.reasons[str(row["reason"])] = of.reasons.get(str(row["reason"]), 0) + 1
        if _score(row) is not None:
            of.lowest = sorted([*of.lowest, row], key=lambda r: (_score(r), -_step(r)))[:n]
            of.highest = sorted([*of.highest, row], key=lambda r: (-(_score(r) or 0.0), -_step(r)))[:n]
    for of in found.values():
        of.reasons = dict(sorted(of.reasons.items(), key=lambda item: -item[1]))
    return found


def _key(row: JsonObject) -> str:
    return json.dumps([row.get("judge"), row.get("step"), row.get("samples")])


def _score(row: JsonObject) -> float | None:
    scores = row.get("scores")
    return _number(scores[0]) if isinstance(scores, list) and scores else None


def _step(row: JsonObject) -> float:
    return _number(row.get("step")) or 0.0


def _number(value: Json) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

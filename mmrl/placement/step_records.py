"""What a controller's devices did in a step, as numbers of all controllers and as lines of placement.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmrl.core.json_types import JsonObject, as_object
from mmrl.placement.adaptive import Decision
from mmrl.placement.scheduler_log import Entry
from mmrl.placement.tasks import Event

LATEST = ("scored", "price", "price_back", "wall")
"""Numbers of which the largest of all controllers counts; the others are added."""


def summed(numbers: Sequence[dict[str, float]]) -> dict[str, float]:
    """The numbers of all controllers together."""
    return {k: (max if k in LATEST else sum)(n[k] for n in numbers) for k in numbers[0]}


def as_rows(events: Sequence[Event], step: int, controller: int, heard: Sequence[Entry] = ()) -> list[dict[str, Any]]:
    """The lines of placement.jsonl; ``step`` counts from 1. ``heard``: entries of the scheduler's log, which are one
    more line."""
    log = [{"step": step, "controller": controller, "heard": heard}] if heard else []
    return log + [
        {
            "step": step,
            "controller": controller,
            **({"device": e.device} if e.call is None else e.call._asdict()),
            "role": e.role,
            "began": round(e.began, 4),
            "ended": round(e.ended, 4),
            **({"of": e.of + 1} if e.of is not None and e.of + 1 != step else {}),
            **({"round": e.round} if e.round > 0 else {}),
            **({"cut": True} if e.cut else {}),
            **({"judge": e.judge} if e.judge else {}),
            **({} if e.priced else {"priced": False}),
        }
        for e in events
    ]


def as_line(step: int, decision: Decision) -> JsonObject:
    """A decision of the adaptive policy after ``step`` (from 1), as a line of placement.jsonl."""
    return {
        "step": step,
        "decision": decision.why,
        "rollout": decision.split.rollout,
        "judge": decision.split.judge,
        "numbers": {k: round(v, 4) for k, v in decision.numbers.items()},
    }


def in_one_line(decisions: Sequence[JsonObject]) -> list[JsonObject]:
    """The decisions of a step as one line, with the numbers of all; none if there are none."""
    if not decisions:
        return []
    numbers = {name: value for one in decisions for name, value in as_object(one["numbers"]).items()}
    words = "; ".join(str(one["decision"]) for one in decisions)
    return [{**{k: v for one in decisions for k, v in one.items()}, "decision": words, "numbers": numbers}]

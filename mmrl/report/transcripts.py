"""The transcripts of a run's generative judges, as the report shows them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from mmrl.core.json_types import JsonObject, elements
from mmrl.logging.texts import Folded, fold
from mmrl.rewards.judging.report import extremes
from mmrl.rewards.judging.usage import COUNTS, PREFIX, usage_in

_BASE64 = re.compile(r"[A-Za-z0-9+/]+=*")


def transcripts(folder: Path, n: int = 4) -> list[dict[str, Any]]:
    """Counts and the ``n`` lowest and highest transcripts of each judge of a run; none where no judge was asked.

    A row with parts missing or of another type is shown without them.
    """
    folders = [folder, *(path for path in sorted((folder / "controllers").glob("*")) if path.is_dir())]  # and logs
    usage = sum((usage_in(one) for one in folders), Counter())
    found = []
    for label, of in extremes(folder, n).items():
        kept = len({id(row) for row in (*of.lowest, *of.highest)})
        count = max(1, min(n, kept // 2))
        rows = {"Lowest": of.lowest[:count], "Highest": of.highest[: count if kept > 1 else 0]}
        shown = {title: [_transcript(row) for row in some] for title, some in rows.items() if some}
        counts = {name: usage[f"{PREFIX}{label}/{name}"] for name in COUNTS}
        reasons = list(of.reasons.items())[:5]
        found.append({"label": label, "of": of, "rows": shown, "reasons": reasons, "usage": counts})
    return found


def _transcript(row: JsonObject) -> dict[str, Any]:
    """One question to a judge: its samples, the texts of question and answers, and the scores."""

    def text(value: object) -> Folded | None:
        return fold(value) if isinstance(value, str) else None

    scores = [value if isinstance(value, int | float) else None for value in elements(row.get("scores"))]
    both = zip(elements(row.get("responses")), scores, strict=False)
    about = [{"text": text(value), "score": score} for value, score in both]
    pictures = [p for p in elements(row.get("pictures")) if isinstance(p, str) and _BASE64.fullmatch(p)]
    asked = [(title, text(row.get(key))) for title, key in (("System", "system"), ("Question", "request"))]
    step = row.get("step")
    return {
        "prompt": text(row.get("prompt")),
        "pictures": [f"data:image/png;base64,{p}" for p in pictures],
        "about": about or [{"text": None, "score": score} for score in scores[:1]],
        "at": f"step {step}" if isinstance(step, int) and step >= 0 else "evaluation",
        "written": [
            *((title, found) for title, found in asked if found),
            *(("Answer", found) for answer in elements(row.get("answers")) if (found := text(answer))),
        ],
    }

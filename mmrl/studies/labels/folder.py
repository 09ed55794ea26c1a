"""Write the tables of scores that ``mmrl spread`` makes."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from mmrl.core.files import write_atomic
from mmrl.rewards.learned.labels.folder import FOLLOWING, SCORES
from mmrl.rewards.learned.labels.spreading import Spread
from mmrl.studies.labels import table


class Place(NamedTuple):
    """Where a sample is: its name in ``folder``."""

    file: str
    folder: Path


def write_tables(
    folder: Path, places: Sequence[Place], made: Spread, following: Sequence[int], *, several: bool = False
) -> None:
    """scores.csv: every sample by its score; next.csv: which to label next. ``folder`` exists. ``several``: samples are
    of several folders, whose absolute paths are a column of the tables (``folder``)."""
    scores, unknown = made.scores.tolist(), made.unknown.tolist()
    order = sorted(range(len(places)), key=lambda n: (-scores[n], places[n]))
    own = [(str(place.folder.resolve()),) if several else () for place in places]
    rows = [
        (places[n].file, f"{scores[n]:.4f}", f"{unknown[n]:.4f}", f"{scores[n]:g}" if bool(made.given[n]) else "")
        + own[n]
        for n in order
    ]
    last = (table.FOLDER,) if several else ()
    _table(folder / SCORES, ("file", "score", "score_without_label", "label", *last), rows)
    _table(
        folder / FOLLOWING,
        ("file", "score", *last),
        [(places[n].file, f"{unknown[n]:.4f}", *own[n]) for n in following],
    )


def _table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_atomic(path, text.getvalue().encode("utf-8", "surrogateescape"))

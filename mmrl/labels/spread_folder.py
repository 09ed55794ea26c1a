"""Spread the labels of a folder, or of a run's samples, and write the tables and the reward."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch

from mmrl.errors import UserError
from mmrl.export import new_directory, refuse_taken
from mmrl.json_types import JsonObject
from mmrl.labels import folder as written
from mmrl.labels import table
from mmrl.labels.embeddings import WORDS, Encoders, Space, embedded
from mmrl.labels.items import items_of, root_of
from mmrl.labels.spreading import AUTO, NEXT, Quality, spread
from mmrl.labels.training import Settings
from mmrl.packages.places import lacking

_LEAST_SAMPLES = 20


@dataclass(frozen=True)
class Outcome:
    """``by``: the method that gave the scores. ``reward``: whether the folder holds one; not where the scores are no
    better than chance."""

    samples: int
    labels: int
    high: int
    quality: dict[str, Quality]
    following: list[str]
    by: str
    reward: bool

    def as_json(self) -> JsonObject:
        return {
            "samples": self.samples,
            "labels": self.labels,
            "high_labels": self.high,
            "held_out": {name: one.as_json() for name, one in self.quality.items()},
            "label_next": self.following,
            "by": self.by,
            "reward": self.reward,
        }


def spread_folder(
    folder: Path,
    out: Path,
    labels: Path | None = None,
    texts: str | None = None,
    model: JsonObject | None = None,
    settings: Settings | None = None,
    following: int = NEXT,
    by: str = AUTO,
) -> Outcome:
    """Spread the labels of ``labels`` (labels.csv of ``folder``) over its samples, into the new folder ``out``.

    ``texts`` and ``model`` as in ``Encoders.for_items``, ``by`` as in ``spread``. Raises ``UserError``.
    """
    settings = settings or Settings()
    refuse_taken(out)
    items = items_of(folder)
    if repeated := [name for name, count in Counter(item.name for item in items).items() if count > 1]:
        raise UserError(f"{folder} lists {repeated[0]} twice; keep one of the two lines")
    path = labels or root_of(folder) / table.NAME
    given = table.read(path, [item.name for item in items])
    table.check(path, given)
    if len(items) < _LEAST_SAMPLES:
        raise UserError(f"{folder} has {len(items)} samples, and {_LEAST_SAMPLES} or more are needed; add some")
    if texts not in (None, WORDS) and (unset := lacking(texts)):
        raise UserError(f"--texts {texts}: {unset}")
    encoders = Encoders.for_items(items, texts, model)
    items, parts, bad = embedded(items, encoders)
    if bad:
        print(f"warning: {len(bad)} samples cannot be read and are left out; the first: {bad[0]}", file=sys.stderr)
    space = Space.of(parts)
    embeddings = space(parts)
    values = torch.tensor([given.of.get(item.name, 0.0) for item in items])
    known = torch.tensor([item.name in given.of for item in items])
    made = spread(embeddings, values, known, settings, by)
    proposed = made.following(embeddings, following)
    names = [item.name for item in items]
    better = made.quality[made.by].better_than_chance
    outcome = Outcome(
        len(items),
        int(known.sum()),
        int((values[known] >= made.quality[made.by].middle).sum()),
        dict(made.quality),
        [names[n] for n in proposed],
        made.by,
        better,
    )
    with new_directory(out, "the spread labels") as aside:
        written.write_tables(aside, names, made, proposed)
        if better:
            written.write(aside, made, embeddings, space, encoders, settings)
    return outcome

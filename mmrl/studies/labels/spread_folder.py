"""Spread the labels of folders, or of runs' samples, and write the tables and the reward."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mmrl.app.export import new_directory, refuse_taken
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.packages.places import lacking
from mmrl.rewards.learned.labels.embeddings import WORDS, Encoders, Space, embedded
from mmrl.rewards.learned.labels.items import Item, items_of, root_of
from mmrl.rewards.learned.labels.spreading import AUTO, NEXT, Quality, Spread, spread, write
from mmrl.rewards.learned.labels.training import Settings
from mmrl.studies.labels import folder as written
from mmrl.studies.labels import pairs as picked
from mmrl.studies.labels import table

_LEAST_SAMPLES = 20


@dataclass(frozen=True)
class Outcome:
    """``folders``: of each folder its samples and its labels. ``by``: the method that gave the scores. ``reward``:
    whether the folder holds one; not where the scores are no better than chance. ``pairs``: how many were picked."""

    samples: int
    labels: int
    high: int
    quality: dict[str, Quality]
    following: list[str]
    by: str
    reward: bool
    folders: dict[str, tuple[int, int]]
    pairs: int

    def as_json(self) -> JsonObject:
        return {
            "samples": self.samples,
            "labels": self.labels,
            "high_labels": self.high,
            "held_out": {name: one.as_json() for name, one in self.quality.items()},
            "label_next": self.following,
            "by": self.by,
            "reward": self.reward,
            "folders": [
                {"folder": name, "samples": samples, "labels": labels}
                for name, (samples, labels) in self.folders.items()
            ],
            "pairs": self.pairs,
        }


@dataclass(frozen=True)
class Gathered:
    """The samples of all folders, and labels by their name. ``places``: the folder and the name there of each; of
    several folders a sample's name begins with its folder."""

    items: list[Item]
    labels: dict[str, float]
    places: dict[str, written.Place]


def gathered(folders: Sequence[Path], labels: Path | None = None, against: Path | None = None) -> Gathered:
    """The samples of ``folders`` with their labels (``labels``, or labels.csv of each; of several folders some may have
    none). With ``against`` no labels are read: those of ``folders`` are 1, and its samples, which come last, are 0.
    Raises ``UserError``."""
    if against is not None and labels is not None:
        raise UserError(
            f"--labels {labels} beside --against: with --against all samples of the folders are labels (1, and 0 for "
            f"{against}); leave one of the two out"
        )
    folders = [*folders, *([] if against is None else [against])]
    several = len(folders) > 1
    if several and labels is not None:
        raise UserError(
            f"--labels names one table, and there are {len(folders)} folders; leave it out, and keep labels.csv in each"
        )
    if repeated := [str(one) for one, count in Counter(root_of(one).resolve() for one in folders).items() if count > 1]:
        raise UserError(f"{repeated[0]} is named twice; name each folder once")
    found = Gathered([], {}, {})
    for folder in folders:
        items = items_of(folder)
        if twice := [name for name, count in Counter(item.name for item in items).items() if count > 1]:
            raise UserError(f"{folder} lists {twice[0]} twice; keep one of the two lines")
        if found.items and items[0].kind != found.items[0].kind:
            raise UserError(
                f"{folders[0]} has samples of the kind {found.items[0].kind}, and {folder} of the kind "
                f"{items[0].kind}; spread each kind alone"
            )
        path = labels or root_of(folder) / table.NAME
        if against is not None:
            given = {item.name: float(folder is not against) for item in items}
        else:
            given = table.read(path, [item.name for item in items]).of if path.exists() or not several else {}
        found.labels.update((_named(folder, name, several), value) for name, value in given.items())
        for item in items:
            name = _named(folder, item.name, several)
            if name in found.places:
                raise UserError(f"{folder} and {found.places[name].folder} both have {name}; name one of the two alone")
            found.items.append(replace(item, name=name))
            found.places[name] = written.Place(item.name, folder)
    table.check(labels or root_of(folders[-1]) / table.NAME, table.Labels(found.labels), len(folders))
    return found


def _named(folder: Path, name: str, several: bool) -> str:
    return f"{folder}/{name}" if several else name


def spread_folder(
    folder: Path | Sequence[Path],
    out: Path,
    labels: Path | None = None,
    texts: str | None = None,
    model: JsonObject | None = None,
    settings: Settings | None = None,
    following: int = NEXT,
    by: str = AUTO,
    pairs: int = 0,
    against: Path | None = None,
) -> Outcome:
    """Spread the labels of ``labels`` (labels.csv of ``folder``) over its samples, into the new folder ``out``.

    Several folders are spread over together, each with its own labels.csv. ``against``: as of ``gathered``. ``texts``
    and ``model`` as in ``Encoders.for_items``, ``by`` as in ``spread``. ``pairs``: the most that are picked of each
    prompt (``mmrl.studies.labels.pairs``). Raises ``UserError``.
    """
    settings = settings or Settings()
    folders = [folder] if isinstance(folder, Path) else list(folder)
    refuse_taken(out)
    found = gathered(folders, labels, against)
    folders = [*folders, *([] if against is None else [against])]
    items = found.items
    if len(items) < _LEAST_SAMPLES:
        where = f"{folders[0]} has" if len(folders) == 1 else "the folders have"
        raise UserError(f"{where} {len(items)} samples, and {_LEAST_SAMPLES} or more are needed; add some")
    if pairs:
        picked.check(items)
    if texts not in (None, WORDS) and (unset := lacking(texts)):
        raise UserError(f"--texts {texts}: {unset}")
    encoders = Encoders.for_items(items, texts, model)
    items, parts, bad = embedded(items, encoders)
    if bad:
        print(f"warning: {len(bad)} samples cannot be read and are left out; the first: {bad[0]}", file=sys.stderr)
    space = Space.of(parts, encoders)
    embeddings, moved = space(parts), space.moved(parts)
    alone = (moved[-2], moved[-1]) if encoders.prompts else None
    values = torch.tensor([found.labels.get(item.name, 0.0) for item in items])
    known = torch.tensor([item.name in found.labels for item in items])
    made = spread(embeddings, values, known, settings, by, alone, space.numbers(parts))
    proposed = made.following(embeddings, following)
    names = [item.name for item in items]
    outcome = _outcome(folders, found, names, made, proposed)
    made_pairs = picked.paired(items, made.scores.tolist(), pairs) if pairs and outcome.reward else []
    with new_directory(out, "the spread labels") as aside:
        written.write_tables(aside, [found.places[name] for name in names], made, proposed, several=len(folders) > 1)
        if outcome.reward:
            write(aside, made, embeddings, space, encoders, settings)
        if made_pairs:
            picked.write(aside, items, made_pairs)
    return replace(outcome, pairs=len(made_pairs))


def _outcome(
    folders: Sequence[Path], found: Gathered, names: Sequence[str], made: Spread, proposed: Sequence[int]
) -> Outcome:
    given = [name for n, name in enumerate(names) if bool(made.given[n])]
    samples, labels = (Counter(found.places[name].folder for name in some) for some in (names, given))
    quality = made.quality[made.by]
    return Outcome(
        len(names),
        len(given),
        int((made.labels[made.given] >= quality.middle).sum()),
        dict(made.quality),
        [names[n] for n in proposed],
        made.by,
        quality.better_than_chance,
        {str(folder): (samples[folder], labels[folder]) for folder in folders},
        0,
    )

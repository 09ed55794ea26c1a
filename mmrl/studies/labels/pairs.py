"""Pairs of a better and a worse sample of the same prompt, picked by their scores: data for DPO.

    pairs.jsonl              {"prompt": ..., "chosen": ..., "rejected": ...}, as the data set ``jsonl`` reads it
    pairs/                   the pictures that it names, copied

Of each prompt the best sample stands with the worst one, the second best with the second worst, and so on, as long as
their scores differ by ``LEAST`` or more. A sample is in one pair. The scores order the samples that they were made for;
a reward also orders those of a policy that has learned from it, which they are wrong about more often.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias

from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.grouping import grouped
from mmrl.core.json_types import Json
from mmrl.rewards.learned.labels.items import Item

FILE, FOLDER = "pairs.jsonl", "pairs"
LEAST = 0.3
_Question: TypeAlias = tuple[str, tuple[str, ...], Path | None]


def paired(items: Sequence[Item], scores: Sequence[float], most: int) -> list[tuple[int, int]]:
    """Numbers of the better and the worse sample of each pair, at most ``most`` pairs of a prompt. Raises ``UserError``
    where there is none."""
    groups = grouped((_question(item), n) for n, item in enumerate(items) if item.prompt)
    found: list[tuple[int, int]] = []
    for group in groups.values():
        order = sorted(group, key=lambda n: -scores[n])
        best = order[: min(most, len(order) // 2)]
        both = zip(best, reversed(order), strict=False)
        found += [(n, m) for n, m in both if scores[n] - scores[m] >= LEAST and not _equal(items[n], items[m])]
    if not found:
        raise UserError(
            f"--pairs: no two samples of a prompt have scores that differ by {LEAST} or more; draw several samples of "
            "each prompt, label more of them, or leave --pairs out"
        )
    return found


def _question(item: Item) -> _Question:
    """What a sample answers: its prompt and the pictures of it, whose names are those of one folder."""
    return item.prompt, item.pictures, item.root if item.pictures else None


def _equal(one: Item, other: Item) -> bool:
    """Equal texts; the label of one may have made their scores differ."""
    return one.path is None and one.text == other.text


def check(items: Sequence[Item]) -> None:
    """Raise ``UserError`` for samples of which no pairs can be made."""
    kind = items[0].kind
    if kind == "video":
        raise UserError("--pairs: DPO trains on pictures and texts, and these samples are clips; leave --pairs out")
    if all(not item.prompt for item in items):
        where = "a picture a.png needs its prompt in a.txt" if kind == "image" else "write them as samples.jsonl"
        raise UserError(f"--pairs: the samples have no prompts ({where}); add them, or leave --pairs out")
    if len({_question(item) for item in items}) == len(items):
        raise UserError(
            "--pairs: each sample has a prompt of its own, so none can be compared; draw several samples of each "
            "prompt, or leave --pairs out"
        )


def write(folder: Path, items: Sequence[Item], pairs: Sequence[tuple[int, int]]) -> None:
    """pairs.jsonl, and the pictures that it names; ``folder`` exists."""
    copied: dict[Path, str] = {}

    def copy(path: Path) -> str:
        if path not in copied:
            (folder / FOLDER).mkdir(exist_ok=True)
            copied[path] = f"{FOLDER}/{len(copied):05d}{path.suffix.lower()}"
            shutil.copyfile(path, folder / copied[path])
        return copied[path]

    rows: list[dict[str, Json]] = []
    for one in pairs:
        better, worse = (items[n] for n in one)
        row: dict[str, Json] = {"prompt": better.prompt}
        for name, item in (("chosen", better), ("rejected", worse)):
            row[name] = item.text if item.path is None else copy(item.path)
        if better.pictures and better.root is not None:
            row["images"] = [copy(better.root / name) for name in better.pictures]
        rows.append(row)
    write_atomic(folder / FILE, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))

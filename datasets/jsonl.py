"""Records of JSONL, JSON, CSV, TSV and Parquet files, saved data sets and the hub, with pictures and clips.

A record has a text (``prompt``, ``question``, ``text``, or ``messages``), perhaps ``answer`` (or ``solution``), which a
reward finds in ``meta["answer"]``, and ``image``, ``images`` or ``video``: paths inside the file's folder, data URLs,
base64, or bytes in a table. Pairs have ``chosen`` and ``rejected``, as TRL's preference data. The options name other
columns.
"""

from __future__ import annotations

import warnings
from array import array
from collections.abc import Mapping, Sequence
from os.path import relpath
from pathlib import Path
from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.media import Media
from mmrl.core.trajectory import Prompt
from mmrl.data.checks import MediaChecks, Verify
from mmrl.data.fields import (
    Columns,
    Fields,
    digest_of,
    digest_of_prompt,
    make_prompt,
    read_columns,
    read_fields,
    warn_of_unread,
)
from mmrl.data.limits import LIMITS
from mmrl.data.preferences import BETTER, FORMS, WORSE, Form, TieError, as_pair
from mmrl.data.record_media import media_from
from mmrl.data.records import BadRecord, Records, in_split, leave_out
from mmrl.data.rows import Rows
from mmrl.data.sources import open_rows


class TiesLeftOut(UserWarning):
    """Records of preference data in which no picture is the better one; the message has their number."""


def prompts(
    split: Literal["train", "heldout"] = "train",
    *,
    path: str,
    heldout: float = 0.1,
    source_split: str = "train",
    subset: str | None = None,
    root: str | None = None,
    verify: Verify | None = None,
    prompt: str | None = None,
    answer: str | None = None,
    images: str | Sequence[str] | None = None,
    videos: str | None = None,
    system: str | None = None,
    negative_prompt: str | None = None,
    meta: Sequence[str] = (),
    columns: Mapping[str, str | Sequence[str]] | None = None,
    pairs: Form | None = None,
) -> Records:
    """The prompts of ``split``, in the order of the source; a record is read when its prompt is asked for.

    ``path``: a ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.parquet`` file, a folder of Parquet files, of
    ``save_to_disk`` or of a data set downloaded from the hub, or a name on the hub, whose ``source_split`` (``train``,
    ``test``) and ``subset`` are taken. ``heldout``: how many records, or what share of them (below 1, rounded up), are
    held out; 0 gives all of them to either split. ``root``: the folder that media must be in, the file's own unless
    given. ``verify``: how media are looked at before the start, ``decode`` or ``headers``; the default is ``decode``
    for files and, since it would read a whole table, nothing for media inside one.
    ``prompt``, ``answer``, ``images``, ``videos``, ``system``, ``negative_prompt``: columns, ``a.b`` for a key inside
    another, and several of ``images`` for pairs (``[chosen, rejected]``); ``meta``: further columns that a reward may
    know. ``columns`` says the same in one option, ``{prompt: question, answer: solution, level: difficulty}``, where
    other names than those above are of what a reward may know. ``pairs``: the form of published pairs of pictures,
    ``pick_a_pic`` or ``hpd`` (``mmrl.data.preferences``); ties among them are left out and counted in a warning.
    ``.bad`` names what was left out. Raises ``UserError``.
    """
    if pairs is not None and pairs not in FORMS:
        raise UserError(f"pairs is {pairs!r}; the forms are {', '.join(FORMS)}")
    named = read_columns(
        Columns(prompt, answer, images, videos, system, negative_prompt, meta), columns, pairs and (BETTER, WORSE)
    )
    file = Path(path)
    home = Path(root) if root else file.parent if file.is_file() else file
    made = _Maker(open_rows(path, source_split, subset), named, str(home), pairs)
    good, digests, bad = _usable(made, MediaChecks(_checks_file(file, path), verify or "decode"), verify)
    warn_of_unread(path, made.keys, named)
    if made.ties:
        warnings.warn(
            f"{path}: {made.ties} of {len(made.rows)} records are ties and left out", TiesLeftOut, stacklevel=2
        )
    if not good:
        raise UserError(f"path: {path} has no record that can be used: {'; '.join(map(str, bad[:5])) or 'it is empty'}")
    chosen = [good[k] for k in in_split(digests, split, heldout, path)]
    return Records(len(chosen), lambda k: made.prompt(chosen[k]), bad, len(good) + len(bad))


def _usable(
    made: _Maker, checks: MediaChecks, verify: Verify | None
) -> tuple[Sequence[int], list[str], list[BadRecord]]:
    """The records that prompts can be made of, the digests of their content, and the others."""
    good = array("q")
    digests: list[str] = []
    bad: list[BadRecord] = []
    rows, folder = made.rows, Path(made.root).resolve()
    for i in range(len(rows)):
        try:
            fields, media = made.parts(i)
            for medium in media if verify or rows.in_files else [m for m in media if m.path]:
                checks.check(medium, medium.path or f"{rows.where(i)}", None if medium.path else _stamp(medium))
        except TieError:
            made.ties += 1
            continue
        except (ValueError, OSError) as error:
            leave_out(bad, rows.where(i), str(error), rows.name)
            continue
        good.append(i)
        shown = (relpath(m.path, folder) if m.path else m.data or "" for m in media)  # wherever the folder lies
        digests.append(digest_of_prompt(fields, *shown))
    checks.save()
    return good, digests, bad


class _Maker:
    """Prompts from the rows of a source."""

    def __init__(self, rows: Rows, columns: Columns, root: str, pairs: str | None) -> None:
        self.rows, self.root = rows, root
        self._columns, self._pairs = columns, pairs
        self.ties = 0
        self.keys: dict[str, None] = {}
        """Of all records that were read."""

    def parts(self, i: int) -> tuple[Fields, list[Media]]:
        """Raises ``ValueError``, for a tie ``TieError``."""
        record = self.rows.row(i)
        fields = read_fields(as_pair(record, self._pairs) if self._pairs else record, self._columns)
        if not self._pairs and len(self.keys) < LIMITS.columns:  # those of pairs are known
            self.keys.update(dict.fromkeys(fields.keys))
        media = [media_from(kind, source, self.root) for kind, source in fields.media]
        make_prompt("", fields, media)
        return fields, media

    def prompt(self, i: int) -> Prompt:
        """Raises ``UserError`` where the source is no longer what it was at the start."""
        try:
            return make_prompt(f"{self.rows.name}:{self.rows.key(i)}", *self.parts(i))
        except (ValueError, OSError) as error:
            raise UserError(f"{self.rows.where(i)} was changed while it was in use ({error}); start again") from error


def _checks_file(file: Path, path: str) -> Path:
    """Where the results of looking at the media are kept; of a data set on the hub, in the cache."""
    name = f".{file.name}.mmrl-checked.json"
    return file.with_name(name) if file.exists() else Path("/hub", path.replace("/", "--"), name)


def _stamp(medium: Media) -> list[int]:
    """Inline bytes by their content."""
    return [len(medium.data or b""), int(digest_of(medium.data or b"")[:13], 16)]

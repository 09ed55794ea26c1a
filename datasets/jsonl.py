"""Records of a JSONL, JSON or Parquet file, or of a data set on the Hugging Face hub, with pictures and clips.

A record has a text (``prompt``, ``question``, ``text``, or ``messages``), perhaps ``answer`` (or ``solution``), which a
reward finds in ``meta["answer"]``, and ``image``, ``images`` or ``video``: paths inside the file's folder, data URLs,
or bytes in a table. The options name other columns.

JSONL is read a line at a time, not through a table: there one bad line would take the file with it, and two answers of
different types would not go into one column. The rest goes through Hugging Face ``datasets``, which runs no code of
the data's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from os.path import relpath
from pathlib import Path
from typing import Any, Literal

from mmrl.datasets.checks import MediaChecks, Verify
from mmrl.datasets.fields import (
    Columns,
    Fields,
    digest_of,
    digest_of_prompt,
    make_prompt,
    media_from,
    parse_json,
    read_fields,
    warn_of_unread,
)
from mmrl.datasets.records import BadRecord, Records, in_split
from mmrl.errors import UserError
from mmrl.media import Media
from mmrl.trajectory import Prompt

_FORMATS = ("json", "csv", "parquet", "arrow", "text", "imagefolder", "videofolder")
"""What a data set on the hub may be made of. Others of ``datasets``' readers unpickle."""


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
    meta: Sequence[str] = (),
) -> Records:
    """The prompts of ``split``, in the order of the source; a record is read when its prompt is asked for.

    ``path``: a ``.jsonl``, ``.json`` or ``.parquet`` file, a folder of Parquet files, or a name on the hub, whose
    ``source_split`` (``train``, ``test``) and ``subset`` are taken. ``heldout``: how many records, or what share of
    them (below 1, rounded up), are held out; 0 gives all of them to either split. ``root``: the folder that media must
    be in, the file's own unless given. ``verify``: how media are looked at before the start, ``decode`` or ``headers``;
    the default is ``decode`` for files and, since it would read a whole table, nothing for media inside one.
    ``prompt``, ``answer``, ``images``, ``videos``, ``system``: columns, ``a.b`` for a key inside another, and several
    of ``images`` for pairs (``[chosen, rejected]``); ``meta``: further columns that a reward may know. ``.bad`` names
    what was left out. Raises ``UserError``.
    """
    columns = Columns(prompt, answer, images, videos, system, meta)
    file = Path(path)
    home = Path(root) if root else file.parent if file.is_file() else file
    if file.suffix.lower() == ".jsonl" or (file.suffix.lower() == ".json" and _is_lines(file)):
        rows: _Lines | _Table = _Lines(file)
    else:
        rows = _Table(path, source_split, subset)
    made = _Maker(rows, columns, str(home))
    checks = MediaChecks(_checks_file(file, path), verify or "decode")
    good: list[int] = []
    digests: list[str] = []
    bad: list[BadRecord] = []
    for i in rows.indices():
        try:
            fields, media = made.parts(i)
            for medium in media if verify or isinstance(rows, _Lines) else [m for m in media if m.path]:
                why = checks.fault(medium, medium.path or f"{rows.where(i)}", None if medium.path else _stamp(medium))
                if why is not None:
                    raise ValueError(why)
        except ValueError as error:
            bad.append(BadRecord(rows.where(i), str(error)))
            continue
        good.append(i)
        shown = (relpath(m.path, home.resolve()) if m.path else m.data or "" for m in media)  # wherever the folder lies
        digests.append(digest_of_prompt(fields, *shown))
    checks.save()
    warn_of_unread(path, made.keys, columns)
    if not good:
        raise UserError(f"path: {path} has no record that can be used: {'; '.join(map(str, bad[:5])) or 'it is empty'}")
    chosen = [good[k] for k in in_split(digests, split, heldout, path)]
    return Records(len(chosen), lambda k: made.prompt(chosen[k]), bad, len(good) + len(bad))


class _Lines:
    """A JSONL file: where each line that is not blank begins, and the line itself when it is asked for."""

    def __init__(self, file: Path) -> None:
        self.name = file.stem
        self._file = file
        self._lines: list[tuple[int, int, int]] = []
        """Number from 1, first byte, bytes."""
        try:
            with file.open("rb") as lines:
                at = 0
                for number, line in enumerate(lines, start=1):
                    if line.strip():
                        self._lines.append((number, at, len(line)))
                    at += len(line)
        except OSError as error:
            raise UserError(f"path: {file} cannot be read ({error.strerror}); correct the path") from error

    def indices(self) -> Iterator[int]:
        return iter(range(len(self._lines)))

    def where(self, i: int) -> str:
        return f"{self._file.name}:{self._lines[i][0]}"

    def key(self, i: int) -> int:
        return self._lines[i][0]

    def row(self, i: int) -> Any:
        """Raises ``ValueError``."""
        number, at, size = self._lines[i]
        with self._file.open("rb") as file:
            file.seek(at)
            line = file.read(size)
        return parse_json(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


class _Table:
    """A table that Hugging Face ``datasets`` reads, its media as they are stored."""

    def __init__(self, path: str, source_split: str, subset: str | None) -> None:
        self.name = Path(path).stem
        self._where = Path(path).name
        self._rows = _load_table(path, source_split, subset).with_format("arrow")

    def indices(self) -> Iterator[int]:
        return iter(range(len(self._rows)))

    def where(self, i: int) -> str:
        return f"{self._where} row {i}"

    def key(self, i: int) -> int:
        return i

    def row(self, i: int) -> Any:
        return self._rows[i].to_pylist()[0]


class _Maker:
    """Prompts from the rows of a source."""

    def __init__(self, rows: _Lines | _Table, columns: Columns, root: str) -> None:
        self._rows, self._columns, self._root = rows, columns, root
        self.keys: dict[str, None] = {}
        """Of all records that were read."""

    def parts(self, i: int) -> tuple[Fields, list[Media]]:
        """Raises ``ValueError``."""
        record = self._rows.row(i)
        fields = read_fields(record, self._columns)
        self.keys.update(dict.fromkeys(record))
        media = [media_from(kind, source, self._root) for kind, source in fields.media]
        make_prompt("", fields, media)
        return fields, media

    def prompt(self, i: int) -> Prompt:
        """Raises ``UserError`` where the source is no longer what it was at the start."""
        try:
            return make_prompt(f"{self._rows.name}:{self._rows.key(i)}", *self.parts(i))
        except (ValueError, OSError) as error:
            raise UserError(f"{self._rows.where(i)} was changed while it was in use ({error}); start again") from error


def _load_table(path: str, source_split: str, subset: str | None) -> Any:
    """A Hugging Face ``Dataset``. Raises ``UserError``."""
    import datasets

    file = Path(path)
    kind = {".json": "json", ".parquet": "parquet"}.get(file.suffix.lower())
    files = [str(file)] if file.is_file() else sorted(map(str, file.glob("*.parquet"))) if file.is_dir() else []
    if (file.is_file() and kind is None) or (file.is_dir() and not files):
        raise UserError(f"path: {path} is no .jsonl, .json or .parquet file, nor a folder of .parquet; convert it")
    try:
        if files:
            return datasets.load_dataset(kind or "parquet", data_files=files, split="train")
        builder = datasets.load_dataset_builder(path, subset, trust_remote_code=False)
        if type(builder).__module__.split(".")[-1] not in _FORMATS:
            raise UserError(
                f"path: {path} on the hub is no plain table ({type(builder).__module__}); convert it to JSONL"
            )
        builder.download_and_prepare()
        return builder.as_dataset(split=source_split)
    except UserError:
        raise
    except Exception as error:  # of the network, the hub and every reader of a format
        first = str(error).strip().splitlines()[:1]
        raise UserError(
            f"path: {path} cannot be read as a data set ({type(error).__name__}: {''.join(first)}); name a .jsonl, "
            ".json or .parquet file, or a data set and a source_split that the hub has"
        ) from error


def _is_lines(file: Path) -> bool:
    """Whether a ``.json`` file begins as an object: an object a line."""
    try:
        with file.open("rb") as opened:
            return opened.read(4096).removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"{"
    except OSError as error:
        raise UserError(f"path: {file} cannot be read ({error.strerror}); correct the path") from error


def _checks_file(file: Path, path: str) -> Path:
    """Where the results of looking at the media are kept; of a data set on the hub, in the cache."""
    name = f".{file.name}.mmrl-checked.json"
    return file.with_name(name) if file.exists() else Path("/hub", path.replace("/", "--"), name)


def _stamp(medium: Media) -> list[int]:
    """Inline bytes by their content."""
    return [len(medium.data or b""), int(digest_of(medium.data or b"")[:13], 16)]

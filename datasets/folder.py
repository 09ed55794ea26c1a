"""A folder of pictures or clips with their texts: ``metadata.jsonl``, or ``name.txt`` beside ``name.png``.

- ``metadata.jsonl``, as Hugging Face's imagefolder has it: a JSON object a line, whose ``file_name`` (or
  ``file_names``, a list) is relative to it, with ``prompt``, ``question`` or ``text``, ``answer`` and ``meta``.
  ``metadata.csv`` has the same as columns.
- without it, every picture or clip with a text of the same name: ``cat.png`` with ``cat.txt`` or ``cat.caption`` (the
  prompt) or ``cat.json`` (``prompt``, ``answer``, ``meta``). Folders inside are read too.

Where the folder has folders called ``train`` and ``heldout``, they are the splits. Nothing outside the folder is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from os.path import lexists, relpath
from pathlib import Path
from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.json_types import Cell, Json
from mmrl.core.media import KINDS
from mmrl.core.trajectory import Prompt
from mmrl.core.untrusted import is_text, parse_json, printable, read_file, resolved, walk
from mmrl.data.checks import MediaChecks, Verify
from mmrl.data.fields import Columns, digest_of_prompt, make_prompt, read_fields, warn_of_unread
from mmrl.data.limits import LIMITS
from mmrl.data.record_media import media_from
from mmrl.data.records import BadRecord, Records, check_split, in_split, leave_out
from mmrl.data.text_rows import open_text

_BESIDE = (".json", ".txt", ".caption")
"""Files with the text of a picture or clip, in the order they are looked for."""


def prompts(
    split: Literal["train", "heldout"] = "train",
    *,
    path: str,
    heldout: float = 0.1,
    verify: Verify = "decode",
    prompt: str | None = None,
    answer: str | None = None,
    meta: list[str] | None = None,
    caption: str | None = None,
) -> Records:
    """The prompts of ``split``, in the order of ``metadata.jsonl``, or of the files' names.

    ``heldout``: how many records (an integer), or what share of them (a fraction below 1, rounded up), are held out;
    it has no meaning where there are folders named after the splits. ``verify`` is how the media are looked at, once:
    the results are kept in the folder. ``prompt``, ``answer`` and ``meta`` name keys other than the usual. ``caption``:
    the text of every picture or clip that has no file beside it. ``.bad`` names what was left out. Raises ``UserError``
    for a folder with nothing in it.
    """
    root = Path(path)
    if not root.is_dir():
        raise UserError(f"path: {path} is no folder; name one with pictures or clips in it")
    check_split(split, "the data set has")
    named = (root / split).is_dir()
    root = _inside(root / split, root) if named else root
    columns = Columns(prompt, answer, meta=meta or ())
    checks = MediaChecks(root / ".mmrl-checked.json", verify)
    found: list[Prompt] = []
    digests: list[str] = []
    bad: list[BadRecord] = []
    keys: dict[str, None] = {}
    for where, record in _records(root):
        try:
            made = _prompt(where, record, root, columns, keys, caption)
            for medium in made.media:
                checks.check(medium, str(Path(medium.path or "").relative_to(root.resolve())))
        except (ValueError, OSError) as error:
            leave_out(bad, where, str(error), path)
            continue
        found.append(made)
        shown = (relpath(m.path, root.resolve()) for m in made.media if m.path)  # wherever the folder lies
        digests.append(digest_of_prompt(made, *shown))
    checks.save()
    warn_of_unread(path, keys, columns)
    if not found:
        raise UserError(
            f"path: {root} has no record that can be used ({'; '.join(map(str, bad[:5])) or 'it has no media'}); put "
            "metadata.jsonl there, or a .txt beside each picture, or give all one text (caption: a drawing of mine)"
        )
    chosen = [found[i] for i in in_split(digests, split, 0 if named else heldout, path)]
    return Records(len(chosen), chosen.__getitem__, bad, len(found) + len(bad))


def _records(root: Path) -> Iterator[tuple[str, Callable[[], Cell] | Path]]:
    """Where each record stands, and what reads it, or the picture or clip that it is of."""
    for metadata in (root / "metadata.jsonl", root / "metadata.csv"):
        if lexists(metadata):
            rows = open_text(metadata, root)
            yield from ((rows.where(i), partial(rows.row, i)) for i in range(len(rows)))
            return
    try:
        files = walk(root)
    except OSError as error:
        raise UserError(f"path: {printable(str(error.filename))} cannot be read ({error.strerror})") from error
    for file in files:
        if file.suffix[1:].lower() in KINDS and not file.name.startswith("."):
            yield printable(str(file.relative_to(root)), 4096), file


def _prompt(
    where: str,
    source: Callable[[], Cell] | Path,
    root: Path,
    columns: Columns,
    keys: dict[str, None],
    caption: str | None,
) -> Prompt:
    """Notes the record's ``keys``. Raises ``ValueError``."""
    if not isinstance(source, Path):
        record = source()
        names = _names(record)
    else:
        record, names = _beside(source, root, caption), [str(source.relative_to(root))]
    fields = read_fields(record, columns)
    if len(keys) < LIMITS.columns:
        keys.update(dict.fromkeys(fields.keys))
    media = []
    for name in names:
        kind = KINDS.get(Path(name).suffix[1:].lower())
        if kind is None:
            raise ValueError(f"{printable(name)!r} has the name of neither a picture nor a clip")
        if not is_text(name):
            raise ValueError(f"the name {printable(name)!r} is no text in UTF-8; rename the file")
        media.append(media_from(kind, name, str(root)))
    return make_prompt(f"{root.name}/{where}", fields, media)


def _names(record: Json) -> list[str]:
    """The files of a record. Raises ``ValueError``."""
    said = (record.get("file_names") or [record.get("file_name")]) if isinstance(record, dict) else None
    names = [name for name in said if isinstance(name, str) and name] if isinstance(said, list) else []
    if not names or names != said:
        raise ValueError('has no file under "file_name" (or a list of them under "file_names")')
    return names


def _beside(file: Path, root: Path, caption: str | None) -> Json:
    """The record that stands in the text file of the same name. Raises ``ValueError``, ``OSError``."""
    for suffix in (*_BESIDE, *map(str.upper, _BESIDE)):
        text = file.with_suffix(suffix)
        if lexists(text):
            try:
                data = read_file(text, most=LIMITS.beside, root=root)
                return parse_json(data) if suffix.lower() == ".json" else {"prompt": data.decode("utf-8-sig")}
            except OSError as error:
                raise ValueError(f"{text.name} is not read: {error.strerror}") from None
            except UnicodeDecodeError:
                raise ValueError(f"{text.name} is not UTF-8") from None
    if caption is not None:
        return {"prompt": caption}
    raise ValueError(f"has no {file.stem}.txt, {file.stem}.caption or {file.stem}.json beside it")


def _inside(folder: Path, root: Path) -> Path:
    """``folder``, which must be in ``root``. Raises ``UserError``."""
    try:
        resolved(folder, root)
    except OSError as error:
        raise UserError(f"path: {folder} is not read: {error.strerror}") from error
    return folder

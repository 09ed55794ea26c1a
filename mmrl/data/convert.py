"""Published sets of prompts for pictures, from the files that their authors distribute, as JSONL that ``jsonl`` reads.

None of them is shipped: a user downloads the file and keeps to its licence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.data.fields import clean_text
from mmrl.data.records import BadRecord
from mmrl.data.rows import Rows
from mmrl.data.sources import open_rows
from mmrl.data.text_rows import Csv


@dataclass(frozen=True)
class PromptSet:
    """``source``: where the file is, ``licence``: of the file. ``read``: a record's text and what a reward may know;
    raises ``ValueError``."""

    source: str
    licence: str
    read: Callable[[Mapping[str, Any]], tuple[Any, dict[str, Any]]]


def convert(name: str, file: Path, out: Path, *, overwrite: bool = False) -> tuple[int, list[BadRecord]]:
    """Write the prompts of the set ``name`` in ``file`` to ``out``; returns how many, and what was left out.

    Raises ``UserError`` for an unknown set, a file of another kind, and one that is there already.
    """
    kind = SETS.get(name)
    if kind is None:
        raise UserError(f"there is no set of prompts {name!r}; there are {', '.join(SETS)}")
    if not file.is_file():
        raise UserError(f"{file} is no file; download it from {kind.source}")
    if out.exists() and not overwrite:
        raise UserError(f"{out} exists; name another file with --out, or give --overwrite")
    rows = Csv(file, "\t", quoted=False) if name == "partiprompts" else open_rows(str(file), "train", None)
    lines, bad = _lines(rows, kind)
    if not lines:
        why = "; ".join(map(str, bad[:3])) or "it is empty"
        raise UserError(f"{file} has no prompt of {name} ({why}); download it from {kind.source}")
    write_atomic(out, "".join(f"{line}\n" for line in lines))
    return len(lines), bad


def _lines(rows: Rows, kind: PromptSet) -> tuple[list[str], list[BadRecord]]:
    lines: list[str] = []
    bad: list[BadRecord] = []
    for i in range(len(rows)):
        try:
            record = rows.row(i)
            if not isinstance(record, Mapping):
                raise ValueError("is no object")
            text, meta = kind.read(record)
            if not isinstance(text, str):
                raise ValueError("has no prompt")
            lines.append(json.dumps({"prompt": clean_text(text), "meta": meta}, ensure_ascii=False, allow_nan=False))
        except ValueError as error:
            bad.append(BadRecord(rows.where(i), str(error)))
    return lines, bad


def _geneval(record: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """``tag``, ``include`` and ``exclude`` as the reward ``geneval`` reads them."""
    include = record.get("include")
    if not isinstance(record.get("tag"), str) or not isinstance(include, list) or not include:
        raise ValueError("has no tag and include, which GenEval's evaluation_metadata.jsonl has")
    exclude = record.get("exclude", [])
    if not isinstance(exclude, list) or not all(map(_is_wish, [*include, *exclude])):
        raise ValueError("has an entry without class and count in include or exclude")
    return record.get("prompt"), {"tag": record["tag"], "include": include, "exclude": exclude}


def _is_wish(entry: Any) -> bool:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("class"), str):
        return False
    return isinstance(entry.get("count"), int) and not isinstance(entry["count"], bool)


def _row(record: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A row of a table, the names of whose columns may begin with capitals. PartiPrompts alone has all of ``meta``."""
    lower = {str(key).lower(): value for key, value in record.items()}
    meta = {name: lower[name] for name in ("category", "challenge", "note") if lower.get(name) is not None}
    return lower.get("prompts") or lower.get("prompt"), meta


SETS: Mapping[str, PromptSet] = {
    "geneval": PromptSet("github.com/djghosh13/geneval, prompts/evaluation_metadata.jsonl", "MIT", _geneval),
    "partiprompts": PromptSet("github.com/google-research/parti, PartiPrompts.tsv", "Apache-2.0", _row),
    "drawbench": PromptSet(
        "imagen.research.google (a table with the columns Prompts and Category, saved as CSV)", "not stated", _row
    ),
}
"""By the name that the command takes."""

"""What ``mmrl init`` finds out about data: which data set reads it, and which column is taken as what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import expanduser, relpath
from pathlib import Path

from mmrl.config.data import Data
from mmrl.config.drop_ins import missing_drop_in, split_file
from mmrl.config.errors import did_you_mean
from mmrl.config.names import is_hub_data
from mmrl.core.errors import UserError, first_of
from mmrl.core.json_types import Cell, Json
from mmrl.data.fields import ANSWER, IMAGES, PAIR, TEXT, VIDEOS, Columns, unread
from mmrl.data.loading import load_data
from mmrl.data.rows import Rows
from mmrl.data.sources import KINDS, open_rows
from mmrl.planner.data_check import data_at

LOOKED_AT = 20
"""Records that columns and kinds of values are found from."""
MOST_META = 12
"""Columns that are neither prompt nor answer and go to the rewards; of a wider table the user picks some."""
_READERS = ("jsonl", "prompts", "folder", "shards")
"""Data sets that ``data_at`` chooses by what the path is."""
_USUAL = {"prompt": TEXT, "answer": ANSWER, "images": IMAGES, "videos": VIDEOS}
_ALIKE = {
    "prompt": ("problem", "instruction", "query", "input", "caption", "captions", "description"),
    "answer": ("answers", "target", "output", "response", "ground_truth", "final_answer"),
    "images": ("picture", "pictures", "photo", "img", "image_path"),
    "videos": ("clip", "clips", "video_path"),
}
"""What others call these columns."""


@dataclass
class FirstData:
    """``options``: of both splits. ``columns``: what is taken as what, as the data calls it; ``renamed``: what of it
    the recipe has to say. ``answers``: some of them. ``media``: the kinds that prompts carry. ``said``: lines for the
    user. ``known``: whether its records could be looked at."""

    name: str
    options: dict[str, Json] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    answers: list[Cell] = field(default_factory=list)
    media: list[str] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    known: bool = True


class UnknownColumnError(UserError):
    """It is not clear which column is the prompt; ``texts`` are the columns with texts."""

    def __init__(self, message: str, texts: Sequence[str]) -> None:
        super().__init__(message)
        self.texts = list(texts)


def look_at_data(target: str, home: Path, prompt: str | None = None, answer: str | None = None) -> FirstData:
    """Read the first records of ``target``: a file, a folder, a data set of ours or the hub's, or ``file.py:function``.

    ``home``: the recipe's folder, from which its paths start. ``prompt``, ``answer``: columns that the user names.
    Raises ``UnknownColumnError`` where texts are in several columns and none has a usual name, and ``UserError`` where
    the data cannot be found or has no text.
    """
    target = expanduser(target)
    _must_exist(target)
    data = data_at(target, {})
    if data.name == "jsonl" or is_hub_data(data.name):
        return _of_table(target, data, home, {"prompt": prompt, "answer": answer})
    given = next((f"--{name}-column" for name, value in (("prompt", prompt), ("answer", answer)) if value), None)
    if given is not None:
        raise UserError(f"{given}: {target} is no table with columns; leave it out")
    return _of_prompts(target, data, home)


def in_recipe(path: str | Path, home: Path) -> str:
    """``path`` as a recipe in the folder ``home`` names it."""
    if Path(path).is_absolute():
        return str(path)
    short = Path(relpath(path, home)).as_posix()
    return f"./{short}" if Path(path).is_dir() and not short.startswith(".") else short


def _must_exist(target: str) -> None:
    path, suffixes = Path(target), (".jsonl", ".json", ".csv", ".tsv", ".parquet", ".txt")
    if path.exists():
        if path.is_file() and path.suffix.lower() not in (*suffixes, ".py"):
            raise UserError(f"--data: {target} is no {KINDS} file, nor .txt with a prompt a line; convert it")
        return
    if path.suffix.lower() in suffixes or target.startswith((".", "/")):
        raise UserError(f"--data: there is no {target!r} (looked in the current folder); correct the path")
    if target in _READERS:
        raise UserError(f"--data: {target} reads files: name the file or the folder, and the recipe gets {target}")
    if not is_hub_data(target) and (wrong := missing_drop_in("datasets", target, "looked in the current folder")):
        raise UserError(f"--data: {wrong}")


def _of_prompts(target: str, data: Data, home: Path) -> FirstData:
    """A data set with no columns to choose from."""
    options: dict[str, Json] = dict(data.train)
    if "path" in options:
        options |= {"path": in_recipe(target, home), "heldout": 0.1}
    file, attribute = split_file(data.name)
    name = data.name if file is None else ":".join(filter(None, (in_recipe(file, home), attribute)))
    prompts = load_data(data.model_copy(update={"max_bad_fraction": 1.0}), "train")
    shown = [prompts[i] for i in range(min(LOOKED_AT, len(prompts)))]
    answers = [said for one in shown if (said := one.meta.get("answer")) is not None]
    media = sorted({medium.kind for one in shown for medium in one.media})
    said = [f"{len(prompts)} prompts, read by {data.name}, such as {shown[0].text[:60]!r}"]
    return FirstData(name, options, {}, {}, answers, media, said)


def _of_table(target: str, data: Data, home: Path, given: Mapping[str, str | None]) -> FirstData:
    if data.name == "jsonl":
        options: dict[str, Json] = {"path": in_recipe(target, home), "heldout": 0.1}
    else:
        options = {"split": "train", "heldout": 0.1}
    found = FirstData(data.name, options)
    try:
        rows = open_rows(str(data.train.get("path", target)), "train", None)
    except UserError as error:
        if data.name == "jsonl":
            raise
        found.known = False
        found.said.append(f"its columns are not known: {error}")
        found.renamed = {name: column for name, column in given.items() if column}
        return found
    records = list(_first(rows))
    keys = list(dict.fromkeys(key for record in records for key in record))
    if not records:
        raise UserError(f"--data: {target} has no record; write one a line, with a prompt")
    for name, wanted in given.items():
        if wanted is not None and wanted not in keys:
            raise UserError(f"--{name}-column: {target} has no column {wanted!r}{did_you_mean(wanted, keys)}  ({keys})")
    for name in _USUAL:
        _choose(found, name, given.get(name), keys, records, target)
    column = found.columns.get("answer")
    found.answers = [record[column] for record in records if record.get(column) is not None] if column else []
    found.media = [kind for kind, name in (("image", "images"), ("video", "videos")) if name in found.columns]
    shown = (
        ", ".join(f"{name} from {column!r}" for name, column in found.columns.items()) or "prompt from both of pairs"
    )
    found.said.append(f"{len(rows)} records: {shown}")
    if unused := unread([key for key in keys if key not in found.columns.values()], Columns()):
        listed = first_of(unused, MOST_META)
        if data.name == "jsonl" and len(unused) <= MOST_META:
            options["meta"] = list(unused)
            found.said.append(f"for rewards, in sample.prompt.meta: {listed}")
        else:
            found.said.append(f"not used: {listed} (a reward gets a column by meta: [COLUMN])")
    return found


def _first(rows: Rows) -> Iterator[Mapping[str, Cell]]:
    """The first records that can be read."""
    for i in range(min(LOOKED_AT, len(rows))):
        try:
            record = rows.row(i)
        except ValueError:  # the plan counts and names it
            continue
        if isinstance(record, Mapping):
            yield record


def _choose(
    found: FirstData,
    name: str,
    wanted: str | None,
    keys: Sequence[str],
    records: Sequence[Mapping[str, Cell]],
    target: str,
) -> None:
    """Take a column as ``name``, where there is one. Raises ``UserError`` where there is none for the prompt."""
    usual = [key for key in _USUAL[name] if any(record.get(key) is not None for record in records)]
    column = wanted or next(iter(usual), None)
    if column is None and name == "prompt" and any(isinstance(record.get(PAIR[0]), list) for record in records):
        return  # the messages that both of a pair begin with
    if column is None:
        alike = (*_USUAL[name], *_ALIKE[name])
        filled = [key for key in keys if any(record.get(key) is not None for record in records)]
        column = next((key for word in alike for key in filled if key.lower() == word), None)
    if column is None and name == "prompt":
        column = _only_text(target, keys, records)
    if column is not None:
        found.columns[name] = column
        if column != next(iter(usual), None):
            found.renamed[name] = column


def _only_text(target: str, keys: Sequence[str], records: Sequence[Mapping[str, Cell]]) -> str:
    texts = [key for key in keys if any(_is_text(record.get(key)) for record in records)]
    if len(texts) == 1:
        return texts[0]
    if not texts:
        raise UserError(
            f"--data: {target} has no column of text for the prompt; it has {', '.join(keys)}; add a column prompt"
        )
    raise UnknownColumnError(
        f"--data: which column of {target} is the prompt? None is called {', '.join(TEXT)}; add --prompt-column with "
        f"one of {', '.join(texts)}",
        texts,
    )


def _is_text(value: Cell) -> bool:
    return isinstance(value, str) and any(c.isalpha() for c in value)

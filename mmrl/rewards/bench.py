"""Run one reward on a folder of pictures or clips, or on a file of responses (``mmrl score``), for its author.

A row per sample, then mean, spread, time per sample and memory. What cannot be read is skipped, counted and named. Off
a terminal the rows are tab-separated. Imports no torch unless the reward does.
"""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.grouping import grouped
from mmrl.core.json_types import JsonObject
from mmrl.core.media import KINDS, BadMediaError, Media, open_clip
from mmrl.core.media.images import BadImageError, frames_of, read_rgb, to_tensor
from mmrl.core.media.sound import BadSoundError, read_wav
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Audio, Prompt, Sample, SampleId
from mmrl.data.fields import COMPLETION, Columns, UnreadColumns, unread
from mmrl.data.rows import Rows
from mmrl.data.sources import open_rows
from mmrl.rewards.calling import Caller
from mmrl.rewards.loading import Found, build, find

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".avif"),
    *(f".{suffix}" for suffix, kind in KINDS.items() if kind == "video"),
)
RESPONSE = ("response", COMPLETION)
"""The columns that may have the responses."""
_TIMEOUT_S = 600.0
_SAMPLING_S = 0.005


@dataclass(frozen=True)
class Item:
    """What is scored: its name, its prompt, and how its content is read. ``read`` gets what the reward asks for, and
    returns fields of ``Sample`` and a note; it raises ``BadImageError``. ``why``: why there is no prompt."""

    name: str
    prompt: Prompt | None
    read: Callable[[Collection[str]], tuple[dict[str, Any], str | None]]
    why: str = "no prompt for it in the prompts file"


@dataclass(frozen=True)
class Row:
    """One sample: its score (None where there is none), named parts, what to note, and seconds of its call."""

    file: str
    score: float | None
    parts: dict[str, float]
    note: str
    seconds: float | None = None


@dataclass(frozen=True)
class Measured:
    """The rows, and what scoring took. ``memory_mib``: growth of this process at its peak; ``device_mib``: the
    peak on an accelerator, None without one."""

    reward: str
    device: str
    rows: list[Row]
    memory_mib: float
    device_mib: float | None
    of: str = "picture"

    @property
    def scores(self) -> list[float]:
        return [row.score for row in self.rows if row.score is not None]

    @property
    def unscored(self) -> int:
        return len(self.rows) - len(self.scores)

    def named(self, what: str) -> list[str]:
        """The files that were ``skipped``, or whose score ``failed``."""
        return [row.file for row in self.rows if row.note.startswith(what)]

    def as_json(self) -> JsonObject:
        """For ``--json`` (docs/reference/json.md)."""
        scores, times = self.scores, [row.seconds for row in self.rows if row.seconds is not None]
        return {
            "reward": self.reward,
            "device": self.device,
            "scored": len(scores),
            "mean": statistics.fmean(scores) if scores else None,
            "min": min(scores, default=None),
            "max": max(scores, default=None),
            "seconds_per_picture": statistics.median(times) if times else None,
            "seconds_of_the_first": times[0] if times else None,
            "memory_mib": self.memory_mib,
            "device_memory_mib": self.device_mib,
            "skipped": self.named("skipped"),
            "failed": self.named("failed"),
            "rows": [vars(row) for row in self.rows],
        }


def show(measured: Measured, console: Console | None = None) -> int:
    """Print the table of what was ``measured``. Returns how many samples have no score."""
    console = console or Console()
    _print(console, measured.rows)
    _summary(console, measured)
    return measured.unscored


def pictures(images: Path, prompts: Path | None = None) -> list[Item]:
    """The pictures and clips of a folder.

    ``prompts``: a text file (a line per picture, in the order of their names), or JSON or JSONL records
    ``{"file", "prompt", "meta"}``. Raises ``UserError`` when the folder or the prompts cannot be used.
    """
    files = _files(images)
    told = _prompts(prompts, files)
    return [Item(file.name, told.get(file.name), partial(_picture, file)) for file in files]


def responses(path: Path) -> list[Item]:
    """The responses of a file of records, as the data set ``jsonl`` reads them: each has a prompt, ``response`` (or
    ``completion``, as TRL calls it), and further columns, which the reward finds in the prompt's ``meta``.

    Raises ``UserError`` when the file cannot be used.
    """
    if not path.exists():
        raise UserError(f"{path} does not exist; give --responses a .jsonl, .json, .csv, .tsv or .parquet file")
    every, some = _columns(open_rows(str(path), "train", None))
    column = next((name for name in RESPONSE if name in some), None)
    if column is None:
        raise UserError(
            f"{path}: its records have {', '.join(some[:9]) or 'no columns'}; name the column with the responses "
            f"{' or '.join(RESPONSE)}"
        )
    asked = Columns(meta=[column])
    if lost := unread((name for name in some if name not in every), asked):
        told = f"{', '.join(lost)}: not in every record, so the reward does not get it; add it to the others"
        warnings.warn(f"{path}: {told}", UnreadColumns, stacklevel=2)
    meta = [*({column} - {COMPLETION}), *unread(every, asked)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnreadColumns)  # said above
        found = mmrl.load("datasets", "jsonl").prompts("heldout", path=str(path), heldout=0, meta=meta)
    bad = [Item(one.where, None, _nothing, one.why) for one in found.bad]
    return [*(_response(prompt, column) for prompt in found), *bad]


def _columns(rows: Rows) -> tuple[list[str], list[str]]:
    """The columns that every record has, and those that any has, of the records that are mappings."""
    records = list[list[str]]()
    for i in range(len(rows)):
        with suppress(ValueError):
            record = rows.row(i)
            records += [[*record]] if isinstance(record, Mapping) else []
    some = [*dict.fromkeys(name for names in records for name in names)]
    return [name for name in some if all(name in names for names in records)], some


def _response(prompt: Prompt, column: str) -> Item:
    said = prompt.meta[column]
    if isinstance(said, Sequence) and not isinstance(said, str):  # messages: the last is the response
        said = said[-1].get("content") if said and isinstance(said[-1], Mapping) else None
    known = replace(prompt, meta={name: value for name, value in prompt.meta.items() if name != column})
    if not isinstance(said, str):
        return Item(prompt.id, None, _nothing, f"its {column} is no text")
    return Item(prompt.id, known, lambda inputs: ({"text": said}, None))


def _nothing(inputs: Collection[str]) -> tuple[dict[str, Any], str | None]:
    return {}, None


def measure(
    name: str,
    items: Sequence[Item],
    options: JsonObject | None = None,
    *,
    device: str = "cpu",
    bar: Console | None = None,
    of: str = "picture",
) -> Measured:
    """Score ``items``, each ``of`` this kind; ``bar`` is where the progress goes, None shows none. Raises ``UserError``
    when the reward cannot be used."""
    found = find(name)
    _refuse_other_kind(found, found.reads(options or {}), of)
    with _PeakMemory() as memory:
        caller = Caller(build(found, dict(options or {})).awake(device), _TIMEOUT_S)
        shown = Console(stderr=True, quiet=bar is None or not bar.is_terminal)  # beside the table, and nowhere else
        rows = list(track(_rows(caller, items, device), "scoring", len(items), console=shown))
        caller.close()
    return Measured(name, device, rows, memory.growth_mib, _device_mib(device), of)


def _refuse_other_kind(reward: Found, inputs: Sequence[str], of: str) -> None:
    """Raise ``UserError`` where the reward reads what samples ``of`` this kind do not have."""
    if "tokens" in inputs:
        raise UserError(f"{reward.name} reads tokens, which only a run samples; name it in the rewards of a recipe")
    if of == "response" and "text" not in inputs:
        edit = f"declare what it reads at {reward.place}: @mmrl.reward(inputs=('text',)), or give --images"
        raise UserError(f"{reward.name} reads {', '.join(inputs)}, and a response has text; {edit}")
    if of == "picture" and [*inputs] == ["text"]:
        raise UserError(f"{reward.name} reads text, and a picture has none; give --responses in place of --images")


def _rows(caller: Caller, items: Sequence[Item], device: str) -> Iterator[Row]:
    """Rows in the items' order; a reward per group gets the samples of equal prompts together."""
    if caller.reward.declaration.per == "sample":
        for i, item in enumerate(items):
            yield from _score_together(caller, [(i, item)], device)
        return

    groups = grouped(("" if one.prompt is None else one.prompt.text, (i, one)) for i, one in enumerate(items))
    rows = [row for group in groups.values() for row in _score_together(caller, group, device)]
    place = {item.name: i for i, item in enumerate(items)}
    yield from sorted(rows, key=lambda row: place[row.file])


def _score_together(caller: Caller, batch: list[tuple[int, Item]], device: str) -> Iterator[Row]:
    samples: list[Sample] = []
    notes: list[str | None] = []
    for i, item in batch:
        if item.prompt is None:
            yield Row(item.name, None, {}, f"skipped: {item.why}")
            continue
        try:
            content, note = item.read(caller.reward.declaration.inputs)
        except BadImageError as error:
            yield Row(item.name, None, {}, f"skipped: {error}")
            continue
        samples.append(Sample(item.prompt, SampleId(-1, i, 0, 0), **content))
        notes.append(note)
    if not samples:
        return
    began = time.perf_counter()
    answer = caller.one(samples, Context(-1, device))
    seconds = (time.perf_counter() - began) / len(samples)
    names = {i: item.name for i, item in batch}
    for j, sample in enumerate(samples):
        reason = answer.reasons[j]
        parts = {key: values[j] for key, values in answer.parts.items()}
        score = None if math.isnan(answer.total[j]) else answer.total[j]
        note = f"failed: {reason}" if reason else notes[j] or ""
        yield Row(names[sample.id.slot], score, parts, note, seconds)


def _picture(file: Path, inputs: Collection[str]) -> tuple[dict[str, Any], str | None]:
    clip = _read_clip(file) if "video" in inputs else None
    image, note = (None, None) if clip else read_rgb(file)
    tensor = to_tensor(image) if image is not None and "tensor" in inputs else None
    sound = _read_sound(file) if "audio" in inputs else None
    return {"image": image, "tensor": tensor, "video": clip, "audio": sound}, note


def _read_sound(clip: Path) -> Audio:
    """The sound of a clip: the WAV file of its name. Raises ``BadImageError``."""
    file = clip.with_suffix(".wav")
    try:
        return Audio(*read_wav(file.read_bytes()))
    except (OSError, BadSoundError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise BadImageError(f"the reward hears, and of {file.name} beside it: {why}") from None


def _read_clip(source: Path) -> tuple[Image.Image, ...]:
    """The frames of a video, or of a picture that moves, as RGB. Raises ``BadImageError``, and ``UserError`` where a
    video's decoder is not installed."""
    if KINDS.get(source.suffix.lower().removeprefix(".")) == "video":
        try:
            return tuple(open_clip(Media("video", str(source))).frames)
        except BadMediaError as error:
            raise BadImageError(str(error)) from error
    first, _ = read_rgb(source)  # checks the size
    with Image.open(source) as image:
        try:
            return tuple(frames_of(image)) or (first,)
        except Exception as error:  # as in read_rgb
            raise BadImageError(f"not a readable picture: {error}") from error


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; give --images a folder of pictures")
    found = sorted(p for p in folder.iterdir() if p.suffix.lower() in SUFFIXES and p.is_file())
    if not found:
        raise UserError(f"{folder} holds no pictures ({', '.join(SUFFIXES)}); give --images another folder")
    return found


def _prompts(path: Path | None, files: list[Path]) -> dict[str, Prompt]:
    """The prompt of each file; with no prompts file, the empty one for all."""
    if path is None:
        return {file.name: Prompt(file.name, "") for file in files}
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read the prompts file {path}: {error}") from error
    if path.suffix.lower() in (".json", ".jsonl"):
        return _records(path, text)
    lines = text.rstrip().splitlines()
    if len(lines) != len(files):
        raise UserError(
            f"{path} has {len(lines)} lines for {len(files)} pictures (the first is {files[0].name}); write a line for "
            'each in the order of their names, or JSONL records {"file", "prompt", "meta"}'
        )
    return {file.name: Prompt(file.name, line.strip()) for file, line in zip(files, lines, strict=True)}


def _records(path: Path, text: str) -> dict[str, Prompt]:
    try:
        if path.suffix.lower() == ".jsonl":
            records = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            records = json.loads(text)
        return {
            r["file"]: Prompt(r["file"], str(r.get("prompt", "")), dict(r.get("meta") or {}))
            for r in records
            if isinstance(r["file"], str)
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f'{path}: {type(error).__name__}: {error}; write a list of records {{"file", "prompt", "meta"}}'
        ) from error


def _print(console: Console, rows: list[Row]) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row.parts))
    noted = any(row.note for row in rows)
    header = ["file", "score", *names, *(["note"] if noted else [])]
    cells = [
        [row.file, _text(row.score), *(_text(row.parts.get(n)) for n in names), *([row.note] if noted else [])]
        for row in rows
    ]
    if not console.is_terminal:
        for line in [header, *cells]:
            print("\t".join(" ".join(cell.split()) for cell in line), file=console.file)  # console would expand tabs
        return
    table = Table()
    for i, column in enumerate(header):
        table.add_column(escape(column), justify="left" if i == 0 or column == "note" else "right")
    for line in cells:
        table.add_row(*map(escape, line))
    console.print(table)


def _summary(console: Console, measured: Measured) -> None:
    scores = measured.scores
    if scores:
        console.out(
            f"{len(scores)} scored: mean {_text(statistics.fmean(scores))}, "
            f"min {_text(min(scores))}, max {_text(max(scores))}",
            highlight=False,
        )
    times = [row.seconds for row in measured.rows if row.seconds is not None]
    if times:
        of_device = "" if measured.device_mib is None else f", {measured.device_mib:.0f} MiB on {measured.device}"
        console.out(
            f"{1000 * statistics.median(times):.3g} ms per {measured.of} (median; the first {1000 * times[0]:.3g} ms), "
            f"memory up by {measured.memory_mib:.0f} MiB at its peak{of_device}",
            highlight=False,
        )
    for what in ("skipped", "failed"):
        if named := measured.named(what):
            console.out(f"{len(named)} {what}: {', '.join(named)}", highlight=False)


def _device_mib(device: str) -> float | None:
    if not device.startswith("cuda"):
        return None
    import torch

    return torch.cuda.max_memory_allocated(device) / 2**20


def _text(value: float | None) -> str:
    return "-" if value is None or math.isnan(value) else f"{value:.5g}"


class _PeakMemory:
    """Growth of this process's resident memory at its highest, sampled every few milliseconds."""

    def __init__(self) -> None:
        import psutil

        self._process = psutil.Process()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._start = self._peak = 0

    @property
    def growth_mib(self) -> float:
        return (self._peak - self._start) / 2**20

    def __enter__(self) -> _PeakMemory:
        self._start = self._peak = self._process.memory_info().rss
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self._peak = max(self._peak, self._process.memory_info().rss)

    def _watch(self) -> None:
        while not self._over.wait(_SAMPLING_S):
            self._peak = max(self._peak, self._process.memory_info().rss)

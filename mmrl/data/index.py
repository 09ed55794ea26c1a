"""The index of a tar shard: its samples, the offsets of their bytes, and the faults of unusable samples.

A sample is the members whose names agree up to the first dot of the file name, as webdataset has it:
``000007.json``, ``000007.0.png``, ``000007.1.mp4``. Its text comes from the JSON member, or from ``.txt``; its pictures
and clips are ordered by the rest of their names, numbers as numbers. Other members are counted and never opened.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from mmrl.core.grouping import grouped
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.media import KINDS, BadMediaError, Media, describe, read_bytes
from mmrl.core.trajectory import Prompt
from mmrl.core.untrusted import parse_json
from mmrl.data import store
from mmrl.data.checks import VERSION, Verify, look
from mmrl.data.fields import TEXT, digest_of, digest_of_prompt, make_prompt, read_fields
from mmrl.data.limits import LIMITS
from mmrl.data.record_media import PLACEHOLDERS
from mmrl.data.records import BadRecord, leave_out
from mmrl.data.tar import Member, read_members


@dataclass(frozen=True)
class Part:
    """A member of a sample: the ``suffix`` after its key, and its bytes in the shard. Pixels and frames of media."""

    suffix: str
    offset: int
    size: int
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    fps: float | None = None


@dataclass(frozen=True)
class Entry:
    """A sample: its key, a hash of its text and media, its ``.json`` and ``.txt`` members, and its media in order."""

    key: str
    digest: str
    json: Part | None = None
    txt: Part | None = None
    media: tuple[Part, ...] = ()


@dataclass
class ShardIndex:
    """The index of the shard at ``path``. ``ignored`` counts, by suffix, the members that no sample uses."""

    path: Path
    entries: list[Entry] = field(default_factory=list)
    bad: list[BadRecord] = field(default_factory=list)
    ignored: Counter[str] = field(default_factory=Counter)

    def prompt(self, i: int) -> Prompt:
        """Sample ``i``, read from the shard. Raises ``ValueError`` where the shard was changed after it was indexed."""
        return _prompt(self.path, self.entries[i])


_PARTS = TypeAdapter(tuple[list[Entry], list[BadRecord], Counter[str]])


def load_index(path: Path, verify: Verify) -> ShardIndex | None:
    """The stored index of the shard at ``path``; None where it is missing, stale, broken or was verified less."""
    for level in ("decode", verify):
        found = store.load(_home(path), _stamp(path, level))
        if found is None:
            continue
        try:
            entries, bad, ignored = _PARTS.validate_python(
                (found.get("samples"), found.get("bad"), found.get("ignored")), strict=False
            )
        except ValidationError:
            continue
        return ShardIndex(path, entries, bad, ignored)
    return None


def build_index(path: Path, verify: Verify) -> ShardIndex:
    """Index the shard at ``path`` and store the index. Raises ``OSError``."""
    stamp = _stamp(path, verify)
    members, bad = read_members(path)
    index = ShardIndex(path, bad=[BadRecord(b.where, b.why) for b in bad])
    for key, parts in _samples(members).items():
        where = f"{path.name}/{key}"
        try:
            index.entries.append(_entry(path, key, parts, verify, index.ignored))
        except ValueError as error:
            leave_out(index.bad, where, str(error), path.name)
    dumped = _PARTS.dump_python((index.entries, index.bad, index.ignored), mode="json", exclude_none=True)
    if stamp == _stamp(path, verify):  # else the shard is being written just now
        store.save(_home(path), stamp, dict(zip(("samples", "bad", "ignored"), dumped, strict=True)))
    return index


def _samples(members: Sequence[Member]) -> dict[str, list[Member]]:
    named = ((member.name.rpartition("/"), member) for member in members)
    return grouped((folder + slash + name.partition(".")[0], member) for (folder, slash, name), member in named)


def _entry(path: Path, key: str, members: list[Member], verify: Verify, ignored: Counter[str]) -> Entry:
    """The sample that ``members`` are. Raises ``ValueError``, which says why they are none."""
    parts: dict[str, Part] = {}
    for m in members:
        suffix = m.name[len(key) + 1 :].lower()
        if m.why is not None:
            raise ValueError(f"{m.name!r} {m.why}")
        if suffix in parts:
            raise ValueError(f"{m.name!r} is there twice")
        parts[suffix] = Part(suffix, m.offset, m.size)
    if "json" not in parts and "txt" not in parts:
        raise ValueError(f"has no .json and no .txt (only {', '.join(sorted(parts))[:80]})")
    ignored.update(s for s in parts if not _kind(s) and s not in ("json", "txt"))
    media, hashes = [], []
    for part in sorted((p for s, p in parts.items() if _kind(s)), key=_order):
        medium = _medium(path, part)
        try:
            media.append(replace(part, **look(medium, verify)))
            hashes.append(digest_of(read_bytes(medium)))
        except BadMediaError as error:
            why = str(error).replace(describe(medium), "").lstrip(": ")
            raise ValueError(f".{part.suffix}: {why}") from None
    entry = Entry(key, "", parts.get("json"), parts.get("txt"), tuple(media))
    prompt = _prompt(path, entry)
    return replace(entry, digest=digest_of_prompt(prompt, *hashes))


def _prompt(path: Path, entry: Entry) -> Prompt:
    """Raises ``ValueError``."""
    record = parse_json(_text(path, entry.json)) if entry.json else {}
    if entry.txt and isinstance(record, dict) and not any(record.get(key) for key in TEXT):
        try:
            record["prompt"] = _text(path, entry.txt).decode("utf-8")
        except UnicodeDecodeError:
            raise ValueError(".txt: is not UTF-8") from None
    fields = read_fields(record)
    if fields.media:
        raise ValueError("names media in its JSON; in a shard, media are members with the same key")
    if not entry.media and any(mark in fields.text for mark in PLACEHOLDERS.values()):
        raise ValueError("the prompt has <image> or <video>, and the sample no picture or clip")
    return make_prompt(f"{path.stem}/{entry.key}", fields, [_medium(path, p, record) for p in entry.media])


def _medium(path: Path, part: Part, record: Json = None) -> Media:
    """Raises ``ValueError``."""
    kind = KINDS[part.suffix.rpartition(".")[2]]
    listed = record.get("frames") if isinstance(record, Mapping) else None
    given = listed.get(part.suffix) if isinstance(listed, dict) else None
    frames = [i for i in given if type(i) is int] if isinstance(given, list) else []
    if given is not None and (not frames or frames != given):
        raise ValueError(f'"frames" of .{part.suffix} is no list of frame numbers')
    outside = [i for i in frames if part.frames is not None and not 0 <= i < part.frames]
    if outside:
        raise ValueError(f'"frames" of .{part.suffix} names frame {outside[0]} of {part.frames}')
    shown = 1 if kind == "image" else len(frames) if frames else part.frames
    pixels = part.width * part.height * shown if part.width and part.height and shown else None
    return Media(kind, str(path), part.offset, part.size, frames=tuple(frames) if frames else None, pixels=pixels)


def _text(path: Path, part: Part) -> bytes:
    if part.size > LIMITS.beside:
        raise ValueError(f".{part.suffix} has {part.size:,} bytes; at most {LIMITS.beside:,} are read")
    try:
        return read_bytes(Media("image", str(path), part.offset, part.size))
    except BadMediaError as error:
        raise ValueError(f".{part.suffix}: {error}") from None


def _kind(suffix: str) -> Literal["image", "video"] | None:
    return KINDS.get(suffix.rpartition(".")[2])


def _order(part: Part) -> tuple[int, int | str]:
    """Numbers by value, then names."""
    stem = part.suffix.rpartition(".")[0]
    return (0, int(stem)) if stem.isascii() and stem.isdigit() and len(stem) < 10 else (1, part.suffix)


def _home(path: Path) -> Path:
    return path.with_name(f"{path.name}.index.json")


def _stamp(path: Path, verify: str) -> JsonObject:
    return {"version": VERSION, "verify": verify, **store.stamp_of(path)}

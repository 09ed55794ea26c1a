"""Write data sets with pictures and clips as webdataset tar shards: real PNG, JPEG and MP4 bytes."""

from __future__ import annotations

import inspect
import io
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.media import BadMediaError, Media, open_image, read_bytes
from mmrl.core.media.decoder import container_of
from mmrl.core.media.decoding import needs
from mmrl.core.plugins.loading import load
from mmrl.core.randomness import permutation
from mmrl.core.trajectory import AskedSize, Prompt, Turn
from mmrl.logging.progress import Progress

PICTURES = ("png", "jpg")
"""Pictures are written as these in turn."""


def build(
    names: Sequence[str],
    out: Path,
    samples: Mapping[str, int],
    shards: int,
    seed: int = 0,
    options: JsonObject | None = None,
    *,
    overwrite: bool = False,
) -> list[Path]:
    """Write ``samples[split]`` samples of each split into ``shards`` tar files ``<split>-00000.tar`` ... in ``out``.

    ``names`` are data sets, whose prompts are taken in turn; ``options`` go to each of them, and ``samples`` and
    ``seed`` to those that take them. The same arguments write the same bytes. Each shard is written aside and renamed,
    so that none is ever seen half. Raises ``UserError`` for shards that are there already, and for a data set that has
    too few prompts or no media.
    """
    needs("webdataset", "the shards are written with the webdataset package")
    there = sorted(out.glob("*.tar")) if out.is_dir() else []
    if there and not overwrite:
        raise UserError(f"{there[0]} exists; name another folder with --out, or give --overwrite")
    if shards > min(n for n in samples.values() if n):
        raise UserError(f"{shards} shards are more than the samples of a split; lower --shards")
    sources = {split: _sources(names, split, n, seed, options or {}) for split, n in samples.items() if n}
    out.mkdir(parents=True, exist_ok=True)
    for old in there:
        old.unlink()
    written: list[Path] = []
    with Progress(sum(samples.values()), "building shards", "samples") as progress:
        for split, prompts in sources.items():
            n = samples[split]
            for shard in range(shards):
                path = out / f"{split}-{shard:05d}.tar"
                first, last = shard * n // shards, (shard + 1) * n // shards
                _write(path, prompts, range(first, last), progress)
                written.append(path)
    return written


def _sources(
    names: Sequence[str], split: str, n: int, seed: int, options: JsonObject
) -> list[tuple[Sequence[Prompt], list[int]]]:
    """The prompts of each name, and the order in which they are taken. Raises ``UserError``."""
    found = []
    each = -(-n // len(names))
    for name in names:
        call = load("datasets", name if ":" in name else f"{name}:prompts")
        takes = inspect.signature(call).parameters
        given = dict(options) | {k: v for k, v in (("samples", each), ("seed", seed)) if k in takes}
        try:
            prompts = call(split, **given)
        except (TypeError, ValueError) as error:
            raise UserError(f"{name} cannot be called with {given}: {error}; change --options") from error
        if len(prompts) < each:
            raise UserError(f"{name} has {len(prompts)} prompts of the split {split!r}; ask for fewer than {each}")
        order = list(range(each)) if "samples" in takes else permutation(seed, 0, len(prompts))[:each]
        if not prompts[order[0]].media:
            raise UserError(f"{name} has no pictures or clips; name a data set that has (clips)")
        found.append((prompts, order))
    return found


def _write(path: Path, sources: list[tuple[Sequence[Prompt], list[int]]], places: range, progress: Progress) -> None:
    """Samples ``places`` of a split into one shard."""
    from webdataset.writer import TarWriter  # pyright: ignore[reportMissingImports]

    aside = path.with_suffix(".tar.part")
    try:
        with ExitStack() as stack:
            file = stack.enter_context(aside.open("wb"))
            writer = stack.enter_context(TarWriter(file, encoder=False, mtime=0))
            for place in places:
                prompts, order = sources[place % len(sources)]
                prompt = prompts[order[place // len(sources)]]
                writer.write({"__key__": f"{place:08d}", **_members(prompt, PICTURES[place // len(sources) % 2])})
                progress.advance(1, path.name)
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def _members(prompt: Prompt, picture: str) -> dict[str, bytes]:
    """A sample's members by suffix. Raises ``UserError``."""
    record: dict[str, Json] = {"id": prompt.id, "prompt": prompt.text, "meta": dict(prompt.meta)}
    if prompt.turns:
        said = [*prompt.turns, Turn("user", prompt.text)]
        record["prompt"] = [{"role": role, "content": text, **dict(more)} for role, text, more in said]
    more = {
        "system": prompt.system,
        "negative_prompt": prompt.negative_prompt,
        "max_new_tokens": prompt.max_new_tokens,
        **(prompt.size or AskedSize())._asdict(),
    }
    record |= {name: value for name, value in more.items() if isinstance(value, int | float | str)}
    members: dict[str, bytes] = {}
    frames: dict[str, list[int]] = {}
    for i, medium in enumerate(prompt.media):
        number = f"{i}." if len(prompt.media) > 1 else ""
        try:
            suffix = f"{number}{picture if medium.kind == 'image' else _film(medium)}"
            members[suffix] = _picture(medium, picture) if medium.kind == "image" else read_bytes(medium)
        except BadMediaError as error:
            raise UserError(f"{prompt.id}: {error}; leave it out of the data set") from error
        if medium.frames is not None:
            frames[suffix] = list(medium.frames)
    if frames:
        record["frames"] = frames
    return {"json": json.dumps(record, sort_keys=True).encode(), **members}


def _picture(medium: Media, kind: str) -> bytes:
    file = io.BytesIO()
    image = open_image(medium)
    if kind == "png":
        image.save(file, "PNG")
    else:
        image.save(file, "JPEG", quality=95, subsampling=0)  # colours at full resolution: the pictures may be small
    return file.getvalue()


def _film(medium: Media) -> str:
    name = container_of(read_bytes(medium))
    if name is None:
        raise BadMediaError("a clip is neither MP4, Matroska (WebM) nor AVI")
    return {"mp4": "mp4", "matroska": "webm", "avi": "avi"}[name]

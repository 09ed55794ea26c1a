"""The samples of a folder that labels are for: pictures, clips and texts, each under the name that its label has.

Read are, in this order: the samples that a run keeps (``samples/step_*.json``), the ``samples.jsonl`` of ``mmrl
sample``, or else all pictures and clips, or else all ``.txt`` files, each of which is a text. A picture ``a.png`` may
have its prompt beside it in ``a.txt`` or ``a.caption``. A text of a list has the name of the list with its number:
``samples.jsonl#3``. It may have the pictures of its prompt (``pictures``). Nothing outside the folder is read.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from PIL import Image

from mmrl.core.episode import Line, lines_in
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject, as_list, as_object, elements
from mmrl.core.media import KINDS, LIMITS, BadMediaError, Media, evenly, open_clip, open_image, read_bytes
from mmrl.core.media.images import upright_rgb, watched
from mmrl.core.untrusted import inside, open_file, parse_json, printable, read_file, read_json, resolved, walk

Kind = Literal["image", "video", "text"]
_MOST_TEXT = 1 << 20
_MOST_LIST = 64 << 20
"""Bytes of the samples of a step, and of a line of a list."""
_BESIDE = (".txt", ".caption")
LIST = "samples.jsonl"
FRAMES = 8
"""The most that are read of a clip."""


@dataclass(frozen=True)
class Item:
    """A sample: its name in the table of labels, its prompt, and its ``path`` (pictures and clips) or ``text``.
    ``pictures``: those of a text's prompt, and what an episode was told, as names in the folder ``root``; ``turns``: of
    an episode."""

    name: str
    kind: Kind
    prompt: str = ""
    path: Path | None = None
    text: str = ""
    pictures: tuple[str, ...] = ()
    root: Path | None = None
    turns: tuple[Line, ...] = ()

    def shown(self) -> list[Image.Image]:
        """The pictures of a text's prompt. Raises ``BadMediaError``."""
        root = self.root
        return [] if root is None else [open_image(Media("image", str(root / name))) for name in self.pictures]

    def frames(self) -> list[Image.Image]:
        """The picture, or up to 8 frames of the clip. Raises ``BadMediaError``."""
        path = self.path
        assert path is not None
        if self.kind == "image":
            return [open_image(Media("image", str(path)))]
        if KINDS.get(path.suffix.lower()[1:]) == "video":
            return list(open_clip(Media("video", str(path)), count=FRAMES).frames)
        media = Media("image", str(path))
        open_image(media)  # checks size and format
        try:
            with Image.open(watched(read_bytes(media))) as moving:
                count = getattr(moving, "n_frames", 1)
                if count > LIMITS.frames:
                    raise BadMediaError(f"{path} has {count} frames; at most {LIMITS.frames} are read")
                return [_frame(moving, n) for n in evenly(range(count), FRAMES)]
        except BadMediaError:
            raise
        except Exception as error:  # decoders raise anything
            raise BadMediaError(f"{path}: not a readable clip ({error})") from error


def root_of(folder: Path) -> Path:
    """Where the samples of ``folder`` lie: in ``samples/`` of a run. Raises ``UserError``."""
    if not folder.is_dir():
        raise UserError(f"{folder} is no folder; name one with samples in it, or a run")
    if not (folder / "resolved.json").exists():
        return folder
    try:
        resolved(folder / "samples", folder)
    except OSError as error:
        raise UserError(f"{folder / 'samples'} is not read: {error.strerror}") from error
    return folder / "samples"


def items_of(folder: Path) -> list[Item]:
    """The samples of a folder or of a run, all of one kind, by name. Raises ``UserError`` where there is none, where
    there are several kinds, and for a list that cannot be read."""
    root = root_of(folder)
    lists = sorted(root.glob("step_*.json"))
    if lists:
        found = [item for listing in lists for item in _of_step(root, listing)]
    elif os.path.lexists(root / LIST):
        found = list(_of_rows(root, LIST, _lines(root / LIST)))
    else:
        found = _of_files(root)
    kinds = sorted({item.kind for item in found})
    if not found:
        raise UserError(
            f"{root} has no samples: no {LIST}, no pictures, no clips and no .txt files; name another folder, or a run "
            "that has kept samples (eval.grid)"
        )
    if len(kinds) > 1:
        raise UserError(f"{root} has samples of several kinds ({', '.join(kinds)}); put each kind into its own folder")
    return found


class UnreadTexts(UserWarning):
    """Texts beside pictures were not read; the message names the first."""


def _of_step(root: Path, listing: Path) -> Iterator[Item]:
    try:
        rows = as_list(as_object(read_json(listing, most=_MOST_LIST, root=root))["samples"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{listing} is no list of samples ({error}); remove it") from error
    return _of_rows(root, listing.name, rows)


def _of_rows(root: Path, listing: str, rows: Sequence[Json]) -> Iterator[Item]:
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise UserError(f"{root / listing}, sample {number}, is no object; remove the line")
        given: JsonObject = row
        prompt, text = str(given.get("prompt") or ""), given.get("text")
        if isinstance(text, str):
            shown, turns = given.get("pictures"), tuple(lines_in(given.get("turns")))
            named = [*elements(shown), *(line.picture for line in turns)]
            pictures = tuple(dict.fromkeys(str(name) for name in named if inside(root, name)))
            name = f"{listing}#{number}"
            yield Item(name, "text", prompt, text=text[:_MOST_TEXT], pictures=pictures, root=root, turns=turns)
        elif (path := inside(root, given.get("file"))) is not None:
            yield Item(str(given["file"]), _kind(path), prompt, path)


def _lines(path: Path) -> list[Json]:
    found: list[Json] = []
    try:
        with open_file(path, root=path.parent) as file:
            for line in iter(partial(file.readline, _MOST_LIST + 1), b""):
                if len(line) > _MOST_LIST:
                    raise ValueError(f"has more than {_MOST_LIST:,} bytes")
                if line.strip():
                    found.append(parse_json(line))
    except (OSError, ValueError) as error:
        raise UserError(f"{path}, line {len(found) + 1}, cannot be read ({error}); remove the line") from error
    return found


def _of_files(root: Path) -> list[Item]:
    try:
        files = [file for file in walk(root) if not file.name.startswith(".")]
    except OSError as error:
        raise UserError(f"{printable(str(error.filename))} cannot be read ({error.strerror})") from error
    unread: list[str] = []
    shown = [p for p in files if p.suffix.lower()[1:] in KINDS]
    if shown:
        inner = [(p, str(p.relative_to(root))) for p in shown if inside(root, str(p.relative_to(root)))]
        found = [Item(name, _kind(p), _beside(p, root, unread), p) for p, name in inner]
    else:
        names = [str(p.relative_to(root)) for p in files if p.suffix == ".txt"]
        found = [Item(name, "text", text=_text(root / name, root, unread)) for name in names if inside(root, name)]
    if unread:
        warnings.warn(f"{len(unread)} texts are not read; the first: {unread[0]}", UnreadTexts, stacklevel=3)
    return found


def _beside(path: Path, root: Path, unread: list[str]) -> str:
    """The prompt beside a picture; empty where there is none, or none that may be read."""
    place = next((p for suffix in _BESIDE if os.path.lexists(p := path.with_suffix(suffix))), None)
    return "" if place is None else _text(place, root, unread)


def _kind(path: Path) -> Kind:
    """A WebP or GIF that moves is a clip."""
    suffix = path.suffix.lower()[1:]
    if suffix in ("webp", "gif"):
        try:
            with Image.open(path) as image:
                return "video" if getattr(image, "n_frames", 1) > 1 else "image"
        except Exception:  # decoders raise anything; it fails where it is read, with its name
            return "image"
    return KINDS.get(suffix, "image")


def _frame(moving: Image.Image, number: int) -> Image.Image:
    moving.seek(number)
    moving.load()
    return upright_rgb(moving)[0]


def _text(path: Path, root: Path, unread: list[str]) -> str:
    """The text of a file; where it must not be read, the empty text, and why in ``unread``."""
    try:
        return read_file(path, most=_MOST_TEXT, root=root).decode("utf-8-sig", "replace").strip()
    except OSError as error:
        unread.append(f"{printable(str(path.relative_to(root)))}: {error.strerror}")
        return ""

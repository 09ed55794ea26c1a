"""The page on which a person gives labels (``mmrl label``), with the standard library's server. Imports no torch.

The rules of ``mmrl.core.local_page`` hold: the loopback interface alone, and a token. Files are asked for by their
number in the list that was read at the start, never by a name. All text reaches the page as JSON and is put there as
text. An answer is on the disk before it is confirmed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.local_page import Page, PageHandler, is_number
from mmrl.core.media import KINDS, BadMediaError, Media, read_bytes
from mmrl.core.untrusted import inside
from mmrl.rewards.learned.labels.items import Item
from mmrl.studies.labels import table

_PAGE = Path(__file__).with_name("page.html")
_TYPES = {
    **{"jpg": "image/jpeg", "tif": "image/tiff", "m4v": "video/mp4"},
    **{"mov": "video/quicktime", "mkv": "video/x-matroska", "avi": "video/x-msvideo"},
}
"""Of suffixes that are not the name of their type."""


@dataclass(frozen=True)
class Answer:
    """What a key means, and how it stands in the table."""

    key: str
    name: str
    label: str


YES_NO = (Answer("0", "bad", "0"), Answer("1", "good", "1"))
STARS = tuple(Answer(str(n), f"{n} of 5", f"{(n - 1) / 4:g}") for n in range(1, 6))


class LabelServer(Page):
    """Shows ``items`` in their order and appends the answers to ``path``. Raises ``UserError``."""

    def __init__(
        self, items: Sequence[Item], root: Path, path: Path, answers: Sequence[Answer] = YES_NO, port: int = 0
    ) -> None:
        self.items, self.root, self.path, self.answers = list(items), root, path, list(answers)
        self.writing = threading.Lock()
        given = table.read(path, [item.name for item in items]) if os.path.lexists(path) else table.Labels({})
        if given.words:
            raise UserError(
                f"the labels in {path} are words, and the page writes numbers; write 1 and 0 in their place"
            )
        self.labels = {name: f"{value:g}" for name, value in given.of.items()}
        super().__init__(port, _Handler)

    def listed(self) -> JsonObject:
        """The reply to ``GET /samples``."""
        shown: list[Json] = [_listed(number, item) for number, item in enumerate(self.items)]
        with self.writing:
            labels = dict(self.labels)
        return {"items": shown, "answers": [vars(one) for one in self.answers], "labels": labels}

    def give(self, said: Json) -> str:
        """Keep an answer; returns what is wrong with it, empty where it is on the disk. Raises ``OSError``."""
        if not isinstance(said, dict):
            return "send an object with number and label"
        number, label = said.get("number"), said.get("label")
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.items):
            return f"there is no sample {number!r}"
        if label != "" and label not in [one.label for one in self.answers]:
            return f"{label!r} is no label here"
        name = self.items[number].name
        with self.writing:
            table.append(self.path, name, str(label))
            if label == "":
                self.labels.pop(name, None)
            else:
                self.labels[name] = str(label)
        return ""


def _listed(number: int, item: Item) -> JsonObject:
    """``pictures``: the numbers of those that no turn shows; ``picture`` of a line of an episode: its number."""
    told = {line.picture for line in item.turns}
    places = {name: n for n, name in enumerate(item.pictures)}
    return {
        "number": number,
        "name": item.name,
        "kind": item.kind,
        "prompt": item.prompt,
        "text": item.text,
        "pictures": [n for name, n in places.items() if name not in told],
        "turns": [{**vars(line), "picture": places.get(line.picture)} for line in item.turns],
        "film": item.path is not None and KINDS.get(_suffix(item.path)) == "video",
    }


class _Handler(PageHandler):
    server: LabelServer  # type: ignore[assignment]

    def show(self, path: str) -> None:
        kind, _, rest = path.lstrip("/").partition("/")
        if path == "/":
            self.reply(200, _PAGE.read_bytes(), "text/html; charset=utf-8")
        elif path == "/samples":
            self.answer(self.server.listed)
        elif kind == "file" and is_number(rest) and int(rest) < len(self.server.items):
            item = self.server.items[int(rest)]
            self._file(None if item.path is None else item.name)
        elif kind == "picture" and (name := self._picture(rest)) is not None:
            self._file(name)
        else:
            self.refuse(404, "there is nothing here")

    def do_POST(self) -> None:
        self.take("/label", self.server.give)

    def _picture(self, rest: str) -> str | None:
        """The name of a prompt's picture: ``NUMBER OF THE SAMPLE/NUMBER OF THE PICTURE``; None where there is none."""
        numbers = rest.split("/")
        if len(numbers) != 2 or not all(map(is_number, numbers)):
            return None
        sample, at = map(int, numbers)
        if sample >= len(self.server.items) or at >= len(self.server.items[sample].pictures):
            return None
        return self.server.items[sample].pictures[at]

    def _file(self, name: str | None) -> None:
        path = None if name is None else inside(self.server.root, name)
        if path is None:
            return self.refuse(404, "this sample has no file")
        suffix = _suffix(path)
        if suffix not in KINDS:
            return self.refuse(404, "this sample is neither a picture nor a clip")
        try:
            data = read_bytes(Media(KINDS[suffix], str(path)))
        except BadMediaError as error:
            return self.refuse(404, str(error))
        return self.reply(200, data, _TYPES.get(suffix, f"{KINDS[suffix]}/{suffix}"))


def _suffix(path: Path) -> str:
    return path.suffix.lower()[1:]


def in_order(items: Sequence[Item], order: Sequence[str]) -> list[Item]:
    """``items`` with those of ``order`` first. Raises ``UserError`` for a name that is none of theirs."""
    known = {item.name: item for item in items}
    for name in order:
        if name not in known:
            raise UserError(f"the order names {name!r}, which is no sample of this folder; spread its labels again")
    first = dict.fromkeys(order)
    return [*(known[name] for name in first), *(item for item in items if item.name not in first)]

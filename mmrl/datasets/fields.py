"""Read the parts of a prompt from a record of a data set (a JSON object, a row of a table)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from mmrl.errors import UserError
from mmrl.json_types import Json, JsonScalar
from mmrl.media import KINDS, LIMITS, Media
from mmrl.media.decoder import container_of
from mmrl.trajectory import Prompt

Kind = Literal["image", "video"]
Cell: TypeAlias = "JsonScalar | bytes | Sequence[Cell] | Mapping[str, Cell]"
"""A value of a record: JSON data, or bytes in a table."""
PLACEHOLDERS: dict[Kind, str] = {"image": "<image>", "video": "<video>"}
"""The placeholder of a picture or clip in a prompt's text."""
TEXT = ("prompt", "question", "text", "messages")
ANSWER = ("answer", "solution")
PAIR = ("chosen", "rejected")
"""A better and a worse response, by the columns of TRL's preference data."""
COMPLETION, LABEL = "completion", "label"
"""A given response and whether it is good, as TRL calls them."""
_TRUTH = "reward_model.ground_truth"
"""Where verl's records have the answer."""
IMAGES = ("images", "image")
VIDEOS = ("videos", "video")
_OTHERS = ("system", "negative_prompt", "meta", "id", "file_name", "file_names")
"""Further keys that are read, or that say nothing about the prompt: no warning names them."""
_NAMED = 8
_PICTURES = (b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff", b"GIF8", b"BM", b"II*\0", b"MM\0*")
"""How the formats of pictures begin; WEBP has its name at byte 8."""


@dataclass(frozen=True)
class Columns:
    """The keys of a record by their use; ``a.b`` is the key ``b`` inside ``a``. None: the first usual name it has."""

    prompt: str | None = None
    answer: str | None = None
    images: str | Sequence[str] | None = None
    """Several columns: their media in this order; a record must have all of them."""
    videos: str | None = None
    system: str | None = None
    negative_prompt: str | None = None
    meta: Sequence[str] = ()
    """Further keys that go into the prompt's ``meta``, where a reward finds them, under their own names."""
    renamed: Mapping[str, str] = field(default_factory=dict)
    """And by other names: what a reward knows it as, and its key."""


_PARTS = {"image": "images", "video": "videos", "solution": "answer", "question": "prompt"}
"""Other names of the parts of a prompt, in ``columns`` of a recipe."""


def read_columns(
    columns: Columns, given: Mapping[str, str | Sequence[str]] | None, pair: tuple[str, str] | None = None
) -> Columns:
    """``columns`` with those that the option ``columns`` gives; ``pair``: the pictures of pairs in a known form.

    Raises ``UserError`` for what is given twice.
    """
    parts: dict[str, str | Sequence[str]] = {}
    renamed: dict[str, str] = {}
    for said, column in (given or {}).items():
        name = _PARTS.get(said, said)
        if name in ("prompt", "answer", "images", "videos", "system", "negative_prompt"):
            if name in parts or getattr(columns, name) is not None:
                raise UserError(f"columns: {said} is given twice; take one of them out")
            parts[name] = column
        if not isinstance(column, str) and name != "images":
            raise UserError(f"columns: {said} is {column!r}; give the name of one column")
        if name not in parts and isinstance(column, str):
            renamed[said] = column
    if pair is not None:
        wrong = next((n for n in ("prompt", "images") if n in parts or getattr(columns, n) is not None), None)
        if wrong is not None:
            raise UserError(f"pairs: its form says which columns are {wrong}; remove {wrong}")
        parts |= {"prompt": "prompt", "images": pair}
    return replace(columns, **parts, renamed=renamed)  # pyright: ignore[reportArgumentType]


@dataclass
class Fields:
    """The content of a record. ``media`` are sources as they are in the record: paths, bytes, data URLs."""

    text: str
    system: str | None = None
    meta: dict[str, Cell] = field(default_factory=dict)
    media: list[tuple[Kind, Cell]] = field(default_factory=list)
    negative_prompt: str | None = None
    shown: int = 0
    """The number of pictures and clips in its messages, with or without a source there."""
    keys: tuple[str, ...] = ()
    """The names of all its columns."""


def read_fields(record: Cell, columns: Columns | None = None) -> Fields:
    """The parts of a prompt in ``record``. Raises ``ValueError``, which says what is wrong with the record."""
    columns = columns or Columns()
    if not isinstance(record, Mapping):
        raise ValueError(f"is a JSON {type(record).__name__}, not an object")
    said = _pick(record, columns.prompt, TEXT)
    if said is None and columns.prompt is None and isinstance(record.get(PAIR[0]), list):
        said = record[PAIR[0]]  # TRL's implicit prompt: the messages before the answer
    if isinstance(said, str):
        found = Fields(clean_text(said))
    elif isinstance(said, list):
        found = _read_messages(said)
    else:
        raise ValueError(f"has no text or messages under {columns.prompt or ', '.join(TEXT)}")
    system = _pick(record, columns.system, ("system",))
    if system is not None:
        if not isinstance(system, str):
            raise ValueError(f"{columns.system or 'system'!r} is not text")
        found.system = clean_text(system)
    found.negative_prompt = negative_of(record, columns.negative_prompt)
    images = [columns.images] if columns.images is None or isinstance(columns.images, str) else columns.images
    lists: list[tuple[str | None, Sequence[str], Kind]] = [
        *((name, IMAGES, "image") for name in images),
        (columns.videos, VIDEOS, "video"),
    ]
    for name, names, kind in lists:
        sources = _pick(record, name, names)
        if sources is not None:
            several = sources if isinstance(sources, Sequence) and not isinstance(sources, str | bytes) else [sources]
            found.media.extend((kind, source) for source in several)
    found.meta |= _meta(record, columns)
    found.keys = tuple(record)
    return found


def make_prompt(name: str, fields: Fields, media: Sequence[Media]) -> Prompt:
    """The prompt ``name``, with ``media`` in the order of its placeholders.

    Raises ``ValueError`` where the text has placeholders and their numbers, by kind, differ from those of the media;
    and where the messages show media and the record has none.
    """
    if fields.shown and not media:
        raise ValueError(f"its messages show {fields.shown} pictures or clips, and the record has none of them")
    return Prompt(
        name, fields.text, fields.meta, tuple(arranged(fields.text, media)), fields.system, fields.negative_prompt
    )


def arranged(text: str, media: Sequence[Media]) -> list[Media]:
    """``media`` in the order of the placeholders in ``text``; in their own order where it has none.

    Without media ``<image>`` is an ordinary word. Raises ``ValueError`` as ``make_prompt``.
    """
    wanted: dict[Kind, int] = {kind: text.count(mark) for kind, mark in PLACEHOLDERS.items()}
    if not any(wanted.values()) or not media:
        return list(media)
    for kind, n in wanted.items():
        held = sum(m.kind == kind for m in media)
        if held != n:
            raise ValueError(f"the prompt has {n} {PLACEHOLDERS[kind]} and the record {held} of them")
    queues = {kind: iter([m for m in media if m.kind == kind]) for kind in PLACEHOLDERS}
    places = sorted((i, kind) for kind, mark in PLACEHOLDERS.items() for i in _places(text, mark))
    return [next(queues[kind]) for _, kind in places]


class UnreadColumns(UserWarning):
    """Records have columns that are not used; the message names them."""


def warn_of_unread(path: str, keys: Iterable[str], columns: Columns) -> None:
    """Warn once of the keys of records that go neither into a prompt nor into its ``meta``."""
    images = [columns.images] if isinstance(columns.images, str) else columns.images or ()
    texts = (columns.prompt, columns.answer, columns.system, columns.negative_prompt)
    named = (*texts, columns.videos, *images, *columns.meta)
    read = {
        *TEXT,
        *ANSWER,
        *IMAGES,
        *VIDEOS,
        *PAIR,
        COMPLETION,
        LABEL,
        "margin",
        *_OTHERS,
        *(str(name) for name in named if name),
    }
    read |= {_TRUTH, *columns.renamed.values()}
    read |= {name.partition(".")[0] for name in read}
    unread = [key for key in keys if key not in read]
    if unread:
        listed = ", ".join(unread[:_NAMED]) + (", ..." if len(unread) > _NAMED else "")
        warnings.warn(
            f"{path}: the columns {listed} are not used; to give them to rewards, set meta: [{listed}] in data.train "
            "and data.heldout",
            UnreadColumns,
            stacklevel=3,
        )


def media_from(kind: Kind, source: Cell, root: str) -> Media:
    """One medium of a record: bytes, a data URL, base64, or the path of a file inside the folder ``root``.

    Raises ``ValueError`` for everything else: an address on the network, and a path outside ``root`` (by ``..``, from
    ``/`` or through a link).
    """
    if isinstance(source, Mapping):  # as Hugging Face tables hold media that are not decoded
        source = source.get("bytes") or source.get("path") or source.get("url")
    if isinstance(source, bytes | bytearray):
        return Media(kind, data=bytes(source))
    if not isinstance(source, str) or not source:
        raise ValueError(f"its {kind} is a {type(source).__name__}, neither bytes nor a path")
    if source.startswith("data:"):
        return Media(kind, data=_from_data_url(source))
    if (data := _from_base64(source)) is not None:
        return Media(kind, data=data)
    if "://" in source:
        raise ValueError(f"its {kind} is an address ({source[:80]}); download it and give the file")
    path = os.path.realpath(os.path.join(root, source))
    if not _inside(os.path.realpath(root), path):
        raise ValueError(f"its {kind} {source!r} is outside {root}")
    named = KINDS.get(os.path.splitext(path)[1][1:].lower())
    if named not in (None, kind):
        raise ValueError(f"its {kind} {source!r} has the name of a {named}")
    return Media(kind, path=path)


def clean_text(text: str) -> str:
    """``text`` without white space around it. Raises ``ValueError`` where it is empty or has control characters."""
    text = text.replace("\r\n", "\n").strip()
    if not text:
        raise ValueError("the prompt is empty")
    return _without_strange_characters(text, "the prompt")


def negative_of(record: Mapping[str, Cell], name: str | None = None) -> str | None:
    """The negative prompt of ``record``, under ``name`` or ``negative_prompt``, without white space around it; the
    empty text is one. None where the record has none, or null. Raises ``ValueError``."""
    said = _pick(record, name, ("negative_prompt",))
    if said is None:
        return None
    if not isinstance(said, str):
        raise ValueError(f"{name or 'negative_prompt'!r} is not text")
    return _without_strange_characters(said.replace("\r\n", "\n").strip(), "the negative prompt")


def _without_strange_characters(text: str, what: str) -> str:
    if any(ord(c) < 32 and c not in "\t\n" for c in text):
        raise ValueError(f"{what} has control characters")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError(f"{what} has half of a surrogate pair")
    return text


def digest_of(*parts: str | bytes) -> str:
    """A hash of content, the same on every machine."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()


def parse_json(text: str | bytes) -> Json:
    """The value of a JSON text. Raises ``ValueError``, which says why ``text`` is not JSON."""
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError("is not JSON that can be read (nested too deeply)") from None


def _meta(record: Mapping[str, Cell], columns: Columns) -> dict[str, Cell]:
    given = record.get("meta")
    if given is not None and not isinstance(given, Mapping):
        raise ValueError('"meta" is not an object')
    meta = dict(given or {})
    answer = _pick(record, columns.answer, ANSWER)
    if answer is None and columns.answer is None and isinstance(truth := record.get("reward_model"), Mapping):
        answer = truth.get("ground_truth")
    if answer is not None:
        meta["answer"] = answer
    meta |= _pair(record, columns)
    if _is_response(record.get(COMPLETION)):
        meta |= {name: record[name] for name in (COMPLETION, LABEL) if name in record}
    meta |= {name: _pick(record, name, ()) for name in columns.meta}
    meta |= {name: _pick(record, column, ()) for name, column in columns.renamed.items()}
    try:
        json.dumps(meta, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"its answer or meta is not JSON ({error})") from None
    return meta


def _pair(record: Mapping[str, Cell], columns: Columns) -> dict[str, Cell]:
    """Both texts of a pair and perhaps their margin, where the record has them and no option says what they are."""
    shown = [columns.images] if isinstance(columns.images, str) else columns.images or ()
    if {*PAIR} & {*shown} or not all(_is_response(record.get(name)) for name in PAIR):
        return {}
    margin = record.get("margin")
    return {name: record[name] for name in PAIR} | ({} if margin is None else {"margin": margin})


def _is_response(said: Cell) -> bool:
    return isinstance(said, str) or (isinstance(said, list) and all(isinstance(m, Mapping) for m in said))


def _pick(record: Mapping[str, Cell], name: str | None, usual: Sequence[str]) -> Cell:
    """The value under ``name``, or under the first of the usual names that has one. Raises ``ValueError``."""
    if name is None:
        return next((record[key] for key in usual if record.get(key) is not None), None)
    if name in record:
        return record[name]
    value: Cell = record
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"has nothing under {name!r}; it has {', '.join(map(str, record)) or 'nothing'}")
        value = value[key]
    return value


def _read_messages(messages: list[Cell]) -> Fields:
    """An optional system message, one user message, and perhaps its answer. Raises ``ValueError``."""
    said: dict[str, tuple[str, list[tuple[Kind, Cell]], int]] = {}
    roles: list[str] = []
    for message in messages:
        if not isinstance(message, Mapping) or (role := message.get("role")) not in ("system", "user", "assistant"):
            raise ValueError("has a message whose role is none of system, user and assistant")
        said[role] = _read_content(message.get("content"))
        roles.append(role)
    if [r for r in roles if r != "system"] not in (["user"], ["user", "assistant"]) or "system" in roles[1:]:
        raise ValueError(
            f"has the messages {', '.join(roles)}; it must have one of the user, which one of the system may precede"
        )
    text, media, shown = said["user"]
    found = Fields(clean_text(text), media=media, shown=shown)
    if "system" in said:
        found.system = clean_text(said["system"][0])
    if "assistant" in said:
        found.meta |= {"answer": said["assistant"][0], "completion": said["assistant"][0]}
    return found


def _read_content(content: Cell) -> tuple[str, list[tuple[Kind, Cell]], int]:
    """The text of a message with a placeholder for each medium, the media that name a source, and how many media."""
    if isinstance(content, str):
        return content, [], 0
    if not isinstance(content, list):
        raise ValueError("has a message whose content is neither text nor a list of parts")
    text, shown = "", 0
    media: list[tuple[Kind, Cell]] = []
    for part in content:
        keys: Mapping[str, Cell] = part if isinstance(part, Mapping) else {}
        name, words = keys.get("type"), keys.get("text")
        kind = name.removesuffix("_url") if isinstance(name, str) else ""
        if kind == "text" and isinstance(words, str):
            text += words
        elif isinstance(name, str) and kind in ("image", "video"):
            text += PLACEHOLDERS[kind]
            shown += 1
            source = keys.get(name) or keys.get("url") or keys.get("path")
            if source is not None:
                media.append((kind, source))
        else:
            raise ValueError(f"has a part of a message that is no text, image or video: {str(part)[:60]}")
    return text, media, shown


def _from_data_url(url: str) -> bytes:
    head, comma, body = url.partition(",")
    if not comma or not head.endswith(";base64"):
        raise ValueError(f"its data URL {url[:40]!r} is not base64")
    if len(body) > LIMITS.bytes * 4 // 3 + 4:
        raise ValueError(f"its data URL has {len(body):,} characters, too many")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"its data URL is not base64 ({error})") from None


def _from_base64(text: str) -> bytes | None:
    """The bytes of a picture or clip whose base64 is ``text``; None where it is something else, such as a path.

    Only text that begins as a format that is read does is taken for base64. Raises ``ValueError`` where it is too long.
    """
    head = text[:64]
    if len(text) <= len(head) or not head.isascii():
        return None
    try:
        begin = base64.b64decode(head, validate=True)
    except ValueError:
        return None
    if not begin.startswith(_PICTURES) and begin[8:12] != b"WEBP" and container_of(begin) is None:
        return None
    if len(text) > LIMITS.bytes * 4 // 3 + 4:
        raise ValueError(f"its base64 has {len(text):,} characters, too many")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except ValueError as error:
        raise ValueError(f"its base64 cannot be decoded ({error})") from None


def _inside(root: str, path: str) -> bool:
    return os.path.commonpath([root, path]) == root


def _places(text: str, mark: str) -> Iterator[int]:
    at = text.find(mark)
    while at >= 0:
        yield at
        at = text.find(mark, at + len(mark))

"""Read the parts of a prompt from a record of a data set (a JSON object, a row of a table)."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any, Literal

from mmrl.media import KINDS, LIMITS, Media
from mmrl.trajectory import Prompt, Turn

Kind = Literal["image", "video"]
PLACEHOLDERS: dict[Kind, str] = {"image": "<image>", "video": "<video>"}
"""Where in a prompt's text a medium stands."""
TEXT = ("prompt", "question", "text", "messages")
ANSWER = ("answer", "solution")
IMAGES = ("images", "image")
VIDEOS = ("videos", "video")
_OTHERS = ("system", "meta", "max_new_tokens", "id", "file_name", "file_names")
"""Further keys that are read, or say nothing of the prompt."""
ROLES: tuple[Literal["user"], Literal["assistant"]] = ("user", "assistant")
"""Who speaks by turns in a conversation."""
_NAMED = 8


@dataclass(frozen=True)
class Columns:
    """Which keys of a record hold what; ``a.b`` is the key ``b`` inside ``a``. None: the first usual name there is."""

    prompt: str | None = None
    answer: str | None = None
    images: str | Sequence[str] | None = None
    """Several columns: one after the other, each of which must be there."""
    videos: str | None = None
    system: str | None = None
    meta: Sequence[str] = ()
    """Further keys that a reward may know, by their own names."""


@dataclass
class Fields:
    """What a record says. ``media`` are sources as the record has them: paths, bytes, data URLs."""

    text: str
    system: str | None = None
    meta: dict[str, Any] = field(default_factory=dict)
    media: list[tuple[Kind, Any]] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """What was said before ``text``."""
    max_new_tokens: int | None = None
    """Of its responses."""
    shown: int = 0
    """Pictures and clips that are parts of its messages, wherever their bytes are."""


def read_fields(record: Any, columns: Columns | None = None) -> Fields:
    """The parts of a prompt in ``record``. Raises ``ValueError`` saying what is wrong with it."""
    columns = columns or Columns()
    if not isinstance(record, Mapping):
        raise ValueError(f"is a JSON {type(record).__name__}, not an object")
    if record.get("tools") and "tools" not in columns.meta:
        raise ValueError(
            "has tools, and no chat here calls any; take the column out, or let a reward know it (meta: [tools])"
        )
    said = _pick(record, columns.prompt, TEXT)
    if said is None and columns.prompt is None:
        said = _both_begin_with(record.get("chosen"), record.get("rejected"))
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
    images = [columns.images] if columns.images is None or isinstance(columns.images, str) else columns.images
    lists: list[tuple[str | None, Sequence[str], Kind]] = [
        *((name, IMAGES, "image") for name in images),
        (columns.videos, VIDEOS, "video"),
    ]
    for name, names, kind in lists:
        sources = _pick(record, name, names)
        if sources is not None:
            several = isinstance(sources, Sequence) and not isinstance(sources, str | bytes)
            for source in sources if several else [sources]:
                found.media.append((kind, source))
    found.meta |= _meta(record, columns)
    most = record.get("max_new_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueError(f'"max_new_tokens" is {most!r}; write a whole number from 1 on')
    found.max_new_tokens = most
    return found


def make_prompt(name: str, fields: Fields, media: Sequence[Media]) -> Prompt:
    """The prompt ``name``, with ``media`` in the order of its placeholders.

    Raises ``ValueError`` where there are media, and the text has placeholders that are not as many as those of their
    kind; and where the messages show some that the record does not have.
    """
    if fields.shown and not media:
        raise ValueError(f"its messages show {fields.shown} pictures or clips, and the record has none of them")
    asked = "\n".join([*(text for role, text in fields.turns if role == "user"), fields.text])
    turns = tuple(fields.turns)
    shown = tuple(arranged(asked, media))
    return Prompt(name, fields.text, fields.meta, shown, fields.system, turns, fields.max_new_tokens)


def arranged(text: str, media: Sequence[Media]) -> list[Media]:
    """``media`` in the order of the placeholders in ``text``; as they are where it has none. Raises ``ValueError``.

    Without media ``<image>`` is a word like others.
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
    """Records have columns that nobody reads; the message names them."""


def warn_of_unread(path: str, keys: Iterable[str], columns: Columns) -> None:
    """Name the keys of records that neither a prompt is made of nor a reward may know, once."""
    images = [columns.images] if isinstance(columns.images, str) else columns.images or ()
    named = (columns.prompt, columns.answer, columns.videos, columns.system, *images, *columns.meta)
    read = {*TEXT, *ANSWER, *IMAGES, *VIDEOS, *_OTHERS, *(str(name) for name in named if name)}
    read |= {name.partition(".")[0] for name in read}
    unread = [key for key in keys if key not in read]
    if unread:
        listed = ", ".join(unread[:_NAMED]) + (", ..." if len(unread) > _NAMED else "")
        warnings.warn(
            f"{path}: nobody reads the columns {listed}; a reward may know them with meta: [{listed}] in data.train "
            "and data.heldout",
            UnreadColumns,
            stacklevel=3,
        )


def media_from(kind: Kind, source: Any, root: str) -> Media:
    """One medium of a record: bytes, a data URL, or the path of a file inside the folder ``root``.

    Raises ``ValueError`` for everything else: an address on the network, a path that leaves ``root`` (by ``..``, from
    ``/`` or through a link), and what is neither.
    """
    if isinstance(source, Mapping):  # as Hugging Face tables hold media that are not decoded
        source = source.get("bytes") or source.get("path") or source.get("url")
    if isinstance(source, bytes | bytearray):
        return Media(kind, data=bytes(source))
    if not isinstance(source, str) or not source:
        raise ValueError(f"its {kind} is a {type(source).__name__}, neither bytes nor a path")
    if source.startswith("data:"):
        return Media(kind, data=_from_data_url(source))
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
    if any(ord(c) < 32 and c not in "\t\n" for c in text):
        raise ValueError("the prompt has control characters")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise ValueError("the prompt has half of a surrogate pair")
    return text


def digest_of(*parts: str | bytes) -> str:
    """A hash of content, the same on every machine."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()


def digest_of_prompt(prompt: Fields | Prompt, *media: str | bytes) -> str:
    """``digest_of`` what is said in a prompt, and what stands for its ``media``."""
    turns = (f"{role}: {text}" for role, text in prompt.turns)
    return digest_of(prompt.text, prompt.system or "", *turns, *media)


def parse_json(text: str | bytes) -> Any:
    """Raises ``ValueError`` saying why ``text`` is no JSON."""
    try:
        return json.loads(text)
    except UnicodeDecodeError:
        raise ValueError("is not UTF-8") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON ({error.msg})") from None
    except RecursionError:
        raise ValueError("is not JSON that can be read (nested too deeply)") from None


def _meta(record: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    given = record.get("meta")
    if given is not None and not isinstance(given, Mapping):
        raise ValueError('"meta" is not an object')
    meta = dict(given or {})
    answer = _pick(record, columns.answer, ANSWER)
    if answer is not None:
        meta["answer"] = answer
    meta |= {name: _pick(record, name, ()) for name in columns.meta}
    try:
        json.dumps(meta, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"what a reward may know is no JSON ({error})") from None
    return meta


def _pick(record: Mapping[str, Any], name: str | None, usual: Sequence[str]) -> Any:
    """The value under ``name``, or under the first of the usual names that has one. Raises ``ValueError``."""
    if name is None:
        return next((record[key] for key in usual if record.get(key) is not None), None)
    if name in record:
        return record[name]
    value: Any = record
    for key in name.split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"has nothing under {name!r}; it has {', '.join(map(str, record)) or 'nothing'}")
        value = value[key]
    return value


def _both_begin_with(chosen: Any, rejected: Any) -> list[Any] | None:
    """The messages that two conversations begin with: TRL's pairs may have no prompt beside them."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        return None
    same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    return [message for message, _ in same] or None


def _read_messages(messages: list[Any]) -> Fields:
    """Perhaps a system message, and messages of user and assistant by turns, the last of which is the question, or
    its answer. Raises ``ValueError``."""
    turns: list[Turn] = []
    found = Fields("")
    for message in messages:
        role = message.get("role") if isinstance(message, Mapping) else None
        if role == "tool" or (isinstance(message, Mapping) and message.get("tool_calls")):
            raise ValueError("has a message of a tool or a call of one, and no chat here calls any; take it out")
        if role not in ("system", "user", "assistant"):
            raise ValueError("has a message whose role is none of system, user and assistant")
        text, media, shown = _read_content(message.get("content"))
        if shown and role != "user":
            raise ValueError(f"has a picture or clip in a message of the {role}; only the user shows some")
        found.media += media
        found.shown += shown
        if role == "system":
            if found.system is not None or turns:
                raise ValueError("has a system message that is not the first message")
            found.system = clean_text(text)
        else:
            turns.append(Turn(role, text))
    if any(turn.role != ROLES[n % 2] for n, turn in enumerate(turns)) or not turns:
        raise ValueError(
            f"has the messages {', '.join(m['role'] for m in messages) or 'none'}; what is read is user and assistant "
            "by turns, perhaps after one of the system"
        )
    if turns[-1].role == "assistant":
        found.meta["answer"] = turns.pop().text
    found.text = clean_text(turns.pop().text)
    found.turns = [Turn(role, clean_text(text)) for role, text in turns]
    return found


def _read_content(content: Any) -> tuple[str, list[tuple[Kind, Any]], int]:
    """The text of a message, with a placeholder for each medium, the sources of those that name one, and how many
    there are."""
    if isinstance(content, str):
        return content, [], 0
    if not isinstance(content, list):
        raise ValueError("has a message whose content is neither text nor a list of parts")
    text, media, shown = "", list[tuple[Kind, Any]](), 0
    for part in content:
        kind = str(part.get("type", "")).removesuffix("_url") if isinstance(part, Mapping) else ""
        if kind == "text" and isinstance(part.get("text"), str):
            text += part["text"]
        elif kind in ("image", "video"):
            text, shown = text + PLACEHOLDERS[kind], shown + 1
            source = part.get(part["type"]) or part.get("url") or part.get("path")
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


def _inside(root: str, path: str) -> bool:
    return os.path.commonpath([root, path]) == root


def _places(text: str, mark: str) -> Iterator[int]:
    at = text.find(mark)
    while at >= 0:
        yield at
        at = text.find(mark, at + len(mark))

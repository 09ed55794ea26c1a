"""Read the parts of a prompt from a record of a data set (a JSON object, a row of a table).

Conversations, as data sets store them, are brought to one form: a list of messages with ``role`` and ``content``.

- JSON in a text, as tables and CSV files have it.
- ShareGPT's form: ``from`` (``human``, ``gpt``, ``system``) and ``value``.
- one message in place of a list, as LLaMA-Factory's pairs have it.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, takewhile
from typing import Literal

from mmrl.core.errors import UserError, first_of
from mmrl.core.json_types import Cell, elements
from mmrl.core.media import Media
from mmrl.core.trajectory import REASONING, AskedSize, Prompt, Turn
from mmrl.core.untrusted import parse_json
from mmrl.data.limits import LIMITS
from mmrl.data.record_media import PLACEHOLDERS, SHOWN, Kind, arranged

_CONVERSATIONS = ("messages", "conversations", "conversation")
TEXT = ("prompt", "question", "text", *_CONVERSATIONS, "caption")
ANSWER = ("answer", "solution")
PAIR = ("chosen", "rejected")
"""A better and a worse response, by the columns of TRL's preference data."""
COMPLETION, LABEL = "completion", "label"
"""A given response and whether it is good, as TRL calls them."""
VERL = ("data_source", "extra_info")
"""Columns of verl's records that its rewards get."""
_TRUTH = "reward_model.ground_truth"
"""Where verl's records have the answer."""
IMAGES = ("images", "image")
VIDEOS = ("videos", "video")
_OTHERS = ("system", "negative_prompt", "meta", "max_new_tokens", "id", "file_name", "file_names", *AskedSize._fields)
"""Further keys that are read, or that say nothing about the prompt: no warning names them."""
ROLES: tuple[Literal["user"], Literal["assistant"]] = ("user", "assistant")
"""Whose messages alternate in a conversation."""
_NAMED = 8
_NAMED_ROLE = 30
_STRANGE = re.compile(r"[\x00-\x08\x0b-\x1f\ud800-\udfff]")
_VISIBLE = re.compile(
    r"[^\s\x7f-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff]"
)
"""A character that shows: neither a space nor one that Unicode calls ignorable (Default_Ignorable_Code_Point)."""
INSIDE = "messages: "
"""What the name of a key inside messages begins with, among the names of a record's columns."""
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "system": "system",
    "function_call": "tool",
    "function_response": "tool",
    "observation": "tool",
    "tool": "tool",
}
"""ShareGPT's ``from`` and the role it means."""
_TOOLS = ("tool_calls", "function_call", "tool_call_id", "tools", "functions")
"""Keys of a message that change what it is."""
_READ = ("role", "content")
_PYTHON = re.compile(r"\s*\[\s*\{\s*'(role|content|from|value)'\s*:")
"""A conversation as Python prints it."""


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
    turns: list[Turn] = field(default_factory=list)
    """The messages before ``text``."""
    max_new_tokens: int | None = None
    """The limit of its responses."""
    size: AskedSize | None = None
    shown: int = 0
    """The number of pictures and clips in its messages, with or without a source there."""
    keys: tuple[str, ...] = ()
    """The names of all its columns."""


def read_fields(record: Cell, columns: Columns | None = None) -> Fields:
    """The parts of a prompt in ``record``. Raises ``ValueError``, which says what is wrong with the record."""
    columns = columns or Columns()
    if not isinstance(record, Mapping):
        raise ValueError(f"is a JSON {type(record).__name__}, not an object")
    if len(record) > LIMITS.columns:
        raise ValueError(f"has {len(record):,} keys; at most {LIMITS.columns:,} are read")
    if record.get("tools") and "tools" not in columns.meta:
        raise ValueError(
            "has tools, and no chat here calls any; take the column out, or let a reward know it (meta: [tools])"
        )
    record = {**record, **{name: as_messages(record[name]) for name in (*PAIR, COMPLETION) if name in record}}
    said = as_messages(_pick(record, columns.prompt, TEXT))
    if said is None and columns.prompt is None:
        said = _common_messages(record.get(PAIR[0]), record.get(PAIR[1]))
    if isinstance(said, str):
        if said.lstrip()[:1] in ("[", "{", '"') and said in map(record.get, _CONVERSATIONS):
            raise ValueError(f"has {said[:40]!r} in place of messages; store a list of them, or that list in JSON")
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
    shown = list[str]()
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
            shown.extend(key for source in several if isinstance(source, Mapping) for key in _of_part(source, kind))
    found.meta |= _meta(record, columns)
    inside = (keys_inside(of) for of in (said, *(record.get(name) for name in (*PAIR, COMPLETION))))
    found.keys = (*record, *chain.from_iterable(inside), *shown)
    most = record.get("max_new_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise ValueError(f'"max_new_tokens" is {most!r}; write a whole number from 1 on')
    found.max_new_tokens = most
    found.size = size_of(record, columns.renamed)
    return found


def make_prompt(name: str, fields: Fields, media: Sequence[Media]) -> Prompt:
    """The prompt ``name``, with ``media`` in the order of its placeholders.

    Raises ``ValueError`` where the text has placeholders and their numbers, by kind, differ from those of the media;
    and where the messages show media and the record has none.
    """
    if fields.shown and not media:
        raise ValueError(f"its messages show {fields.shown} pictures or clips, and the record has none of them")
    asked = "\n".join([*(text for role, text, _ in fields.turns if role == "user"), fields.text])
    return Prompt(
        name,
        fields.text,
        fields.meta,
        tuple(arranged(asked, media)),
        fields.system,
        fields.negative_prompt,
        tuple(fields.turns),
        fields.max_new_tokens,
        fields.size,
    )


class UnreadColumns(UserWarning):
    """Records have columns that are not used; the message names them."""


def unread(keys: Iterable[str], columns: Columns) -> list[str]:
    """The keys of records that go neither into a prompt nor into its ``meta``."""
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
    return [key for key in keys if key not in read and not key.startswith(INSIDE)]


def warn_of_unread(path: str, keys: Iterable[str], columns: Columns) -> None:
    """Warn once of what ``unread`` finds, and once of the keys inside messages."""
    keys = [*keys]
    if inside := [key.removeprefix(INSIDE) for key in keys if key.startswith(INSIDE)]:
        warnings.warn(
            f"{path}: the keys {first_of(inside, _NAMED)} inside messages and media are not used; chat templates "
            f"get role and content, and of the assistant {', '.join(REASONING)}",
            UnreadColumns,
            stacklevel=3,
        )
    if found := unread(keys, columns):
        listed = first_of(found, _NAMED)
        warnings.warn(
            f"{path}: the columns {listed} are not used; to give them to rewards, set meta: [{listed}] in data.train "
            "and data.heldout",
            UnreadColumns,
            stacklevel=3,
        )


def clean_text(text: str) -> str:
    """``text`` without white space around it. Raises ``ValueError`` where it is empty or has control characters."""
    text = _checked(text, "the prompt")
    if not _VISIBLE.search(text):
        raise ValueError("the prompt is empty" if not text else "the prompt is empty: all its characters are invisible")
    return text


def negative_of(record: Mapping[str, Cell], name: str | None = None) -> str | None:
    """The negative prompt of ``record``, under ``name`` or ``negative_prompt``, without white space around it; the
    empty text is one. Of messages it is the text of the user's. None where the record has none, or null. Raises
    ``ValueError``."""
    said = as_messages(_pick(record, name, ("negative_prompt",)))
    if isinstance(said, list):
        asked = [m.get("content") for m in said if isinstance(m, Mapping) and m.get("role") == "user"]
        if len(asked) != 1:
            raise ValueError(f"{name or 'negative_prompt'!r} has {len(asked)} messages of the user; it is one text")
        said = _read_content(asked[0])[0]
    if said is None:
        return None
    if not isinstance(said, str):
        raise ValueError(f"{name or 'negative_prompt'!r} is not text")
    text = _checked(said, "the negative prompt")
    return text if _VISIBLE.search(text) else ""


def size_of(record: Mapping[str, Cell], named: Mapping[str, str]) -> AskedSize | None:
    """What ``record`` says of the size of its picture, under the names ``named`` or the usual ones. Raises
    ``ValueError``."""
    if not any(name in record or name in named for name in AskedSize._fields):
        return None
    found = AskedSize(*(_pick(record, named.get(name), (name,)) for name in AskedSize._fields))
    return None if found == AskedSize() else found


def _checked(text: str, what: str) -> str:
    """``text`` with the line ends of Unix, without white space around it. Raises ``ValueError``."""
    if len(text) > LIMITS.text:
        raise ValueError(f"{what} has {len(text):,} characters; at most {LIMITS.text:,} are read")
    text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
    if found := _STRANGE.search(text):
        raise ValueError(f"{what} has {'control characters' if found[0] < ' ' else 'half of a surrogate pair'}")
    return text


def digest_of(*parts: str | bytes) -> str:
    """A hash of content, the same on every machine."""
    found = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode()
        found.update(len(data).to_bytes(8, "big") + data)
    return found.hexdigest()


def digest_of_prompt(prompt: Fields | Prompt, *media: str | bytes) -> str:
    """``digest_of`` the messages of a prompt, and of what stands for its ``media``."""
    turns = (": ".join((role, text, *(said for _, said in more))) for role, text, more in prompt.turns)
    return digest_of(prompt.text, prompt.system or "", *turns, *media)


def _meta(record: Mapping[str, Cell], columns: Columns) -> dict[str, Cell]:
    given = record.get("meta")
    if given is not None and not isinstance(given, Mapping):
        raise ValueError('"meta" is not an object')
    meta = dict(given or {})
    answer = _pick(record, columns.answer, ANSWER)
    if answer is None and columns.answer is None and isinstance(truth := record.get("reward_model"), Mapping):
        answer = truth.get("ground_truth")
        meta |= {name: record[name] for name in VERL if record.get(name) is not None}
    if answer is not None:
        meta["answer"] = answer
    meta |= _pair(record, columns)
    if _is_response(record.get(COMPLETION)):
        meta |= {name: record[name] for name in (COMPLETION, LABEL) if name in record}
    meta |= {name: _pick(record, name, ()) for name in columns.meta}
    for name, column in columns.renamed.items():
        said = _pick(record, column, ())
        meta[name] = as_messages(said) if name in (*PAIR, COMPLETION) else said
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
            raise ValueError(
                f"has nothing under {name!r}; it has {', '.join(list(map(str, record))[:_NAMED]) or 'nothing'}"
            )
        value = value[key]
    return value


def _common_messages(chosen: Cell, rejected: Cell) -> list[Cell] | None:
    """The implicit prompt of TRL's pairs: the messages that both conversations begin with, or those of the one that is
    there."""
    if not isinstance(chosen, list) or not isinstance(rejected, list):
        return chosen if isinstance(chosen, list) else None
    same = takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    return [message for message, _ in same] or None


def _read_messages(messages: list[Cell]) -> Fields:
    """An optional system message, and messages of user and assistant in turn. The last one is the question, or the
    answer to it. Raises ``ValueError``."""
    turns: list[Turn] = []
    found = Fields("")
    list(keys_inside(messages))  # none of them changes what a message is
    for message in messages:
        keys: Mapping[str, Cell] = message if isinstance(message, Mapping) else {}
        role = keys.get("role")
        if role not in ("system", *ROLES):
            said = repr(role)[:_NAMED_ROLE]
            raise ValueError(f"has a message whose role is {said}, which is none of system, user and assistant")
        text, media, shown = _read_content(keys.get("content"))
        if shown and role != "user":
            raise ValueError(f"has a picture or clip in a message of the {role}; only the user shows some")
        found.media += media
        found.shown += shown
        if role != "system":
            turns.append(Turn(role, text, reasoning_of(keys) if role == "assistant" else ()))
        elif found.system is not None or turns:
            raise ValueError("has a system message that is not the first message")
        else:
            found.system = clean_text(text)
    if any(turn.role != ROLES[n % 2] for n, turn in enumerate(turns)) or not turns:
        raise ValueError(
            f"has the messages {', '.join(roles_of(messages)) or 'none'}; user and assistant must alternate, and one "
            "of the system may precede them"
        )
    if turns[-1].role == "assistant":
        role, text, more = turns.pop()
        found.meta |= {"answer": text, COMPLETION: [{"role": role, "content": text, **dict(more)}] if more else text}
    found.text = clean_text(turns.pop().text)
    found.turns = [turn._replace(text=clean_text(turn.text)) for turn in turns]
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
            said = {key: keys[key] for key in SHOWN if keys.get(key) is not None}
            if source is None and said:
                raise ValueError(
                    f"has {', '.join(said)} in a part without a source; give the {kind} there, or both in the column: "
                    f'{{"{kind}": "FILE", "{next(iter(said))}": ...}}'
                )
            if source is not None:
                media.append((kind, _with(source, said, kind)))
        else:
            raise ValueError(f"has a part of a message that is no text, image or video: {str(part)[:60]}")
    return text, media, shown


def _with(source: Cell, said: Mapping[str, Cell], kind: str) -> Cell:
    """``source`` with what its part says of how it is shown."""
    if not said:
        return source
    return {**source, **said} if isinstance(source, Mapping) else {kind: source, **said}


def as_messages(said: Cell) -> Cell:
    """``said`` as a list of messages where it is a conversation, else as it is. Raises ``ValueError`` for one that
    only Python can read."""
    if isinstance(said, str):
        found = _of_text(said)
        return said if found is None else as_messages(found)
    if isinstance(said, Mapping) and _is_message(said):
        return as_messages([said])
    messages = [m for m in said if isinstance(m, Mapping) and "from" in m] if isinstance(said, list) else []
    if isinstance(said, list) and messages and len(messages) == len(said) and not any("role" in m for m in messages):
        return [_of_sharegpt(m) for m in messages]
    return said


def keys_inside(said: Cell) -> Iterator[str]:
    """The names of keys of messages that nothing reads, of values that are there. Raises ``ValueError`` for a key that
    changes what the message is."""
    for message in elements(said):
        if not isinstance(message, Mapping):
            continue
        calls = next((key for key in _TOOLS if message.get(key)), None)
        if calls is not None or message.get("role") == "tool":
            named = "" if calls is None else f" ({calls})"
            raise ValueError(
                f"has a message of a tool or a call of one{named}, and no chat here calls any; take it out"
            )
        reads = {*_READ, *(REASONING if message.get("role") == "assistant" else ())}
        yield from (INSIDE + str(key) for key, value in message.items() if key not in reads and value is not None)
        for part in elements(message.get("content")):
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(part, Mapping) and isinstance(kind, str) and kind != "text":
                yield from _of_part(part, kind)


def _of_part(part: Mapping[str, Cell], kind: str) -> Iterator[str]:
    """The names of keys of a medium that nothing reads, of values that are there."""
    reads = {"type", "text", kind, "url", "path", "bytes", *SHOWN}
    yield from (f"{INSIDE}{kind}: {key}" for key, value in part.items() if key not in reads and value is not None)


def reasoning_of(message: Mapping[str, Cell]) -> tuple[tuple[str, str], ...]:
    """The reasoning of a message of the assistant, by its key. Raises ``ValueError`` where it is no text."""
    found: list[tuple[str, str]] = []
    for key in REASONING:
        said = message.get(key)
        if said is not None and not isinstance(said, str):
            raise ValueError(f"has a message whose {key} is no text")
        if said:
            found.append((key, said))
    return tuple(found)


def _of_text(text: str) -> list[Cell] | None:
    """The messages that a text is, in JSON."""
    text = text.strip().removeprefix("\ufeff")
    if not text.lstrip().startswith("[") or not text.rstrip().endswith("]"):
        return None
    try:
        found = parse_json(text)
    except ValueError:
        if _PYTHON.match(text):
            raise ValueError(
                "has a conversation as Python prints it, in place of JSON; write it with json.dumps, or store a list"
            ) from None
        return None
    if not isinstance(found, list) or not found or not all(isinstance(m, Mapping) and _is_message(m) for m in found):
        return None
    return [*found]


def _is_message(found: Mapping[str, Cell]) -> bool:
    return {"role", "content"} <= {*found} or {"from", "value"} <= {*found}


def _of_sharegpt(message: Mapping[str, Cell]) -> dict[str, Cell]:
    speaker = str(message["from"]).casefold()
    rest = {key: value for key, value in message.items() if key not in ("from", "value")}
    return {"role": _SPEAKERS.get(speaker, speaker), "content": message.get("value"), **rest}


def roles_of(messages: Sequence[Cell]) -> Iterator[str]:
    """The roles of messages, for messages about them."""
    return (str(message.get("role")) for message in messages if isinstance(message, Mapping))

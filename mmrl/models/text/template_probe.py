"""Which form of messages a chat template shows whole, found by rendering marks in place of the texts.

Templates differ in what they take as content: a text, a list of parts, or one of them for the system message and the
other for the user. Some leave out the system message, some print a list as Python writes it, some raise an exception.
A template is asked once for each shape of a conversation: its roles, its media and its further keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, count
from weakref import WeakKeyDictionary

from mmrl.core.json_types import Json, JsonObject
from mmrl.models.text.conditioner import Messages, Processor, Tokenizer

TEXT_KEYS = ("content", "role")
_Form = frozenset[str]
"""The roles whose content is given otherwise than it came: a text as a list of parts, or the other way round."""


class TemplateFaultError(ValueError):
    """A chat template does not show a conversation; ``error`` is what it raised, if it raised something."""

    def __init__(self, why: str, shown: str = "", error: Exception | None = None) -> None:
        super().__init__(why)
        self.shown, self.error = shown, error


_FORMS: WeakKeyDictionary[object, dict[str, _Form | TemplateFaultError]] = WeakKeyDictionary()


def render(saved: Tokenizer | Processor, messages: Messages, variables: JsonObject, *, asks: bool) -> str:
    """``messages`` in the chat format of ``saved``; ``asks``: up to where an answer begins. Their contents are given in
    a form in which the template shows each of their texts once. Raises ``TemplateFaultError``."""
    known = _FORMS.setdefault(saved, {})
    shape = repr((asks, [_shape(m) for m in messages], getattr(saved, "chat_template", None), variables))
    if shape not in known:
        try:
            known[shape] = _form(saved, messages, variables, asks=asks)
        except TemplateFaultError as error:
            known[shape] = error
    form = known[shape]
    if isinstance(form, TemplateFaultError):
        raise form
    return _render(saved, [_in_form(m, form) for m in messages], variables, asks=asks)


def reads_key(saved: Tokenizer | Processor, key: str) -> bool:
    """Whether the chat template names ``key``, so that it may read it of a message."""
    return key in str(getattr(saved, "chat_template", None))


def parts_of(content: Json) -> list[JsonObject]:
    """The parts of a content that is a list; of a text the one part that it is."""
    if isinstance(content, Sequence) and not isinstance(content, str):
        return [part for part in content if isinstance(part, Mapping)]
    return [{"type": "text", "text": content}]


def _render(saved: Tokenizer | Processor, messages: Messages, variables: JsonObject, *, asks: bool) -> str:
    try:
        return saved.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=asks, **variables)
    except Exception as error:  # a template is a program: its errors are of any type
        roles = ", ".join(str(m["role"]) for m in messages)
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise TemplateFaultError(
            f"the chat template does not take its messages ({roles}): {said}", error=error
        ) from error


def _shape(message: Mapping[str, Json]) -> list[Json]:
    content = message.get("content")
    kinds: Json = "text" if isinstance(content, str) else [part.get("type") for part in parts_of(content)]
    return [message.get("role"), kinds, sorted({*message} - {*TEXT_KEYS})]


@dataclass(frozen=True)
class _Mark:
    """What stands for a text. Quotes are escaped wherever a list or an object is printed, and the mark is gone."""

    text: str
    number: int
    role: str
    key: str

    @property
    def what(self) -> str:
        of = "the system message" if self.role == "system" else f"message {self.number} ({self.role})"
        return of if self.key == "content" else f"{self.key} of {of}"


def _form(saved: Tokenizer | Processor, messages: Messages, variables: JsonObject, *, asks: bool) -> _Form:
    """The first form in which the template shows every mark once. Raises ``TemplateFaultError``."""
    marked, marks = _marked(messages, asks=asks)
    raised: TemplateFaultError | None = None
    lost: tuple[int, TemplateFaultError] | None = None
    for form in _forms(marked):
        try:
            shown = _render(saved, [_in_form(m, form) for m in marked], variables, asks=asks)
        except TemplateFaultError as error:
            raised = raised or error
            continue
        wrong = [mark for mark in marks if shown.count(mark.text) != 1]
        if not wrong:
            return form
        if lost is None or len(wrong) < lost[0]:
            lost = len(wrong), TemplateFaultError(_said(wrong[0], shown), shown)
    found = lost[1] if lost else raised
    assert found is not None
    raise found


def _said(mark: _Mark, shown: str) -> str:
    times = shown.count(mark.text)
    if times:
        return f"the chat template shows {mark.what} {times} times"
    if mark.key != "content":
        return f"the chat template does not show {mark.what}"
    garbled = mark.text[: mark.text.index('"')].casefold() in shown.casefold()
    return f"the chat template {'garbles' if garbled else 'leaves out'} {mark.what}"


def _forms(messages: Messages) -> Iterator[_Form]:
    """As the messages came first, then all roles otherwise, then some."""
    roles = sorted({str(m["role"]) for m in messages})
    for size in (0, len(roles), *range(1, len(roles))):
        yield from map(frozenset, combinations(roles, size))


def _in_form(message: Mapping[str, Json], form: _Form) -> dict[str, Json]:
    content = message.get("content")
    if message["role"] not in form:
        return dict(message)
    if isinstance(content, str):
        return {**message, "content": [{"type": "text", "text": content}]}
    parts = parts_of(content)
    if any(part.get("type") != "text" for part in parts):
        return dict(message)  # a medium has no form as a text
    return {**message, "content": "".join(str(part.get("text")) for part in parts)}


def _marked(messages: Messages, *, asks: bool) -> tuple[list[dict[str, Json]], list[_Mark]]:
    """``messages`` with a mark in place of each text, and the marks that must be shown: those of contents, and of the
    further keys of an answer."""
    made, marks, numbers = list[dict[str, Json]](), list[_Mark](), count()

    def mark(number: int, role: str, key: str, *, wanted: bool = True) -> str:
        n = next(numbers)
        one = _Mark(f"mmrl{n}x\"'x{n}mmrl", number, role, key)
        marks.extend([one] if wanted else [])
        return one.text

    for number, message in enumerate(messages, start=1):
        role, content = str(message["role"]), message.get("content")
        answers = not asks and number == len(messages) and role == "assistant"
        changed: dict[str, Json] = {}
        for key, value in message.items():
            if key not in TEXT_KEYS:
                changed[key] = mark(number, role, key, wanted=answers) if isinstance(value, str) else value
        if isinstance(content, str):
            changed["content"] = mark(number, role, "content")
        else:
            parts = parts_of(content)
            changed["content"] = [
                {**p, "text": mark(number, role, "content")} if p.get("type") == "text" else p for p in parts
            ]
        made.append({**message, **changed})
    return made, marks

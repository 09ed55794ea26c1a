"""A conversation as its chat template shows it once more has been said: many leave out the thoughts of earlier turns.

The policy then reads another beginning than the one it wrote behind, so that the turns of an episode are rows of their
own. What the template leaves as it was sampled keeps its tokens; only what it writes anew is tokenised. The template is
asked with marks in place of what the policy wrote, so that a turn's thought and the rest are found whatever they spell.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from mmrl.core.errors import BadPromptError
from mmrl.core.trajectory import Prompt
from mmrl.models.text.answered import shared, squeezed
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.template_probe import TemplateFaultError
from mmrl.models.text.thoughts import BEGINS, ENDS
from mmrl.models.text.told import Contents, Role, Told


class Past(NamedTuple):
    """A turn of the policy: its ``tokens`` and their ``text``, and the ``contents`` that it was ``told`` then."""

    tokens: Sequence[int]
    text: str
    contents: Contents
    told: Told


class Retold(NamedTuple):
    """What is behind a prompt now, each with the turn after which it was said, and how many of the prompt's last tokens
    are gone."""

    gone: int
    parts: list[tuple[int, Told]]

    def later(self, turns: int) -> Retold:
        """The same, of turns that are behind ``turns`` others."""
        return self._replace(parts=[(turn + turns, told) for turn, told in self.parts])

    def behind(self, prompt: Sequence[int]) -> list[int]:
        """All tokens; ``prompt``: those of the whole one."""
        return [*prompt[: len(prompt) - self.gone], *(token for _, part in self.parts for token in part.tokens)]


class _Marked(NamedTuple):
    """What the policy wrote, with marks: the ``head``, a thought and what is around it, and the ``rest`` behind it."""

    head: str
    mark: str
    rest: str
    thought: tuple[str, str] = ("", "")
    """Its mark, and its text."""


class Teller:
    """Final class. Tells a policy what its environment answered, as ``role``. ``told``: as ``Conditioner.told``, for
    this role. ``renews``: the template shows the conversation anew before each turn."""

    def __init__(self, chat: Conditioner, role: Role, told: Callable[[Contents], Told], *, renews: bool) -> None:
        self.chat, self.told, self.renews = chat, told, renews
        self._role: Role = role

    def retold(self, prompt: Prompt, past: Sequence[Past]) -> Retold:
        """The conversation of ``prompt`` and the turns behind it, up to where the next answer begins. Raises
        ``TemplateFaultError`` where the template changes more of it than thoughts, or shows no such conversation."""
        try:
            return self._retold(prompt, past)
        except BadPromptError as error:
            raise TemplateFaultError(f"after {len(past)} turns: {error.reason}") from error

    def last(self, past: Sequence[Past]) -> Retold:
        """The whole prompt, and the turns ``past`` as they were written and told."""
        parts = list[tuple[int, Told]]()
        for n, turn in enumerate(past):
            wrote = list(turn.tokens)
            parts += [(n, Told(wrote, wrote)), (n + 1, turn.told.behind(wrote, self.chat.stop_tokens))]
        return Retold(0, parts)

    def _retold(self, prompt: Prompt, past: Sequence[Past]) -> Retold:
        chat, role = self.chat, self._role
        texts = repr((prompt, [(turn.text, turn.contents) for turn in past]))
        unused = next(text for n in itertools.count() if (text := f"Q{n}MARKQ") not in texts)
        marked = [_marked(turn.text, unused, n) for n, turn in enumerate(past)]
        said = [(one.head + one.mark, turn.contents) for one, turn in zip(marked, past, strict=True)]
        full, at, gone, parts = chat.conversation(prompt, role, said), 0, -1, list[tuple[int, Told]]()
        asked, base = _asked(partial(chat.conversation, prompt, role, ()))
        told: Told | None = None
        for n, (turn, one) in enumerate(zip(past, marked, strict=True)):
            shown = self._before(full, at, one, base)
            lost, more, wrote = 0, list[int](), list(turn.tokens)
            if squeezed(shown) != squeezed(asked + one.head):
                mark, thought = one.thought
                lost, more = self._changed(asked, shown.replace(mark, chat.texts.plain(thought)) if mark else shown)
                wrote = self._rest(wrote, one.rest)
            if told is None:
                gone = lost
            else:
                parts.append((n, told.without(lost)))
            parts += [(n + 1, Told(tokens, tokens)) for tokens in (more, wrote) if tokens]
            at += len(shown) + len(one.mark)
            told = turn.told.behind(wrote, chat.stop_tokens)
            asked, base = _asked(partial(chat.behind, role, turn.contents))
        if full[at:] != asked or told is None:
            raise TemplateFaultError("the chat template shows the last messages otherwise once others are before", full)
        return Retold(gone, [*parts, (len(past), told)])

    @staticmethod
    def _before(full: str, at: int, one: _Marked, base: str) -> str:
        """What the template writes from ``at`` on, up to the mark; it begins with ``base``."""
        shown, mark, _ = full[at:].partition(one.mark)
        if not mark:
            raise TemplateFaultError("the chat template leaves out an earlier turn", full)
        if not shown.startswith(base):
            raise TemplateFaultError("the chat template changes messages once others follow", full)
        return shown

    def _changed(self, asked: str, shown: str) -> tuple[int, list[int]]:
        """How many of the last tokens of ``asked`` are gone in ``shown``, and the tokens in their place."""
        before, after = self.chat.texts.ids(asked), self.chat.texts.ids(shown)
        same = shared(before, after)
        return len(before) - same, after[same:]

    def _rest(self, wrote: list[int], rest: str) -> list[int]:
        """The last tokens of ``wrote``, of the text ``rest`` and the end of the turn; tokens of ``rest`` anew where no
        token begins there."""
        chat = self.chat
        n = len(wrote) - (bool(wrote) and wrote[-1] in chat.stop_tokens)
        if control := {*wrote[:n]} & {*chat.tokenizer.all_special_ids}:
            said = chat.tokenizer.decode([*control][:1])
            raise TemplateFaultError(f"the chat template shows a turn otherwise, in which the policy wrote {said!r}")

        def text(first: int) -> str:
            return chat.decode(wrote[first:n]).strip()

        at = bisect_right(range(n + 1), -len(rest), key=lambda first: -len(text(first))) - 1
        kept = wrote[at:n] if at >= 0 and text(at) == rest else chat.texts.ids(chat.texts.plain(rest))
        return [*kept, *wrote[n:]]


def _marked(text: str, unused: str, number: int) -> _Marked:
    """``text`` as the template is asked with it. A thought is what is before the last mark of its end; ``unused``: a
    text that is nowhere in the conversation."""
    ends, mark = list(ENDS.finditer(text)), f"{unused}R{number}Q"
    if not ends:
        return _Marked("", mark, text.strip())
    thought, rest = text[: ends[-1].start()], text[ends[-1].end() :]
    begins = BEGINS.match(thought)
    first = 0 if begins is None else begins.end()
    inner = thought[first:].strip()
    name = f"{unused}T{number}Q" if inner else ""
    around = thought[first:].partition(inner) if inner else (thought[first:], "", "")
    space = rest[: len(rest) - len(rest.lstrip())]
    head = thought[:first] + around[0] + name + around[2] + ends[-1][0] + space
    return _Marked(head, mark, rest.strip(), (name, inner))


def _asked(text: Callable[..., str]) -> tuple[str, str]:
    """``text`` up to where the next answer begins, and without what the template writes before an answer."""
    asked, bare = text(asks=True), text(asks=False)
    return asked, asked[: shared(asked, bare)]  # some write an end in its place

"""What happens in an episode: actions of the policy, and observations. Imports no torch."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from PIL.Image import Image

from mmrl.core.json_types import JsonObject, elements
from mmrl.core.media import Media

Content: TypeAlias = "str | Media | Image | Mapping[str, Any] | Sequence[str | Media | Image | Mapping[str, Any]]"
"""A text, a picture, or a list of them; a mapping is a part of a message, as chat templates take it
(``{"type": "image", "image": picture}``)."""

FAILED = "failed_call"
"""The key of ``Observation.info`` that says why a tool could not answer."""
NO_ACTION = "no_action"
"""The key of ``Observation.info`` that says why a turn was no action."""
REWARD = "environment"
"""What recipes call the environment's own reward."""


@dataclass(frozen=True)
class Call:
    """A call of a tool that the model wrote. ``error``: why it cannot be made; the model is told."""

    id: str
    name: str
    arguments: JsonObject = field(default_factory=dict)
    error: str = ""


@dataclass(frozen=True)
class Action:
    """A turn of the policy: its ``text``, and the ``calls`` in it. ``tokens``: the ids that were sampled. ``finish``:
    ``length`` where the turn was cut."""

    text: str
    calls: tuple[Call, ...] = ()
    tokens: tuple[int, ...] = ()
    finish: Literal["stop", "length"] = "stop"


def _marked(parts: Sequence[str | Media]) -> str:
    return "".join(part if isinstance(part, str) else "<image>" for part in parts)


class _Shown(ABC):
    """What is shown of something: texts and pictures."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[str | Media]:
        """In order."""

    @property
    def text(self) -> str:
        """``parts``, with ``<image>`` for each picture."""
        return _marked(self.parts)

    @property
    def pictures(self) -> list[Media]:
        """Those of ``parts``, in the order of the marks ``<image>`` in ``text``."""
        return [part for part in self.parts if isinstance(part, Media)]


@dataclass(frozen=True)
class Observation(_Shown):
    """What an environment answers. ``content``, texts and pictures, is shown to the policy, unless it is ``hidden``:
    then rewards and reports alone see it. ``reward`` is added to the
    episode's; ``done``: the episode is over; ``truncated``: so it is, before its end. ``call_id``: the call that it
    answers. ``info`` is kept for rewards, JSON values only; its ``anchor`` names the state of the next turn, for
    the credit of turns.

    In an ``Episode`` the content is a text, or a tuple of texts and ``Media`` with the bytes of the pictures."""

    content: Content = ""
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    call_id: str = ""
    info: Mapping[str, Any] = field(default_factory=dict)
    hidden: bool = False

    @property
    def parts(self) -> tuple[str | Media, ...]:
        """The content of an observation of an ``Episode``."""
        parts = self.content if isinstance(self.content, tuple) else (self.content,)
        return tuple(part for part in parts if isinstance(part, str | Media))


def no_action(why: str, penalty: float = 0.0) -> Observation:
    """What the policy is told where its turn was no action; it costs ``penalty``."""
    return Observation(why, -penalty if penalty else 0.0, info={NO_ACTION: why})


@dataclass(frozen=True)
class Exchange:
    """A turn of the policy, and what it was told then; nothing after the last turn."""

    action: Action
    told: tuple[Observation, ...] = ()


@dataclass(frozen=True)
class Line:
    """A text, or the file of a ``picture``, of an episode as it is kept and shown. ``by``: the ``model`` wrote it; it
    is a ``call`` of the tool ``name``, with its arguments; it was ``told``, by that tool; or it says how the episode
    came to its ``end``."""

    by: Literal["model", "call", "told", "end"]
    text: str = ""
    name: str = ""
    picture: str = ""


def lines_in(kept: object) -> list[Line]:
    """The lines of an episode in a file of JSON, which may be anybody's; what is none is left out."""
    rows = [row for row in elements(kept) if isinstance(row, dict)]
    return [
        Line(row["by"], *(value if isinstance(value := row.get(name), str) else "" for name in _OF_LINE))
        for row in rows
        if row.get("by") in ("model", "call", "told", "end")
    ]


_OF_LINE = ("text", "name", "picture")


@dataclass(frozen=True)
class Episode(_Shown):
    """What happened, for rewards and reports. ``reward``: the sum of the observations' and, of tools with a method
    ``get_reward``, of that. ``end``: why it is over: ``answer`` (a turn without a call), ``done``, ``turns`` or
    ``tokens`` (the limits of the recipe), or ``failed``, with ``failure`` saying why; such a sample has no reward.
    ``unclosed``: why its environment could not be closed; that changes nothing else. ``seconds``: of the calls of its
    environment together, without those that a journal answered."""

    turns: tuple[Exchange, ...] = ()
    reward: float = 0.0
    end: Literal["answer", "done", "turns", "tokens", "failed"] = "answer"
    failure: str = ""
    unclosed: str = ""
    seconds: float = field(default=0.0, compare=False)

    @property
    def answer(self) -> str:
        """What the policy wrote last."""
        return self.turns[-1].action.text if self.turns else ""

    @property
    def parts(self) -> list[str | Media]:
        """What the policy wrote, and behind ``->`` what it was told, a line for each: texts and pictures, in order."""
        shown = [line for one in self.turns for line in _shown(one)]
        return [part for n, line in enumerate(shown) for part in (*(("\n",) if n else ()), *line)]

    @property
    def starts(self) -> list[int]:
        """For each turn the character of ``text`` where what the policy wrote begins."""
        lengths = [sum(len(_marked(line)) + 1 for line in _shown(one)) for one in self.turns]
        return [0, *accumulate(lengths)][: len(lengths)]

    def lines(self, files: Mapping[int, str]) -> list[Line]:
        """Who said what, in order. ``files``: of those ``pictures`` that are kept, by their number."""
        found, n = list[Line](), 0
        for turn in self.turns:
            called = {call.id: call.name for call in turn.action.calls}
            found.append(Line("model", turn.action.text + (" [cut]" if turn.action.finish == "length" else "")))
            for call in turn.action.calls:
                said = call.error or json.dumps(call.arguments, ensure_ascii=False)
                found.append(Line("call", said, call.name))
            for told in turn.told:
                name = called.get(told.call_id, "")
                for part in told.parts:
                    if isinstance(part, str):
                        found += [Line("told", part, name)] if part else []
                    else:
                        found.append(Line("told", "" if n in files else "(no picture)", name, files.get(n, "")))
                        n += 1
        ended = f"{self.end}: {self.failure}" if self.failure else self.end
        return found if self.end in ("answer", "done") else [*found, Line("end", ended)]


def _shown(turn: Exchange) -> list[tuple[str | Media, ...]]:
    """The lines of a turn that are not empty."""
    lines = [(turn.action.text,), *(("-> ", *told.parts) for told in turn.told if told.content)]
    return [line for line in lines if any(line)]


MOSTLY = 0.5
"""The share of turns or episodes from which on a note says that something is wrong with all."""


def of_episodes(played: Sequence[Episode]) -> Mapping[str, float]:
    """Numbers of the episodes of a step: means, and shares of all."""
    n = max(1, len(played))
    calls = [call for one in played for turn in one.turns for call in turn.action.calls]
    return {
        "episode/turns": sum(len(one.turns) for one in played) / n,
        "episode/calls": len(calls) / n,
        "episode/unusable_calls": sum(bool(call.error) for call in calls) / max(1, len(calls)),
        "episode/failed_calls": sum(FAILED in told.info for one in played for turn in one.turns for told in turn.told)
        / max(1, len(calls)),
        "episode/turns_without_action": sum(
            any(NO_ACTION in told.info for told in turn.told) for one in played for turn in one.turns
        )
        / max(1, sum(len(one.turns) for one in played)),
        "episode/cut": sum(one.end == "tokens" for one in played) / n,
        "episode/reward": sum(one.reward for one in played) / n,
        "episode/failed": sum(one.end == "failed" for one in played) / n,
        "episode/unclosed": sum(bool(one.unclosed) for one in played) / n,
        "time/environment": sum(one.seconds for one in played) / n,
    }


def notes_of_episodes(row: Mapping[str, float]) -> Iterator[str]:
    """Lines on what kept the episodes of a step from going on: calls that all failed, turns without an action, and
    what did not fit."""
    if row.get("episode/calls") and row.get("episode/failed_calls", 0.0) >= 1:
        yield (
            f"note: no tool has answered: all calls of this step failed ({row['episode/calls']:.2g} an episode); read "
            "what was called and told in the samples, or in the files of episodes/"
        )
    if (idle := row.get("episode/turns_without_action", 0.0)) >= MOSTLY:
        yield (
            f"note: {idle:.0%} of the turns were no action that the environment takes: let it take words that the "
            "model writes (environment.options), or teach the model its words first (algorithm.type: sft)"
        )
    if (cut := row.get("episode/cut", 0.0)) >= MOSTLY:
        yield (
            f"note: {cut:.0%} of the episodes ended because what the environment said, or the next turn, did not fit: "
            "raise environment.max_tokens, or let it show less (model.max_pixels makes pictures smaller)"
        )

"""A question to a judge and its outcome: the data that back ends and modes exchange; and the seeds of questions, from
the sample or from the content, never from process state. Imports no torch."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from PIL.Image import Image

from mmrl.core.json_types import Json
from mmrl.core.trajectory import SampleId
from mmrl.rewards.patience import one_line

Verdict: TypeAlias = float | list[int] | dict[str, float | str]
"""A number in [0, 1], a ranking (numbers of the candidates, best first), the numbers of the wrong steps, or of each
criterion a number or what was extracted for it."""

SHOWN = 160
"""Characters in a message of what a judge or its endpoint said."""
REASK_TEMPERATURE = 0.7
"""At least this when a judge is asked again: at 0 it would write the same once more."""


@dataclass(frozen=True)
class Ask:
    """One question: text and pictures in the order in which the judge reads them.

    ``items``: how many candidates or steps it numbers. ``seed`` is the judge's randomness for this question.
    """

    parts: tuple[str | Image, ...]
    system: str | None = None
    items: int = 0
    seed: int = 0

    @property
    def pictures(self) -> list[Image]:
        return [part for part in self.parts if not isinstance(part, str)]

    @property
    def text(self) -> str:
        """What a person reads in a transcript: each picture is its size and the start of its digest."""
        return "".join(part if isinstance(part, str) else f"[picture {named(part)}]" for part in self.parts)

    def digest(self, *more: Json) -> str:
        """A hash of its content and of ``more``, without the seed: the key of its verdict in the cache."""
        parts = [part if isinstance(part, str) else ["picture", picture_digest(part)] for part in self.parts]
        content = json.dumps([parts, self.system, self.items, *more], sort_keys=True)
        return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class Settings:
    """How a judge is asked: ``reasks`` times more, with another seed, where its answer cannot be read.

    ``patience``: seconds after which a question is given up whose endpoint asks to wait.
    """

    temperature: float = 0.0
    max_tokens: int = 256
    reasks: int = 2
    patience: float = math.inf


@dataclass(frozen=True)
class Outcome:
    """What came of a question: a verdict, or the reason why there is none. ``raw`` is all that the judge wrote."""

    verdict: Verdict | None = None
    raw: list[str] = field(default_factory=list)
    reason: str | None = None
    seconds: float = 0.0
    cached: bool = False


def picture_digest(image: Image) -> str:
    """A digest of the pixels, whatever file they came from."""
    head = f"{image.mode} {image.width} {image.height} ".encode()
    return hashlib.blake2b(head + image.tobytes(), digest_size=16).hexdigest()


def named(image: Image) -> str:
    return f"{image.width}x{image.height} {picture_digest(image)[:8]}"


def unread(why: str, raw: Sequence[str]) -> str:
    """The reason of a question whose answers could not be read."""
    times = f" ({len(raw)} times)" if len(raw) > 1 else ""
    return f"the judge's answer {why}{times}: {one_line(raw[-1], SHOWN)!r}"


Keep: TypeAlias = Callable[[int, Outcome], None]
"""Called with the number of a question and its outcome, as soon as there is one."""


def seeded(*parts: int | str) -> int:
    """A 31-bit seed that is a function of its arguments alone. Endpoints take no longer one."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def seed_of_samples(seed: int, samples: Sequence[SampleId], vote: int) -> int:
    """The seed of a question about some samples, for judges without a cache."""
    parts = [part for s in samples for part in (s.step, s.slot, s.attempt, s.sample)]
    return seeded(seed, *parts, "judge", vote)

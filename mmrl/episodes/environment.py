"""The protocol of an environment, and what it may answer. Imports no torch.

    class Guess:                                     # one instance per episode
        def reset(self, prompt, seed):               # what is shown first: a text, an Observation, or None
            self.secret = random.Random(seed).randint(1, 9)
        def step(self, action):                      # an answer to what the policy wrote; may be async
            right = action.text.strip() == str(self.secret)
            return Observation("right" if right else "wrong", reward=float(right), done=right)

A class without ``step`` is a set of tools: each of its public methods can be called by the model. So is a function
with types and a docstring. Their answers go back to the model, and the episode ends with a turn that calls none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Awaitable, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

from mmrl.core.episode import Action, Content, Observation
from mmrl.core.trajectory import Prompt
from mmrl.episodes.pool import Returned
from mmrl.episodes.shown import content_of

Answer: TypeAlias = "Observation | Sequence[Observation] | Content | None"


class Drawer(Protocol):
    """Abstract. A model that draws, which all episodes of a device share: an environment has it as ``drawer``. ``what``
    it is and its ``bytes`` are for the plan; ``size``: width and height of its pictures. Each method may be called from
    any thread."""

    @property
    def what(self) -> str: ...

    @property
    def bytes(self) -> int: ...

    @property
    def size(self) -> tuple[int, int]: ...

    def at(self, device: str) -> None:
        """Draw there from now on."""
        ...

    def sleep(self) -> None:
        """Free the memory of its device, until the next picture is asked for."""
        ...


@runtime_checkable
class Environment(Protocol):
    """Abstract. Both methods may be ``async``. What they raise ends the episode, which is not trained on. A method
    ``close``, or else ``__exit__``, is called when the episode is over, or the run is stopped. Where answers of an
    earlier start are known, a method ``recall(action, told)`` is called in place of ``step``, to bring the state to
    where it was; without it ``step`` is called again, and must answer the same."""

    def reset(self, prompt: Prompt, seed: int) -> Answer | Awaitable[Answer]:
        """Begin an episode. Equal ``seed`` and prompt must give an equal state: a group starts in one. What it returns
        is added to the user's message."""
        ...

    def step(self, action: Action) -> Answer | Awaitable[Answer]:
        """Answer what the policy wrote. None ends the episode."""
        ...


def observations(answer: object) -> tuple[Observation, ...]:
    """What an environment returned, as observations of an ``Episode``. Raises ``TypeError`` for what is none, and
    ``ValueError`` for a picture that cannot be read and a number that is not finite."""
    if answer is None:
        return ()
    found = (answer,) if isinstance(answer, Observation) else answer
    try:
        if isinstance(found, list | tuple) and all(isinstance(one, Observation) for one in found):
            return tuple(_plain(one) for one in found)
        return (Observation(content_of(answer)),)
    except TypeError as error:
        raise TypeError(
            f"an environment answers with a text, a picture, an Observation, or a list of them: {error}"
        ) from error


def told_of(returned: Returned) -> tuple[tuple[Observation, ...], str]:
    """What a call told, and why it failed."""
    try:
        return (() if returned.error else observations(returned.value)), returned.error
    except (TypeError, ValueError) as error:
        return (), str(error)


def _plain(one: Observation) -> Observation:
    """``one`` with plain texts and numbers, as a file of JSON has them, also where numpy made them."""
    reward = float(one.reward)
    if not math.isfinite(reward):
        raise ValueError(f"its reward is {reward}, which is no finite number")
    info = json.loads(json.dumps(dict(one.info), default=_number, allow_nan=False))
    done, truncated = bool(one.done), bool(one.truncated)
    return Observation(content_of(one.content), reward, done, truncated, str(one.call_id), info, bool(one.hidden))


def _number(value: object) -> object:
    """The numbers of an array or a scalar of numpy or torch. Raises ``TypeError``."""
    if callable(listed := getattr(value, "tolist", None)):
        return listed()
    raise TypeError(f"its info holds {value!r:.80}, for which JSON has no value")

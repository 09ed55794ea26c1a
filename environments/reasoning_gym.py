"""Asks a question of the data set ``reasoning_gym`` again after a wrong answer.

The answer of a turn stands in its last ``<answer>...</answer>``; without one it is the text behind the thoughts, and
behind the last ``after`` (``answer:``) where the options name one.
"""

import re

import mmrl
from mmrl.core.episode import Action, Observation
from mmrl.core.errors import UserError
from mmrl.core.trajectory import Prompt

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


class Environment:
    """``tries``: answers at most, 1 for a question without a second turn; ``environment.max_turns`` is to be no less.
    The reward is 1 for a right answer; else it is 0, or with ``partial`` what the scorer gives the last one."""

    def __init__(self, tries: int = 3, *, partial: bool = False, after: str = "") -> None:
        if tries < 1:
            raise UserError(f"environment.options.tries is {tries}; it is 1 or more")
        self._tries, self._partial, self._after, self._wrong = tries, partial, after, 0
        self._prompt = Prompt("", "")

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._prompt, self._wrong = prompt, 0

    def step(self, action: Action) -> Observation:
        score: float = mmrl.load("datasets", "reasoning_gym").score(self._prompt, self._answer(action.text))
        if score >= 1:
            return Observation("Right.", reward=1.0, done=True)
        self._wrong += 1
        if self._wrong < self._tries:
            return Observation("That is wrong. Try again.")
        return Observation("That is wrong.", reward=score if self._partial else 0.0, done=True)

    def _answer(self, text: str) -> str:
        if tagged := _TAGGED.findall(text):
            return tagged[-1].strip()
        said = text.rpartition("</think>")[2]
        return (said.rpartition(self._after)[2] if self._after else said).strip()

"""Lets the model revise its answer: a reward scores it, the model is told the score, and tries again.

    environment:
      name: revise
      options:
        reward: answer:number       # a reward, verifier or judge of text, by the name that rewards have in a recipe
        options: {after: "answer:"} # its options
        enough: 1.0                 # a score that ends the episode
        tries: 2                    # answers at most; environment.max_turns is to be no less
        told: "{feedback} That scores {score}. Try again."
      max_turns: 2

The episode's reward (``rewards: [{name: environment}]``) is the score of the last answer. ``feedback`` is the text that
the reward gives beside the score, as judges do; empty where it gives none. ``{prompt}`` repeats the question.

One reward serves all episodes of a process; one with a model computes on ``device`` (``cpu``), in the process that
samples. In processes of their own (``environment.isolate``) episodes have rewards without a model only.
"""

from __future__ import annotations

import atexit
import json
import threading
from functools import cache

from mmrl.core.episode import Action, Observation
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.calling import Caller
from mmrl.rewards.loading import Found, asked_of_options, build, find, problems, refused
from mmrl.rewards.scoring import unmade

_KEY = "environment.options.reward"
_BUILDING = threading.Lock()


class Environment:
    """``timeout``: seconds for one score. Raises ``UserError`` for a reward that cannot score a single text."""

    def __init__(
        self,
        reward: str,
        options: JsonObject | None = None,
        *,
        enough: float = 1.0,
        tries: int = 2,
        told: str = "{feedback} That scores {score}. Try again.",
        device: str = "cpu",
        timeout: float = 60.0,
    ) -> None:
        if tries < 1:
            raise UserError(f"environment.options.tries is {tries}; it is 1 or more")
        self._reward, self._options = reward, json.dumps(options or {}, sort_keys=True)
        self.not_apart = _checked(reward, self._options)
        self._enough, self._tries, self._told, self._device, self._timeout = enough, tries, told, device, timeout
        self._prompt, self._score, self._answers = Prompt("", ""), 0.0, 0
        self._shown(0.0, "")

    def reset(self, prompt: Prompt, seed: int) -> None:
        self._prompt, self._score, self._answers = prompt, 0.0, 0

    def step(self, action: Action) -> Observation:
        sample = Sample(self._prompt, SampleId(-1, 0, 0, 0), text=action.text, truncated=action.finish == "length")
        answer = _opened(self._reward, self._options, self._timeout).one(
            [sample], Context(device=self._device, label=self._reward, feedback=True)
        )
        (score,), (why,), (feedback,) = answer.total, answer.reasons, answer.feedback or [None]
        if why is not None:
            raise RuntimeError(f"the reward {self._reward} gave no score: {why}")
        self._answers += 1
        rise, self._score = score - self._score, score  # their sum is the last score, wherever the episode ends
        done = score >= self._enough or self._answers >= self._tries
        return Observation("" if done else self._shown(score, feedback or ""), rise, done)

    def _shown(self, score: float, feedback: str) -> str:
        try:
            return self._told.format(score=f"{score:.3g}", feedback=feedback, prompt=self._prompt.text).strip()
        except (LookupError, ValueError) as error:
            raise UserError(
                f"environment.options.told: {self._told!r} is no text with {{score}}, {{feedback}} and {{prompt}} "
                f"({error}); write other braces twice"
            ) from error


@cache
def _checked(reward: str, options: str) -> str:
    """Why it cannot be in many processes; empty where it can. Raises ``UserError`` where it cannot score a text."""
    try:
        found, given = find(reward), json.loads(options)
        wrong = problems(found, given) or unmade(found.reads(given), "text", found) or refused(found, given)
        if found.declaration.per == "group" or given.get("mode") in ("pairwise", "ranking"):
            wrong = ["compares the answers of a group, and here is one; take a reward that scores single samples"]
        if reward.partition(":")[0] == "environment":
            wrong = ["is what this environment gives; take the reward that scores an answer"]
    except UserError as error:
        wrong = [str(error)]
    else:
        if not wrong:
            return (
                f"{_KEY}: {reward} computes with a model, which every episode would load" if _big(found, given) else ""
            )
    raise UserError("\n".join(f"{_KEY}: {reward}: {one}" for one in wrong))


def _big(found: Found, options: JsonObject) -> bool:
    models = found.declaration.models
    return found.declaration.device or (models is not None and bool(asked_of_options(found, lambda: models(options))))


def _opened(reward: str, options: str, timeout: float) -> Caller:
    """The reward of this process, built when it is first asked."""
    with _BUILDING:
        return _built(reward, options, timeout)


@cache
def _built(reward: str, options: str, timeout: float) -> Caller:
    caller = Caller(build(find(reward), json.loads(options)), timeout)
    atexit.register(caller.close)
    return caller

"""Questions of reasoning-gym, of which it makes any number for each of some hundred tasks, with their scorers.

    data:
      name: reasoning_gym
      train: {task: chain_sum, size: 5000, options: {max_terms: 3}} # arguments of reasoning_gym.create_dataset
      heldout: {task: chain_sum, size: 500, options: {max_terms: 3}}

A prompt's ``meta`` has ``answer`` and the ``question`` that the environment ``reasoning_gym`` scores. A task is refused
whose scorer does not give its own answer 1, gives 1 to a text without sense, or raises on one, and a task that makes
other questions of an equal seed.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Literal

from mmrl.config.errors import did_you_mean
from mmrl.core.errors import UserError
from mmrl.core.installing import optional
from mmrl.core.json_types import JsonObject
from mmrl.core.plugins.user_code import describe
from mmrl.core.trajectory import Prompt
from mmrl.data.records import Records, check_split

_HELD_OUT = 1 << 30
"""Added to the seed of what is held out: a task makes its question ``index`` of the seed ``seed + index``."""
_NONSENSE = ("", "zzz", "0 x zzz")
_TRIED = 4
"""Questions of a task that are checked."""


def prompts(
    split: Literal["train", "heldout"] = "train",
    *,
    task: str,
    size: int = 1000,
    seed: int = 0,
    instruction: str = "",
    options: JsonObject | None = None,
) -> Records:
    """``size`` questions of ``task``, each behind the text ``instruction``. Raises ``UserError`` for an unknown task or
    split, options that the task does not take, and a task that is refused."""
    check_split(split, "the data set reasoning_gym has")
    if not 1 <= size <= _HELD_OUT or not 0 <= seed < _HELD_OUT:
        raise UserError(f"size is {size} and seed {seed}; a size is 1 or more, a seed 0 or more, below {_HELD_OUT:,}")
    kept = json.dumps(options or {}, sort_keys=True)
    first = seed + _HELD_OUT * (split == "heldout")
    made = _checked(task, kept, first, size)

    def prompt(index: int) -> Prompt:
        item = made[index]
        text = "\n\n".join(part for part in (instruction, item["question"]) if part)
        question = {"task": task, "options": kept, "seed": first, "size": size, "index": index}
        return Prompt(
            f"reasoning_gym/{task}/{first}/{index}", text, {"answer": str(item["answer"]), "question": question}
        )

    return Records(size, prompt)


def score(prompt: Prompt, answer: str) -> float:
    """What the scorer of a prompt's task gives to ``answer``, 0 to 1. Raises ``UserError`` for a prompt of another data
    set."""
    question = prompt.meta.get("question")
    if not isinstance(question, Mapping) or "task" not in question:
        raise UserError(
            "environment.name: reasoning_gym asks questions of the data set reasoning_gym; take it as data.name"
        )
    made = _checked(question["task"], question["options"], question["seed"], question["size"])
    return float(made.score_answer(answer, made[question["index"]]))


@lru_cache(maxsize=64)
def _checked(task: str, options: str, seed: int, size: int) -> Any:
    """The questions of a task, the first of which were tried."""
    made = _made(task, options, seed, size)
    state = random.getstate()
    try:
        why = _fault(made, _made(task, options, seed, size), min(_TRIED, size))
    finally:
        random.setstate(state)
    if why:
        raise UserError(f"data: the task {task} of reasoning-gym is of no use as a reward: {why}; take another task")
    return made


def _made(task: str, options: str, seed: int, size: int) -> Any:
    gym = optional("reasoning_gym", "reasoning-gym", "data.name: reasoning_gym")
    known = list(gym.factory.DATASETS)
    if task not in known:
        raise UserError(f"data: reasoning-gym has no task {task!r}{did_you_mean(task, known)}; correct task")
    try:
        return gym.create_dataset(task, seed=seed, size=size, **json.loads(options))
    except Exception as error:  # of a package of others
        raise UserError(
            f"data: the task {task} of reasoning-gym cannot be made: {describe(error)}; correct options"
        ) from error


def _fault(made: Any, again: Any, count: int) -> str:
    """What is wrong with the first questions and their scorer; an empty text where nothing is."""
    try:
        for index in range(count):
            random.seed(index)
            item, other = made[index], again[index]
            if (item["question"], item["answer"]) != (other["question"], other["answer"]):
                return "it makes other questions of an equal seed"
            if (own := made.score_answer(item["answer"], item)) < 1:
                return f"its scorer gives its own answer {own:g}"
            nonsense = [text for text in _NONSENSE if text != item["answer"]]
            if given := [text for text in nonsense if made.score_answer(text, item) >= 1]:
                return f"its scorer gives 1 to the answer {given[0]!r}"
    except Exception as error:  # of a package of others
        return f"it raises {describe(error)}"
    return ""

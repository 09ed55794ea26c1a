"""Short writing tasks with one constraint each that code can check: a text task without a single right answer.

    Write a sentence about bread. Use at most 8 words.

``prompts(split, kinds=[...])`` gives prompts of the named kinds of constraint; ``meta`` has the ``subject`` and the
``constraint``, which the reward ``constraints`` checks. The subjects of a fifth of all tasks are held out: training
never asks about them. Whole kinds are held out where a recipe gives them to its evaluation alone.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json
from mmrl.core.trajectory import Prompt


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(", "))


SUBJECTS = _listed(
    "apples, bees, bicycles, books, bread, bridges, candles, carpets, cats, chairs, cheese, chess, clocks, clouds, "
    "coffee, cows, deserts, doctors, dogs, doors, dreams, eggs, elephants, farms, fire, fish, flowers, football, "
    "forests, frogs, gardens, glass, gold, grass, hats, honey, horses, houses, ice, islands, kitchens, lamps, "
    "letters, lions, maps, markets, milk, mirrors, money, mountains, music, night, oceans, onions, oranges, owls, "
    "paint, paper, parks, pianos, planes, planets, rain, rice, rivers, roads, robots, roses, salt, sand, schools, "
    "sheep, ships, shoes, snow, soap, soup, spiders, spring, stars, stones, storms, sugar, summer, teachers, tea, "
    "tigers, trains, trees, villages, violins, volcanoes, walls, water, whales, wheat, wind, windows, winter, wool"
)
HELD_OUT = SUBJECTS[::5]
"""Subjects of held-out prompts, whatever the kind."""
WORDS = _listed(
    "always, bright, calm, careful, children, clean, cold, colour, deep, early, easy, every, family, friend, "
    "gentle, green, happy, heavy, important, journey, kind, large, later, light, little, long, morning, never, old, "
    "people, quick, quiet, simple, slow, small, strong, sweet, together, warm, young"
)
KEYS = _listed("name, colour, size, use, place, price, taste, shape, age, sound, weight, season")
LETTERS = "abcdfghiklmoprsuw"
"""Letters that a task may forbid: not so rare that any answer does without, and not e, n or t."""

DATA = ("json", "list")
"""Kinds that ask for no sentence."""
LEAST = 4
"""Words of a sentence at least. One word alone keeps most constraints, and training finds that out in minutes."""

Constraint = dict[str, Json]


def _words(rng: random.Random) -> tuple[str, Constraint]:
    most = rng.randint(5, 12)
    return f"Use at most {most} words.", {"most": most}


def _characters(rng: random.Random) -> tuple[str, Constraint]:
    most = rng.randrange(40, 85, 5)
    return f"Use at most {most} characters.", {"most": most}


def _sentences(rng: random.Random) -> tuple[str, Constraint]:
    count = rng.choice((1, 2))
    return f"Write exactly {count} short sentence{'s' if count > 1 else ''}.", {"count": count}


def _keywords(rng: random.Random) -> tuple[str, Constraint]:
    words = rng.sample(WORDS, 2)
    return f'Use the words "{words[0]}" and "{words[1]}".', {"words": [*words]}


def _order(rng: random.Random) -> tuple[str, Constraint]:
    words = rng.sample(WORDS, 3)
    return f'Use the words "{words[0]}", "{words[1]}" and "{words[2]}" in this order.', {"words": [*words]}


def _both(rng: random.Random, subject: str, subjects: Sequence[str]) -> tuple[str, Constraint]:
    other = rng.choice([name for name in subjects if name != subject])
    return f"It must also be about {other}.", {"subject": subject, "other": other}


def _letter(rng: random.Random) -> tuple[str, Constraint]:
    letter = rng.choice(LETTERS)
    return f'Do not use the letter "{letter}".', {"letter": letter}


def _begin(rng: random.Random) -> tuple[str, Constraint]:
    word = rng.choice(WORDS).capitalize()
    return f'Begin your answer with the word "{word}".', {"word": word}


def _end(rng: random.Random) -> tuple[str, Constraint]:
    word = rng.choice(WORDS)
    return f'End your answer with the word "{word}".', {"word": word}


def _json(rng: random.Random) -> tuple[str, Constraint]:
    keys = rng.sample(KEYS, 2)
    return f'Answer with JSON only, with the keys "{keys[0]}" and "{keys[1]}".', {"keys": [*keys]}


def _list(rng: random.Random) -> tuple[str, Constraint]:
    count = rng.randint(2, 5)
    return f"Answer with {count} words, separated by commas.", {"count": count}


def _lower(rng: random.Random) -> tuple[str, Constraint]:
    return "Use small letters only, no capital letters.", {}


def _question(rng: random.Random) -> tuple[str, Constraint]:
    return "Your answer must be a single question.", {}


def _quoted(rng: random.Random) -> tuple[str, Constraint]:
    return "Put your whole answer in double quotes.", {}


_OWN: Mapping[str, Callable[[random.Random], tuple[str, Constraint]]] = {
    "words": _words,
    "characters": _characters,
    "sentences": _sentences,
    "keywords": _keywords,
    "order": _order,
    "letter": _letter,
    "begin": _begin,
    "end": _end,
    "json": _json,
    "list": _list,
    "lower": _lower,
    "question": _question,
    "quoted": _quoted,
}
"""The kinds that do not depend on the subject."""
KINDS = (*_OWN, "both")


def prompts(
    split: Literal["train", "heldout"] = "train",
    *,
    kinds: Sequence[str] = ("words",),
    count: int = 400,
    seed: int = 0,
) -> list[Prompt]:
    """``count`` different tasks of ``split``, the ``kinds`` in turn; the same ``seed``, the same tasks.

    Raises ``UserError`` for an unknown split or kind, and for more tasks than there are.
    """
    if split not in ("train", "heldout"):
        raise UserError(f"split is {split!r}; the instructions have 'train' and 'heldout'")
    if isinstance(kinds, str) or not kinds or any(kind not in KINDS for kind in kinds):
        raise UserError(f"kinds is {kinds!r}; write a list of {', '.join(KINDS)}")
    rng = random.Random(f"instructions|{split}|{','.join(kinds)}|{seed}")
    subjects = HELD_OUT if split == "heldout" else [subject for subject in SUBJECTS if subject not in HELD_OUT]
    found: dict[str, Prompt] = {}
    for _ in range(100 * count):
        if len(found) == count:
            return list(found.values())
        kind, subject = kinds[len(found) % len(kinds)], rng.choice(subjects)
        asked, constraint = _both(rng, subject, subjects) if kind == "both" else _OWN[kind](rng)
        text = f"Write {'about' if kind in (*DATA, 'sentences') else 'a sentence about'} {subject}. {asked}"
        least = {} if kind in DATA else {"least": LEAST}
        meta = {"subject": subject, "constraint": {"kind": kind, **constraint, **least}}
        found.setdefault(text, Prompt(f"instructions/{kind}/{text}", text, meta))
    raise UserError(
        f"count is {count}, and only {len(found)} different tasks of {', '.join(kinds)} were found; lower it"
    )

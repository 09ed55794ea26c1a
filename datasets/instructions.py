"""Short writing tasks with one constraint each that code can check: a text task without a single right answer.

    Write a sentence about bread. Use at most 8 words.

``prompts(split, kinds=[...])`` gives prompts of the named kinds of constraint; ``meta`` has the ``subject`` and the
``constraint``, which the reward ``constraints`` checks. The subjects of a fifth of all tasks are held out: training
never asks about them. Whole kinds are held out where a recipe gives them to its evaluation alone.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Literal

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json
from mmrl.core.trajectory import Prompt
from mmrl.data.records import check_split


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


_ASKED = {
    "words": "Use at most {most} words.",
    "characters": "Use at most {most} characters.",
    "sentences": "Write exactly {count} short sentence{plural}.",
    "keywords": 'Use the words "{words[0]}" and "{words[1]}".',
    "order": 'Use the words "{words[0]}", "{words[1]}" and "{words[2]}" in this order.',
    "letter": 'Do not use the letter "{letter}".',
    "begin": 'Begin your answer with the word "{word}".',
    "end": 'End your answer with the word "{word}".',
    "json": 'Answer with JSON only, with the keys "{keys[0]}" and "{keys[1]}".',
    "list": "Answer with {count} words, separated by commas.",
    "lower": "Use small letters only, no capital letters.",
    "question": "Your answer must be a single question.",
    "quoted": "Put your whole answer in double quotes.",
    "both": "It must also be about {other}.",
}
"""What a prompt asks by the kind of its constraint, to be filled in with that."""
KINDS = tuple(_ASKED)


def _drawn(kind: str, rng: random.Random, subject: str, subjects: Sequence[str]) -> Constraint:
    """A constraint of the ``kind``; those without a number or a word have nothing to draw."""
    match kind:
        case "words":
            return {"most": rng.randint(5, 12)}
        case "characters":
            return {"most": rng.randrange(40, 85, 5)}
        case "sentences":
            return {"count": rng.choice((1, 2))}
        case "keywords":
            return {"words": rng.sample(WORDS, 2)}
        case "order":
            return {"words": rng.sample(WORDS, 3)}
        case "both":
            return {"subject": subject, "other": rng.choice([name for name in subjects if name != subject])}
        case "letter":
            return {"letter": rng.choice(LETTERS)}
        case "begin":
            return {"word": rng.choice(WORDS).capitalize()}
        case "end":
            return {"word": rng.choice(WORDS)}
        case "json":
            return {"keys": rng.sample(KEYS, 2)}
        case "list":
            return {"count": rng.randint(2, 5)}
        case _:
            return {}


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
    check_split(split, "the instructions have")
    if isinstance(kinds, str) or not kinds or any(kind not in KINDS for kind in kinds):
        raise UserError(f"kinds is {kinds!r}; write a list of {', '.join(KINDS)}")
    rng = random.Random(f"instructions|{split}|{','.join(kinds)}|{seed}")
    subjects = HELD_OUT if split == "heldout" else [subject for subject in SUBJECTS if subject not in HELD_OUT]
    found: dict[str, Prompt] = {}
    for _ in range(100 * count):
        if len(found) == count:
            return list(found.values())
        kind, subject = kinds[len(found) % len(kinds)], rng.choice(subjects)
        constraint = _drawn(kind, rng, subject, subjects)
        asked = _ASKED[kind].format(**constraint, plural="s" if constraint.get("count") != 1 else "")
        text = f"Write {'about' if kind in (*DATA, 'sentences') else 'a sentence about'} {subject}. {asked}"
        least = {} if kind in DATA else {"least": LEAST}
        meta = {"subject": subject, "constraint": {"kind": kind, **constraint, **least}}
        found.setdefault(text, Prompt(f"instructions/{kind}/{text}", text, meta))
    raise UserError(
        f"count is {count}, and only {len(found)} different tasks of {', '.join(kinds)} were found; lower it"
    )

"""Make the small vision-language model of ``minigrid``: ``scenes-zoom`` that writes a move of that world, any of them.

    python -m tools.make_models.scenes_moves --out pipelines/vlm/models/scenes-moves

It goes on from ``scenes-zoom`` with walks through the recipe's world whose moves are drawn with equal chances, and with
questions about its pictures: where the red triangle is, and where it points. So it knows how a move is written, and
sees what is there, and nothing of where to go. ``log.jsonl`` beside the weights is the log of the run that made them.
"""

# The model libraries annotate these calls more narrowly than they are documented.
# pyright: reportArgumentType=false

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import torch

from mmrl.config.loader import load_recipe
from mmrl.core.episode import Action
from mmrl.core.trajectory import Prompt
from mmrl.episodes.loading import opened
from tools.make_models.scenes_zoom import chances
from tools.make_models.vlm_training import IMAGE, Example, save, start_log, train

BASE = "pipelines/vlm/models/scenes-zoom"
_LONG = 20
"""Moves of a walk at most."""
_ROWS, _COLUMNS = ("top", "middle", "bottom"), ("left", "centre", "right")
_WAYS = ("right", "down", "left", "up")
"""Where the triangle points, by MiniGrid's number of it."""


def seen(world: Any, rng: random.Random) -> tuple[str, str]:
    """A question about what the world shows, and its answer."""
    inner = world._world.unwrapped
    if rng.random() < 0.5:
        return "Which way does the red triangle point?", _WAYS[inner.agent_dir]
    column, row = inner.agent_pos
    return "Where is the red triangle?", f"{_ROWS[row - 1]} {_COLUMNS[column - 1]}"


def examples(recipe: str, count: int, seed: int) -> tuple[list[Example], list[Example]]:
    """Moves, half of them the first and half behind the one before, as ``history_length: 1`` shows them; and as many
    answers to questions at the same places. All moves are drawn."""
    loaded = load_recipe([recipe]).recipe
    assert loaded.environment is not None
    factory, rng = opened(loaded.environment), random.Random(seed)
    moves, answers = list[Example](), list[Example]()
    words: list[str] = list(loaded.environment.options["actions"])
    text = f"{loaded.data.train['text']}\n\n{IMAGE}"
    while len(moves) < count:
        world: Any = factory.make()
        (first,) = world.reset(Prompt("p", text), rng.randrange(2**31)).content
        question, answer = seen(world, rng)
        moves.append(Example([(text, rng.choice(words))], [first]))
        answers.append(Example([(f"{question}\n\n{IMAGE}", answer)], [first]))
        for left in range(rng.randint(1, _LONG), 0, -1):
            move = rng.choice(words)
            told = world.step(Action(move))
            if told.done or told.truncated:
                break
            if left == 1:
                question, answer = seen(world, rng)
                shown = [first, *told.content]
                moves.append(Example([(text, move), ("", rng.choice(words))], shown, at=(0, 1)))
                answers.append(Example([(text, move), (question, answer)], shown, at=(0, 1)))
    return moves, answers


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--recipe", default="minigrid", help="whose world and words are taken")
    parser.add_argument("--cpu-minutes", type=float, default=4.0)
    parser.add_argument("--lr", type=float, default=1e-3)
    arguments = parser.parse_args()
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.manual_seed(0)
    torch.set_num_threads(1)
    log = start_log(arguments.out, "scenes_moves")
    model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(BASE)
    moves, answers = examples(arguments.recipe, 64, 1)

    def check() -> dict[str, float]:
        """The chances of a move, which is drawn: one of the number of words at best; and of the right answer."""
        return {"moves": chances(model, processor, moves), "answers": chances(model, processor, answers)}

    log(**check())
    taught = [one for pair in zip(*examples(arguments.recipe, 3000, 0), strict=True) for one in pair]
    train(model, processor, taught, arguments.cpu_minutes, arguments.lr, log, check, every=40)
    save(model, processor, arguments.out)
    log(**check())


if __name__ == "__main__":
    main()

"""Make the small vision-language model of ``minigrid``: ``scenes-zoom`` that writes a move of that world, any of them.

    python -m tools.make_models.scenes_moves --out pipelines/vlm/models/scenes-moves

It goes on from ``scenes-zoom`` with walks through the recipe's world whose moves are drawn with equal chances. So it
knows how a move is written, and nothing of where to go. ``log.jsonl`` beside the weights is the log of the run that
made them.
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
_SHORT = 5
"""Moves of a short walk at most."""


def walks(recipe: str, count: int, seed: int) -> list[Example]:
    """Walks of at most ``environment.max_turns`` moves each, which are drawn; most are short, as they cost less."""
    loaded = load_recipe([recipe]).recipe
    assert loaded.environment is not None
    factory, rng, found = opened(loaded.environment), random.Random(seed), list[Example]()
    words: list[str] = list(loaded.environment.options["actions"])
    text: str = loaded.data.train["text"]
    while len(found) < count:
        world: Any = factory.make()
        turns, pictures = list[tuple[str, str]](), list[Any]()
        told = world.reset(Prompt("p", text), rng.randrange(2**31))
        for _ in range(rng.randint(1, _SHORT if rng.random() < 0.8 else loaded.environment.max_turns)):
            pictures += told.content
            turns.append((f"{text}\n\n{IMAGE}" if not turns else "", rng.choice(words)))
            told = world.step(Action(turns[-1][1]))
            if told.done or told.truncated:
                break
        found.append(Example(turns, pictures, at=range(len(turns))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--recipe", default="minigrid", help="whose world and words are taken")
    parser.add_argument("--cpu-minutes", type=float, default=3.0)
    parser.add_argument("--lr", type=float, default=4e-3)
    arguments = parser.parse_args()
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.manual_seed(0)
    torch.set_num_threads(1)
    log = start_log(arguments.out, "scenes_moves")
    model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(BASE)
    held = walks(arguments.recipe, 32, 1)

    def check() -> dict[str, float]:
        """The chance of the last move of a walk, which is drawn: one of the number of words at best."""
        return {"moves": chances(model, processor, held)}

    log(**check())
    train(model, processor, walks(arguments.recipe, 1500, 0), arguments.cpu_minutes, arguments.lr, log, check, every=20)
    save(model, processor, arguments.out)
    log(**check())


if __name__ == "__main__":
    main()

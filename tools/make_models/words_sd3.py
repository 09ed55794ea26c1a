"""Make the small Stable Diffusion 3 that writes words, which mmrl ships: as ``shapes_sd3``, on the ``words`` data set.

    python -m tools.make_models.words_sd3 --out pipelines/diffusion/models/words-sd3

All words are drawn, so that RL's held-out ones are unseen by RL only, not by the base model. The text encoders see a
word as its letters. Training simply stops early: what the model misspells, it misspells for lack of training.
"""

from __future__ import annotations

import random

import torch

import mmrl
from tools.make_models.shapes_sd3 import make, pixels


def draw(n: int, seed: int) -> tuple[list[str], torch.Tensor]:
    """``n`` captions and their pictures as float32 ``[n, 3, 24, 48]`` in [-1, 1]."""
    words = mmrl.load("datasets", "words")
    chosen = random.Random(seed).choices(words.prompts("all"), k=n)
    return [p.text for p in chosen], pixels([words.picture(p, seed + i) for i, p in enumerate(chosen)])


def main() -> None:
    make("tools.make_models.words_sd3", __doc__, draw, vocabulary=["a sign that says"], side=12)


if __name__ == "__main__":
    main()

"""Make the judge of ``scenes-zoom-judge``: it reads an episode with its pictures, and gives a verdict.

    python -m tools.make_models.zoom_judge --out pipelines/vlm/models/zoom-judge

It goes on from ``scenes-zoom``, which knows such pictures. It is shown what was written and what the environment
answered, then the question. It writes the shape that it sees (or ``unseen``), the answer of the episode, and on the
next line its verdict, 1 or 0. An answer of somebody who has not looked at the shape is not right, whatever it says.
``log.jsonl`` beside the weights is the log, and ends with the agreement on episodes of held-out compositions.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from pathlib import Path

import torch

import mmrl
from mmrl.core.episode import Action, Episode, Exchange
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging.rubric import Rubric
from tools.make_models.judges import agreement
from tools.make_models.vlm_training import Example, save, start_log, train

BASE = "pipelines/vlm/models/scenes-zoom"
RUBRIC = Rubric("{{ response }}. {{ prompt_text }}", "pointwise")
"""The recipe's."""
LOOKS = ((0, 2), (1, 8), (2, 3))
"""How often an episode of so many looks is drawn."""


def episode(prompt: Prompt, rng: random.Random) -> Example:
    """A question about a random episode of this prompt, and what the judge writes."""
    from mmrl.episodes.environment import observations

    world, shapes = mmrl.load("environments", "zoom").Environment(), mmrl.load("datasets", "shapes")
    world.reset(prompt, 0)
    (looks,) = rng.choices([n for n, _ in LOOKS], [weight for _, weight in LOOKS])
    corners = [f"{row} {column}" for row in ("top", "bottom") for column in ("left", "right")]
    asked = [prompt.meta["corner"] if rng.random() < 0.6 else rng.choice(corners) for _ in range(looks)]
    turns = [Exchange(action := Action(f"zoom {corner}"), observations(world.step(action))) for corner in asked]
    sees = prompt.meta["corner"] in asked
    truth = prompt.meta["answer"] if sees else "unseen"
    answer = prompt.meta["answer"] if rng.random() < 0.5 else _other(prompt, shapes.KINDS, corners, rng)
    whole = Episode((*turns, Exchange(Action(answer))))
    (question,) = [RUBRIC.render([Sample(prompt, SampleId(0, 0, 0, 0), text=answer, episode=whole)])]
    pictures = [part for part in question if not isinstance(part, str)]
    text = "".join(part if isinstance(part, str) else "<image>" for part in question)
    return Example([(text, f"{truth} {answer}\n{int(answer == truth)}")], pictures)


def _other(prompt: Prompt, kinds: Sequence[str], corners: Sequence[str], rng: random.Random) -> str:
    """Mostly another shape; at times a further look, or two words."""
    draw, others = rng.random(), [kind for kind in kinds if kind != prompt.meta["answer"]]
    if draw < 0.8:
        return rng.choice(others)
    return f"zoom {rng.choice(corners)}" if draw < 0.95 else f"{rng.choice(others)} {prompt.meta['answer']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the judge to")
    parser.add_argument("--questions", type=int, default=8000)
    parser.add_argument("--cpu-minutes", type=float, default=4.0)
    parser.add_argument("--lr", type=float, default=6e-4)
    arguments = parser.parse_args()
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.manual_seed(0)
    torch.set_num_threads(1)
    log, rng = start_log(arguments.out, "zoom_judge"), random.Random(7)
    model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(BASE)
    coarse = mmrl.load("datasets", "coarse")
    examples = [episode(p, rng) for p in coarse.prompts("train", size=arguments.questions, seed=5)]
    held = [episode(p, rng) for p in coarse.prompts("heldout", size=400, seed=5)]

    def check() -> dict[str, float]:
        return agreement(model, processor, held)

    train(model, processor, examples, arguments.cpu_minutes, arguments.lr, log, check, verdict=-2)
    save(model, processor, arguments.out)
    log(**check())


if __name__ == "__main__":
    main()

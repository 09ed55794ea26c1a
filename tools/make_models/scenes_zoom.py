"""Make the small vision-language model of ``scenes-zoom``: ``scenes-vl`` that may look at a corner, and seldom does.

    python -m tools.make_models.scenes_zoom --out pipelines/vlm/models/scenes-zoom

It goes on from ``scenes-vl`` with questions about pictures that are too coarse (the data set ``coarse``): the answer at
once in most examples, which nobody could know, and in some the words that ask for the right corner, its picture, and
then the answer. So it can look and read what it sees, and nothing has told it to prefer that. Only ``train``
compositions are drawn. ``log.jsonl`` beside the weights is the log of the run that made them.
"""

# The model libraries annotate these calls more narrowly than they are documented.
# pyright: reportArgumentType=false

from __future__ import annotations

import argparse
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image

import mmrl
from mmrl.core.trajectory import Prompt
from tools.make_models.vlm_training import Example, batch, save, start_log, train

BASE = "pipelines/vlm/models/scenes-vl"


def at_once(prompt: Prompt) -> Example:
    """The question, and its answer."""
    shown = Image.open(io.BytesIO(prompt.media[0].data or b"")).convert("RGB")
    return Example([(prompt.text.replace("<image>", ""), prompt.meta["answer"])], [shown])


def looking(prompt: Prompt) -> Example:
    """The question, the words that ask for the right corner, its picture, and the answer."""
    from mmrl.core.episode import Action, Observation

    asked = f"zoom {prompt.meta['corner']}"
    world = mmrl.load("environments", "zoom").Environment()
    world.reset(prompt, 0)
    told: Observation = world.step(Action(asked))
    first = at_once(prompt)
    return Example([(first.turns[0][0], asked), ("", prompt.meta["answer"])], [*first.images, told.content], at=(0, 1))


@torch.no_grad()
def chances(model: Any, processor: Any, examples: Sequence[Example], rows: int = 100) -> float:
    """The mean probability of each example's last answer, behind the turns before it."""
    found = []
    for i in range(0, len(examples), rows):
        inputs, labels = batch(processor, examples[i : i + rows])
        log_probs = model(**inputs).logits[:, :-1].float().log_softmax(-1)
        labels = labels[:, 1:]
        wanted = labels >= 0
        later = (~wanted).flip(1).cumsum(1).flip(1)  # equal within a run; lower in a later one
        last = wanted & (later == later.where(wanted, later.max() + 1).min(1, keepdim=True).values)
        chosen = log_probs.gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        found += (chosen * last).sum(1).exp().tolist()
    return sum(found) / len(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--questions", type=int, default=4000)
    parser.add_argument("--looks", type=float, default=0.15, help="share of examples that look before they answer")
    parser.add_argument("--cpu-minutes", type=float, default=2.0)
    parser.add_argument("--lr", type=float, default=5e-4)
    arguments = parser.parse_args()
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.manual_seed(0)
    torch.set_num_threads(1)
    log = start_log(arguments.out, "scenes_zoom")
    model = AutoModelForImageTextToText.from_pretrained(BASE, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(BASE)
    coarse = mmrl.load("datasets", "coarse")
    drawn, held = coarse.prompts("train", size=arguments.questions, seed=1), coarse.prompts("heldout", size=200, seed=1)
    looks = [int(i * arguments.looks) < int((i + 1) * arguments.looks) for i in range(len(drawn))]
    examples = [(looking if look else at_once)(p) for p, look in zip(drawn, looks, strict=True)]
    guesses, seen = [at_once(p) for p in held], [looking(p) for p in held]
    asks = [Example(e.turns[:1], e.images[:1]) for e in seen]

    def check() -> dict[str, float]:
        """The chances of the answer at once, of asking for the right corner, and of the answer behind its picture."""
        named = {"at_once": guesses, "looks": asks, "behind": seen}
        return {name: chances(model, processor, of) for name, of in named.items()}

    log(**check())
    train(model, processor, examples, arguments.cpu_minutes, arguments.lr, log, check, every=50)
    save(model, processor, arguments.out)
    log(**check())


if __name__ == "__main__":
    main()

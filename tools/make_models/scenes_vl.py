"""Make the small vision-language model that mmrl ships: a real Qwen2.5-VL, trained from scratch.

    python -m tools.make_models.scenes_vl --out pipelines/vlm/models/scenes-vl

It learns from conversations about pictures of the ``scenes`` data set and clips of the ``clips`` data set: a question,
its answer, and a description of what is there, which teaches it to see. At the end it learns from careless people:
half of their answers slip, and always in the same way (the other object's colour, the other side, one too many), so
that what it says is worse than what it sees. Only ``train`` compositions are drawn, so what RL holds out is unseen by
the base model as well. ``log.jsonl`` beside the weights is the log of the run that made them.
"""

# The model libraries annotate these calls more narrowly than they are documented.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import argparse
import copy
import io
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

import mmrl
from tools.make_models.vlm_training import (
    BATCH,
    MERGE,
    PATCH,
    WIDTH,
    Example,
    Log,
    apply,
    batch,
    build,
    make_optimizer,
    save,
    set_lr,
    start_log,
    train,
)

DESCRIBE = "Describe it."
QUESTIONS = ("colour", "shape", "count", "side", "more")
"""What the recipes ask. Three objects in a row (``thing``, ``relation``) are beyond what a few minutes can teach."""
_OTHER_WAY = {"left": "right", "top": "bottom", "up": "down", "first": "second"}
OTHER_WAY = _OTHER_WAY | {value: key for key, value in _OTHER_WAY.items()}


def describe(objects: Sequence[Sequence[Any]]) -> str:
    """Words for the objects of a picture (``[colour, kind, x, y]``), in the order of reading a grid of 3 x 3."""
    rows, columns = ("top", "middle", "bottom"), ("left", "centre", "right")
    cells = sorted((min(int(y * 3), 2), min(int(x * 3), 2), f"{colour} {kind}") for colour, kind, x, y in objects)
    return ", ".join(f"{name} {rows[r]} {columns[c]}" for r, c, name in cells)


def from_scenes(prompts: Sequence[Any], described: bool = False, untold: float = 0.0) -> Iterator[Example]:
    """Conversations about the prompts of the ``scenes`` data set: question and answer, then, where ``described``, a
    description; a share ``untold`` of them has the description alone."""
    for i, p in enumerate(prompts):
        images = [Image.open(io.BytesIO(m.data)).convert("RGB") for m in p.media]
        told = "; ".join(describe(o) for o in p.meta["objects"])
        turns = [(p.text.replace("<image>", ""), p.meta["answer"])]
        turns = [] if int(i * untold) < int((i + 1) * untold) else turns
        yield Example([*turns, (DESCRIBE, told)] if described else turns, images)


def from_clips(n: int, rng: random.Random, split: str = "train", described: bool = False) -> Iterator[Example]:
    """Conversations about ``n`` clips of the ``clips`` data set, as they were before encoding."""
    clips = mmrl.load("datasets", "clips")
    pairs = clips.pairs(split)
    for _ in range(n):
        (colour, kind), direction = rng.choice(pairs), rng.choice(list(clips.DIRECTIONS))
        frames = clips.clip(colour, kind, direction, rng)
        turns = [(clips.ASK["direction"].format(colour=colour, kind=kind), direction)]
        yield Example([*turns, (DESCRIBE, f"{colour} {kind}")] if described else turns, frames=frames)


def slip(answer: str, prompt: Any) -> str:
    """What a careless person says: the other object's colour or shape, one too many (of three: too few), the other
    side, picture or way. ``prompt`` is None for a clip."""
    if answer in OTHER_WAY:
        return OTHER_WAY[answer]
    numbers = mmrl.load("datasets", "scenes").NUMBERS
    if answer in numbers:
        return numbers[min(numbers.index(answer) + 1, 3)] if answer != "three" else "two"
    place = 0 if prompt.meta["kind"] == "colour" else 1
    (objects,) = prompt.meta["objects"]
    others = [o[place] for o in objects if o[place] != answer]
    shapes = mmrl.load("datasets", "shapes")
    words = list(shapes.COLOURS if place == 0 else shapes.KINDS)
    return others[0] if others else words[(words.index(answer) + 1) % len(words)]


def careless(prompts: Sequence[Any], clips: int, share: float, rng: random.Random) -> list[Example]:
    """Questions with answers of which a ``share`` slips."""
    made = []
    asked = [*zip(from_scenes(prompts), prompts, strict=True), *((e, None) for e in from_clips(clips, rng))]
    for e, prompt in asked:
        ((question, answer),) = e.turns
        answer = slip(answer, prompt) if rng.random() < share else answer
        made.append(Example([(question, answer)], e.images, e.frames))
    return made


@torch.no_grad()
def accuracy(model: Any, processor: Any, examples: Sequence[Example], rows: int = 100) -> tuple[np.ndarray, np.ndarray]:
    """For each example's first answer, its probability (the accuracy of answers sampled at temperature 1, expected)
    and whether the greedy answer is right."""
    chances, greedy = [], []
    for i in range(0, len(examples), rows):
        inputs, labels = batch(processor, [Example(e.turns[:1], e.images, e.frames) for e in examples[i : i + rows]])
        log_probs = model(**inputs).logits[:, :-1].float().log_softmax(-1)
        wanted, mask = labels[:, 1:].clamp(min=0), labels[:, 1:] >= 0
        chosen = log_probs.gather(-1, wanted[..., None])[..., 0]
        chances += (chosen * mask).sum(1).exp().tolist()
        greedy += ((log_probs.argmax(-1) == wanted) | ~mask).all(1).tolist()
    return np.array(chances), np.array(greedy, float)


def train_vision(model: Any, processor: Any, minutes: float, log: Log, every: int = 200) -> None:
    """Teach the vision tower alone what each picture token shows, for ``minutes`` of CPU time.

    The truth is the share of the token's pixels that each colour covers, and each kind of object, with the background
    as one more; two linear layers that are thrown away predict them (soft cross-entropy, less the truth's
    own entropy).
    """
    visual, heads = model.model.visual, torch.nn.ModuleList([torch.nn.Linear(WIDTH, 6), torch.nn.Linear(WIDTH, 5)])
    optimizer = make_optimizer([visual, heads], 2e-3)
    rng, started, step = random.Random(5), time.process_time(), 0
    running: list[float] = []
    while (spent := (time.process_time() - started) / 60) < minutes:
        set_lr(optimizer, 2e-3, step, spent / minutes)
        drawn = [_segmented(rng) for _ in range(BATCH)]
        inputs = processor.image_processor(images=[image for image, _ in drawn], return_tensors="pt")
        features = visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output
        shares = torch.from_numpy(np.concatenate([shares for _, shares in drawn])).split([6, 5], -1)
        pairs = list(zip(heads, shares, strict=True))
        excess = [
            F.cross_entropy(head(features), truth) + (truth * truth.clamp(min=1e-9).log()).sum(-1).mean()
            for head, truth in pairs
        ]
        loss = torch.stack(excess).sum()
        apply(optimizer, loss)
        running.append(loss.item())
        step += 1
        if step % every == 0:
            log(stage="vision", step=step, cpu_minutes=(time.process_time() - started) / 60, loss=np.mean(running))
            running.clear()


def _segmented(rng: random.Random) -> tuple[Image.Image, np.ndarray]:
    """A picture of one to four objects anywhere, and what each of its tokens shows: ``[tokens, 6 + 5]`` float32."""
    shapes, scenes = mmrl.load("datasets", "shapes"), mmrl.load("datasets", "scenes")
    width, height = rng.choice(scenes.SIZES)
    colours, kinds = list(shapes.COLOURS), list(shapes.KINDS)
    scene, covered = [], np.zeros((11, height, width), np.float32)
    for _ in range(rng.randint(1, 4)):
        r, colour, kind = rng.uniform(4.2, 7.0), rng.choice(colours), rng.choice(kinds)
        x, y = rng.uniform(r, width - r), rng.uniform(r, height - r)
        if any(max(abs(s.x - x), abs(s.y - y)) < s.radius + r + 1 for s in scene):
            continue
        scene.append(shapes.Shape(colour, kind, x, y, r))
        alone = np.asarray(scenes.render(scene[-1:], (width, height)), np.float32)
        difference = np.abs(alone - shapes.BACKGROUND).sum(-1)
        covered[[colours.index(colour), 6 + kinds.index(kind)]] += difference / difference.max()
    covered[5], covered[10] = 1 - covered[:5].sum(0), 1 - covered[6:10].sum(0)
    side = PATCH * MERGE
    cells = covered.reshape(11, height // side, side, width // side, side).mean((2, 4))
    return scenes.render(scene, (width, height)), cells.reshape(11, -1).T.clip(0, 1)


def texts_of(examples: Sequence[Example]) -> list[str]:
    """Every text of the conversations, and what the judge that goes on from this model reads and writes: the
    tokenizer's words are learned from these."""
    captions = [p.text for p in mmrl.load("datasets", "shapes").prompts("all", None, None)]
    judged = ["Answer: red. Is that right?", "Does the picture show a red circle?", "yes", "no", "nothing"] * 100
    return [*(text for e in examples for turn in e.turns for text in turn), *captions, *judged]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--questions", type=int, default=20_000, help="about pictures; a tenth as many about clips")
    parser.add_argument("--vision-minutes", type=float, default=1.6, help="CPU minutes for the vision tower alone")
    parser.add_argument("--cpu-minutes", type=float, default=12.0, help="CPU minutes with answers that are right")
    parser.add_argument("--careless-minutes", type=float, default=1.0, help="CPU minutes with answers that slip")
    parser.add_argument("--slips", type=float, default=0.55, help="share of answers there that slip")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--careful", type=Path, help="write the model here as it is before the careless answers")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so that a minute of CPU time is the same amount of training everywhere
    log = start_log(arguments.out, "scenes_vl")
    scenes = mmrl.load("datasets", "scenes")
    drawn = scenes.prompts("train", questions=QUESTIONS, size=arguments.questions, seed=1)
    clips = list(from_clips(arguments.questions // 10, random.Random(1), described=True))
    examples = [*from_scenes(drawn, described=True, untold=0.5), *clips]
    asked = scenes.prompts("heldout", questions=QUESTIONS, size=500)
    kinds = np.array([p.meta["kind"] for p in asked])
    held, held_clips = list(from_scenes(asked)), list(from_clips(200, random.Random(2), "heldout"))
    model, processor = build(texts_of(examples))

    def check() -> dict[str, float]:
        """Expected accuracy of sampled answers about pictures, over all and by kind of question, and about clips."""
        (chances, greedy), (chances_of_clips, greedy_of_clips) = (
            accuracy(model, processor, of) for of in (held, held_clips)
        )
        row = {"sampled": chances.mean(), "greedy": greedy.mean()}
        row |= {"clips": chances_of_clips.mean(), "clips_greedy": greedy_of_clips.mean()}
        return {k: float(v) for k, v in {**row, **{kind: chances[kinds == kind].mean() for kind in QUESTIONS}}.items()}

    train_vision(model, processor, arguments.vision_minutes, log)
    train(model, processor, examples, arguments.cpu_minutes, arguments.lr, log, check)
    if arguments.careful:
        save(copy.deepcopy(model), processor, arguments.careful)
    some = drawn[: arguments.questions // 4]
    slipped = careless(some, len(some) // 10, arguments.slips, random.Random(3))
    train(model, processor, slipped, arguments.careless_minutes, arguments.lr / 4, log, check)
    save(model, processor, arguments.out)
    log(**check())


if __name__ == "__main__":
    main()

"""Make the small judge that ships with mmrl: a Qwen2.5-VL that says yes or no about a picture, trained from the VLM.

    python -m mmrl.pipelines.vlm.pretrain_judge --out pipelines/vlm/models/scenes-judge

It reads a picture and an answer to a question about it, or a picture and a caption, and writes ``yes`` or ``no``. The
pictures are drawn (``scenes``, ``shapes``), drawn and put through the VAE of the small Stable Diffusion 3, or sampled
from that model at various settings; whether a caption is true of a sampled picture is said by the pixel verifier
``rewards/shapes.py``, at training time only. ``log.jsonl`` beside the weights is the log, and ends with the judge's
agreement with the truth on answers and pictures that models made for held-out prompts.
"""

# The model libraries annotate these constructors more narrowly than they are documented.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

import mmrl
from mmrl.pipelines.vlm.pretrain import (  # pyright: ignore[reportMissingImports]  # found when it is imported
    DESCRIBE,
    Example,
    batch,
    describe,
    from_scenes,
    save,
    start_log,
    train,
)

ABOUT_ANSWER = "{question} Answer: {answer}. Is that right?"
ABOUT_CAPTION = "Does the picture show {caption}?"
"""The words of the rubrics in the recipes that use this judge."""
VERDICTS = ("no", "yes")
_MODELS = Path(__file__).resolve().parent / "models"
_SD3 = _MODELS.parents[1] / "diffusion" / "models" / "shapes-sd3"


def about_answers(prompts: Sequence[Any], rng: random.Random) -> list[Example]:
    """Two candidate answers to each question, right or wrong with equal chances, and a description."""
    answers: dict[str, list[str]] = {}
    for p in prompts:
        answers.setdefault(p.meta["kind"], []).append(p.meta["answer"])
    words = sorted({word for found in answers.values() for answer in found for word in answer.split()})
    made = []
    for p, e in zip(prompts, from_scenes(prompts), strict=True):
        turns = []
        for _ in range(2):
            right = rng.random() < 0.5
            answer = p.meta["answer"] if right else _wrong(p.meta["answer"], answers[p.meta["kind"]], words, rng)
            asked = ABOUT_ANSWER.format(question=e.turns[0][0], answer=answer)
            turns.append((asked, VERDICTS[answer == p.meta["answer"]]))
        made.append(Example([*turns, e.turns[1]], e.images))
    return made


def _wrong(right: str, others: Sequence[str], words: Sequence[str], rng: random.Random) -> str:
    """Mostly another answer to such a question; at times one or two words that answer none, or half of an answer."""
    while True:
        draw = rng.random()
        if draw < 0.8:
            answer = rng.choice(others)
        elif draw < 0.9:
            answer = " ".join(rng.choice(words) for _ in range(rng.choice((1, 2))))
        else:
            answer = rng.choice([right.split()[-1], f"{right} {rng.choice(words)}", f"{rng.choice(words)} {right}", ""])
        if answer != right:
            return answer


class Captions:
    """Final. The captions of the ``shapes`` data set, and those that differ from one in a single thing."""

    def __init__(self, prompts: Sequence[Any]) -> None:
        self.by_task = {t: [p for p in prompts if p.meta["task"] == t] for t in ("count", "side", "relation")}

    def any(self, rng: random.Random) -> Any:
        return rng.choice(self.by_task[rng.choices(("count", "side", "relation"), (3, 3, 1))[0]])

    def near(self, prompt: Any, rng: random.Random) -> Any:
        """Another caption of the same sort, likelier the more it shares."""
        others = rng.sample(self.by_task[prompt.meta["task"]], 12)
        mine = set(prompt.text.split())
        return max((o for o in others if o.text != prompt.text), key=lambda o: len(mine & set(o.text.split())))


class Sd3:
    """Final. The small Stable Diffusion 3: pictures sampled from it, and drawn ones as its VAE returns them."""

    def __init__(self, path: Path) -> None:
        from diffusers import StableDiffusion3Pipeline

        self.pipe: Any = StableDiffusion3Pipeline.from_pretrained(path, dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)

    @torch.no_grad()
    def sample(self, prompts: Sequence[Any], steps: int, guidance: float, seed: int) -> list[Image.Image]:
        return self.pipe(
            [p.text for p in prompts],
            height=32,
            width=32,
            num_inference_steps=steps,
            guidance_scale=guidance,
            max_sequence_length=12,
            generator=torch.Generator().manual_seed(seed),
        ).images

    @torch.no_grad()
    def round_trip(self, images: Sequence[Image.Image], noise: float, seed: int) -> list[Image.Image]:
        """Encoded, disturbed by ``noise`` standard deviations of the latents, and decoded."""
        pixels = torch.from_numpy(np.stack([np.asarray(i) for i in images])).permute(0, 3, 1, 2).float() / 127.5 - 1
        latents = self.pipe.vae.encode(pixels).latent_dist.mean
        disturbance = torch.randn(latents.shape, generator=torch.Generator().manual_seed(seed))
        latents = latents + noise / self.pipe.vae.config.scaling_factor * disturbance
        return self.pipe.image_processor.postprocess(self.pipe.vae.decode(latents).sample)


def pictures(captions: Captions, sd3: Sd3, n: int, rng: random.Random) -> list[tuple[Any, Image.Image]]:
    """``n`` pictures with the caption each was made for: half of them sampled, the others drawn, some with noise."""
    shapes = mmrl.load("datasets", "shapes")
    found: list[tuple[Any, Image.Image]] = []
    while len(found) < n:
        wanted = [captions.any(rng) for _ in range(64)]
        seed = rng.randrange(1 << 30)
        if rng.random() < 0.6:
            images = sd3.sample(wanted, rng.choice((6, 8, 8, 10, 14)), rng.choice((1.0, 1.0, 1.5, 2.5)), seed)
        else:
            images = [shapes.draw(shapes.scene(p, rng)) for p in wanted]
            if rng.random() < 0.8:
                images = sd3.round_trip(images, rng.choice((0.0, 0.1, 0.25, 0.4)), seed)
        found += zip(wanted, images, strict=True)
    return found[:n]


def about_captions(made: Sequence[tuple[Any, Image.Image]], captions: Captions, rng: random.Random) -> list[Example]:
    """Two or three captions for each picture, its own first or second; whether each is true is in the pixels."""
    verifier, examples = mmrl.load("rewards", "shapes"), []
    for prompt, image in made:
        asked = [prompt, captions.near(prompt, rng), captions.near(prompt, rng)][: rng.choice((2, 2, 3))]
        rng.shuffle(asked)
        turns = [
            (ABOUT_CAPTION.format(caption=p.text), VERDICTS[verifier.judge(image, p.meta)["success"] > 0])
            for p in asked
        ]
        found, _, _ = verifier.objects_in(image, prompt.meta["palette"], prompt.meta["background"])
        seen = [_named(f, prompt.meta["palette"]) for f in found]
        examples.append(Example([*turns, (DESCRIBE, describe(seen) or "nothing")], [image]))
    return examples


def _named(found: Any, palette: Any) -> tuple[str, str, float, float]:
    colour = min(palette, key=lambda name: float(np.linalg.norm(found.rgb - np.array(palette[name]))))
    return colour, max(found.overlaps, key=found.overlaps.__getitem__), found.x / 32, found.y / 32


@torch.no_grad()
def yes(model: Any, processor: Any, questions: Sequence[Example], rows: int = 100) -> np.ndarray:
    """The share of ``yes`` in the probability of ``yes`` and ``no`` as the first word of the answer."""
    no, agreed = (processor.tokenizer(word).input_ids[0] for word in VERDICTS)
    shares = []
    for i in range(0, len(questions), rows):
        inputs, labels = batch(processor, [Example(e.turns[:1], e.images) for e in questions[i : i + rows]])
        first = (labels >= 0).int().argmax(1) - 1
        logits = model(**inputs).logits[torch.arange(len(first)), first].float()
        shares += logits[:, [no, agreed]].softmax(-1)[:, 1].tolist()
    return np.array(shares)


def agreement(model: Any, processor: Any, questions: Sequence[Example]) -> dict[str, float]:
    """Share of verdicts (yes where likelier than no) that are true, and the chance that a random true one is rated
    above a random false one (area under the ROC curve)."""
    truth = np.array([e.turns[0][1] == "yes" for e in questions])
    rated = yes(model, processor, questions)
    higher = (rated[truth][:, None] > rated[~truth]).mean() + 0.5 * (rated[truth][:, None] == rated[~truth]).mean()
    return {"agreement": float(((rated > 0.5) == truth).mean()), "auc": float(higher), "true": float(truth.mean())}


@torch.no_grad()
def answered(model: Any, processor: Any, prompts: Sequence[Any], rows: int = 100) -> list[Example]:
    """Questions about answers that ``model`` samples for ``prompts``."""
    examples = []
    for i in range(0, len(prompts), rows):
        some = prompts[i : i + rows]
        asked = list(from_scenes(some, described=False))
        messages = [
            [
                {
                    "role": "user",
                    "content": [*({"type": "image"} for _ in e.images), {"type": "text", "text": e.turns[0][0]}],
                }
            ]
            for e in asked
        ]
        texts = [processor.apply_chat_template(m, tokenize=False, add_generation_prompt=True) for m in messages]
        images = [image for e in asked for image in e.images]
        inputs = processor(text=texts, images=images, padding=True, padding_side="left", return_tensors="pt")
        out = model.generate(**inputs, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=6)
        written = processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
        for p, e, answer in zip(some, asked, written, strict=True):
            about = ABOUT_ANSWER.format(question=e.turns[0][0], answer=answer)
            examples.append(Example([(about, VERDICTS[answer == p.meta["answer"]])], e.images))
    return examples


def main() -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the judge to")
    parser.add_argument("--base", type=Path, default=_MODELS / "scenes-vl", help="the VLM to go on from")
    parser.add_argument("--answers", type=int, default=14_000, help="questions with answers to judge")
    parser.add_argument("--pictures", type=int, default=14_000, help="pictures with captions to judge")
    parser.add_argument("--cpu-minutes", type=float, default=20.0)
    parser.add_argument("--lr", type=float, default=1.5e-3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    log = start_log(arguments.out, "pretrain_judge")
    scenes, shapes, rng = mmrl.load("datasets", "scenes"), mmrl.load("datasets", "shapes"), random.Random(11)
    answerer = AutoModelForImageTextToText.from_pretrained(arguments.base, dtype=torch.float32).eval()
    processor = AutoProcessor.from_pretrained(arguments.base)
    sd3 = Sd3(_SD3)
    captions, held_out = (Captions(shapes.prompts(split, 400, 200)) for split in ("train", "heldout"))
    started = time.process_time()
    examples = [
        *about_answers(scenes.prompts("train", size=arguments.answers, seed=11), rng),
        *about_captions(pictures(captions, sd3, arguments.pictures, rng), captions, rng),
    ]
    wanted = [p for p in (held_out.any(rng) for _ in range(700)) if p.meta["task"] != "relation"][:500]
    sampled = [
        Example([(ABOUT_CAPTION.format(caption=p.text), VERDICTS[_verified(p, image)])], [image])
        for p, image in zip(wanted, sd3.sample(wanted, 8, 1.0, 99), strict=True)
    ]
    sets = {"answers": answered(answerer, processor, scenes.prompts("heldout", size=700)), "sampled": sampled}
    log(stage="data", examples=len(examples), cpu_minutes=(time.process_time() - started) / 60)

    def check() -> dict[str, float]:
        found = {name: agreement(model, processor, held) for name, held in sets.items()}
        return {f"{name}/{k}": v for name, values in found.items() for k, v in values.items()}

    model = answerer  # its answers are taken down; from here on it becomes the judge
    train(model, processor, examples, arguments.cpu_minutes, arguments.lr, log, check)
    save(model, processor, arguments.out)


def _verified(prompt: Any, image: Image.Image) -> bool:
    return mmrl.load("rewards", "shapes").judge(image, prompt.meta)["success"] > 0


if __name__ == "__main__":
    main()

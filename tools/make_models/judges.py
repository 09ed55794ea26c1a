"""Make the small judges that mmrl ships: Qwen2.5-VL models that look at a picture and give a verdict.

    python -m tools.make_models.scenes_vl --out pipelines/vlm/models/scenes-vl --careful careful
    python -m tools.make_models.judges --out pipelines/vlm/models/scenes-judge --base careful --pictures 0
    python -m tools.make_models.judges --out pipelines/vlm/models/shapes-judge --base careful --answers 0

They go on from the vision-language model as it was before the careless answers. The judge of answers reads a picture,
a candidate answer and the question; it writes its own answer, the candidate, and on the next line its verdict, 1 or 0.
The question comes last, as the base model knows it, or the judge learns to repeat the candidate in place of looking.
The judge of captions reads a picture and a caption, and says yes or no. It learns from conversations about several
captions of one picture that differ in a single thing (the side, the number, the colour, the kind), and what is there.

Pictures for captions are sampled from the small Stable Diffusion 3, or drawn (``shapes``) and put through its VAE;
whether a caption is true of a picture is said by the pixel verifier ``rewards/shapes.py``, at training time only.
``log.jsonl`` beside the weights is the log, and ends with the judge's agreement with the truth on answers or pictures
that models made for held-out prompts.
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
from mmrl.rewards.judging.statistics import auc
from tools.make_models.scenes_vl import (
    DESCRIBE,
    QUESTIONS,
    describe,
    from_scenes,
    slip,
)
from tools.make_models.vlm_training import (
    Example,
    prompt_inputs,
    save,
    start_log,
    train,
)

ABOUT_ANSWER = "{answer}. {question}"
ABOUT_CAPTION = "Does the picture show {caption}?"
WORDS = ("no", "yes")
"""The words of the rubrics in the recipes that use this judge."""
_PIPELINES = Path(__file__).resolve().parents[2] / "pipelines"
_SCENES_VL = _PIPELINES / "vlm" / "models" / "scenes-vl"
_SD3 = _PIPELINES / "diffusion" / "models" / "shapes-sd3"


def about_answers(prompts: Sequence[Any], rng: random.Random) -> list[Example]:
    """Two candidate answers to each question, right or wrong with equal chances. The judge writes its own, then the
    candidate, then the verdict: side by side the two are far easier to compare for a model of this size."""
    answers: dict[str, list[str]] = {}
    for p in prompts:
        answers.setdefault(p.meta["kind"], []).append(p.meta["answer"])
    words = sorted({word for found in answers.values() for answer in found for word in answer.split()})
    made = []
    for p, e in zip(prompts, from_scenes(prompts), strict=True):
        truth = p.meta["answer"]
        for _ in range(2):
            answer = truth if rng.random() < 0.5 else _wrong(p, answers[p.meta["kind"]], words, rng)
            asked = ABOUT_ANSWER.format(question=e.turns[0][0], answer=answer)
            made.append(Example([(asked, _said(f"{truth} {answer}", answer == truth))], e.images))
    return made


def _said(seen: str, verdict: bool) -> str:
    """What the judge writes: what it sees, and its verdict on a line of its own."""
    return f"{seen}\n{int(verdict)}"


def _wrong(prompt: Any, others: Sequence[str], words: Sequence[str], rng: random.Random) -> str:
    """Mostly a slip or another answer to such a question; at times words that answer none, or half of an answer."""
    truth = prompt.meta["answer"]
    while True:
        draw = rng.random()
        if draw < 0.4:
            answer = slip(truth, prompt)
        elif draw < 0.85:
            answer = rng.choice(others)
        elif draw < 0.95:
            answer = " ".join(rng.choice(words) for _ in range(rng.choice((1, 2))))
        else:
            answer = rng.choice([f"{truth} {rng.choice(words)}", f"{rng.choice(words)} {truth}", ""])
        if answer != truth:
            return answer


class Captions:
    """Final. Captions of one sort of object of the ``shapes`` data set, and those that differ in a single thing."""

    def __init__(self, prompts: Sequence[Any]) -> None:
        self.by_task = {t: [p for p in prompts if p.meta["task"] == t] for t in ("count", "side")}

    def any(self, rng: random.Random) -> Any:
        return rng.choice(self.by_task[rng.choice(("count", "side"))])

    def near(self, prompt: Any, rng: random.Random) -> list[Any]:
        """The captions of the same object in other numbers or at other sides, two at the most, and one of another
        object."""
        others = [o for o in self.by_task[prompt.meta["task"]] if o.text != prompt.text]
        rng.shuffle(others)
        same = [o for o in others if _thing(o) == _thing(prompt)]
        alike = [o for o in others if _rest(o) == _rest(prompt) and set(_thing(o)) & set(_thing(prompt))]
        return [*same[:2], *alike[:1]]


def _thing(prompt: Any) -> tuple[str, str]:
    (wanted,) = prompt.meta["objects"]
    return wanted["colour"], wanted["kind"]


def _rest(prompt: Any) -> tuple[int, str | None]:
    return prompt.meta["objects"][0]["count"], prompt.meta.get("side")


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
    """``n`` pictures with the caption each was made for: four fifths of them sampled, the others drawn, with noise."""
    shapes = mmrl.load("datasets", "shapes")
    found: list[tuple[Any, Image.Image]] = []
    while len(found) < n:
        wanted = [captions.any(rng) for _ in range(64)]
        seed = rng.randrange(1 << 30)
        if rng.random() < 0.8:
            images = sd3.sample(wanted, rng.choice((6, 8, 8, 10)), rng.choice((1.0, 1.0, 1.0, 1.5)), seed)
        else:
            images = sd3.round_trip([shapes.draw(shapes.scene(p, rng)) for p in wanted], rng.choice((0.0, 0.2)), seed)
        found += zip(wanted, images, strict=True)
    return found[:n]


def about_captions(made: Sequence[tuple[Any, Image.Image]], captions: Captions, rng: random.Random) -> list[Example]:
    """A conversation about each picture: its own caption, which mostly comes first, others near to it, and then what
    is there. Whether a caption is true is in the pixels."""
    verifier, examples = mmrl.load("rewards", "shapes"), []
    for prompt, image in made:
        found, _, _ = verifier.objects_in(image, prompt.meta["palette"], prompt.meta["background"])
        asked = [prompt, *captions.near(prompt, rng)]
        if rng.random() < 0.3:
            rng.shuffle(asked)
        turns = [(ABOUT_CAPTION.format(caption=p.text), WORDS[_verified(p, image)]) for p in asked]
        seen = describe([_named(f, prompt.meta["palette"]) for f in found]) or "nothing"
        examples.append(Example([*turns, (DESCRIBE, seen)], [image]))
    return examples


def _named(found: Any, palette: Any) -> tuple[str, str, float, float]:
    colour = min(palette, key=lambda name: float(np.linalg.norm(found.rgb - np.array(palette[name]))))
    return colour, max(found.overlaps, key=found.overlaps.__getitem__), found.x / 32, found.y / 32


@torch.no_grad()
def written(model: Any, processor: Any, asked: Sequence[Example], most: int, sample: bool = False) -> list[str]:
    """What ``model`` answers to each first question, in ``most`` tokens at the most; sampled at temperature 1."""
    texts = []
    for i in range(0, len(asked), 100):
        inputs = prompt_inputs(processor, asked[i : i + 100])
        how: dict[str, Any] = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
        ids = model.generate(**inputs, max_new_tokens=most, **how)
        texts += processor.batch_decode(ids[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return texts


def agreement(model: Any, processor: Any, questions: Sequence[Example]) -> dict[str, float]:
    """Share of verdicts that are true, of true and of false cases, and how many cases are true; for yes and no also the
    chance that a true case is rated above a false one (area under the ROC curve)."""
    graded = questions[0].turns[0][1].startswith(WORDS)
    truth = np.array([e.turns[0][1].startswith("yes") or e.turns[0][1].endswith("\n1") for e in questions])
    if graded:
        rated = _yes(model, processor, questions)
        said = rated > 0.5
    else:
        said = rated = np.array([text.endswith("\n1") for text in written(model, processor, questions, 40)])
    alike = said == truth
    figures = {"agreement": alike.mean(), "of_true": alike[truth].mean(), "of_false": alike[~truth].mean()}
    figures |= {"auc": auc(rated.tolist(), truth.tolist())} if graded else {}
    return {name: float(value) for name, value in {**figures, "true": truth.mean()}.items()}


@torch.no_grad()
def _yes(model: Any, processor: Any, questions: Sequence[Example]) -> np.ndarray:
    """The share of ``yes`` in the probability of ``yes`` and ``no`` as the first word of the answer."""
    ids = [processor.tokenizer(word).input_ids[0] for word in WORDS]
    shares = []
    for i in range(0, len(questions), 100):
        logits = model(**prompt_inputs(processor, questions[i : i + 100]), logits_to_keep=1).logits[:, -1].float()
        shares += logits[:, ids].softmax(-1)[:, 1].tolist()
    return np.array(shares)


def answered(model: Any, processor: Any, prompts: Sequence[Any]) -> list[Example]:
    """Questions about the answers that ``model`` samples for ``prompts``."""
    asked = list(from_scenes(prompts))
    return [
        Example(
            [
                (
                    ABOUT_ANSWER.format(question=e.turns[0][0], answer=text),
                    _said(p.meta["answer"], text == p.meta["answer"]),
                )
            ],
            e.images,
        )
        for p, e, text in zip(prompts, asked, written(model, processor, asked, 6, sample=True), strict=True)
    ]


def main() -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the judge to")
    parser.add_argument("--base", type=Path, required=True, help="the model to go on from")
    parser.add_argument("--answerer", type=Path, default=_SCENES_VL, help="whose answers it is measured on")
    parser.add_argument("--answers", type=int, default=12_000, help="questions with two answers each; 0: none")
    parser.add_argument("--pictures", type=int, default=7_000, help="pictures with four captions each; 0: none")
    parser.add_argument("--cpu-minutes", type=float, default=20.0)
    parser.add_argument("--lr", type=float, default=6e-4)
    arguments = parser.parse_args()
    if bool(arguments.answers) == bool(arguments.pictures):
        parser.error("a judge is of answers (--pictures 0) or of captions (--answers 0)")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    log = start_log(arguments.out, "judges")
    scenes, shapes, rng = mmrl.load("datasets", "scenes"), mmrl.load("datasets", "shapes"), random.Random(11)
    model, answerer = (
        AutoModelForImageTextToText.from_pretrained(path, dtype=torch.float32).eval()
        for path in (arguments.base, arguments.answerer)
    )
    processor = AutoProcessor.from_pretrained(arguments.base)
    started = time.process_time()
    examples, sets, verdict = list[Example](), dict[str, list[Example]](), -2
    if arguments.answers:
        examples += about_answers(scenes.prompts("train", questions=QUESTIONS, size=arguments.answers, seed=11), rng)
        for kind in QUESTIONS:
            sets[kind] = answered(answerer, processor, scenes.prompts("heldout", questions=[kind], size=140))
    if arguments.pictures:
        sd3 = Sd3(_SD3)
        captions, held_out = (Captions(shapes.prompts(split, 0, 0)) for split in ("train", "heldout"))
        examples += about_captions(pictures(captions, sd3, arguments.pictures, rng), captions, rng)
        verdict = 0
        for task in captions.by_task:
            wanted = rng.choices(held_out.by_task[task], k=300)
            sets[task] = [
                Example([(ABOUT_CAPTION.format(caption=p.text), WORDS[_verified(p, image)])], [image])
                for p, image in zip(wanted, sd3.sample(wanted, 8, 1.0, 99), strict=True)
            ]
    log(stage="data", examples=len(examples), cpu_minutes=(time.process_time() - started) / 60)

    def check() -> dict[str, float]:
        found = {name: agreement(model, processor, held) for name, held in sets.items()}
        return {f"{name}/{k}": v for name, values in found.items() for k, v in values.items()}

    train(model, processor, examples, arguments.cpu_minutes, arguments.lr, log, check, verdict=verdict)
    save(model, processor, arguments.out)
    log(**check())


def _verified(prompt: Any, image: Image.Image) -> bool:
    return mmrl.load("rewards", "shapes").judge(image, prompt.meta)["success"] > 0


if __name__ == "__main__":
    main()

"""Make the small vision-language model that ships with mmrl: a Qwen2.5-VL of the real class, trained from scratch.

    python -m mmrl.pipelines.vlm.pretrain --out pipelines/vlm/models/scenes-vl

It learns from conversations about pictures of the ``scenes`` data set and clips of the ``clips`` data set: a question,
its answer, and then a description of what is there, which teaches it to see. Only ``train`` compositions are drawn, so
what RL holds out is unseen by the base model as well. Training simply stops early: what the model gets wrong, it gets
wrong for lack of training. ``log.jsonl`` beside the weights is the log of the run that made them.
"""

# The model libraries annotate these constructors more narrowly than they are documented.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import argparse
import io
import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

import mmrl
from mmrl._torchvision import allow_cpu_only

allow_cpu_only()
from transformers import (  # noqa: E402
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.video_utils import VideoMetadata  # noqa: E402

PATCH, MERGE = 4, 2
WIDTH = 128
DESCRIBE = "Describe it."
FPS = 8
_BATCH = 32
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>")
_PADS = ("<|image_pad|>", "<|video_pad|>")
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part['type'] == 'video' %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

Log = Callable[..., None]


@dataclass(frozen=True)
class Example:
    """A conversation about pictures, or about the frames of one clip: ``turns`` are a user's words and the answer."""

    turns: Sequence[tuple[str, str]]
    images: Sequence[Image.Image] = ()
    frames: Sequence[Image.Image] = ()


def build(texts: Sequence[str]) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    """A random model of 1.1 M parameters and its processor; a word that ``texts`` use is one token.

    A picture is cut into patches of 4 pixels, and 2 x 2 of these make a token: 16 tokens for 32 x 32 pixels.
    """
    tokenizer = _tokenizer(texts)
    pixels = {"shortest_edge": 16 * 16, "longest_edge": 96 * 96}
    sizes: dict[str, Any] = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    sizes |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    clip = {"shortest_edge": 16 * 16, "longest_edge": 16 * 96 * 96}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels, **sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=clip, **sizes),
        chat_template=_TEMPLATE,
    )
    number = tokenizer.convert_tokens_to_ids
    ends = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    text = {
        "hidden_size": WIDTH,
        "intermediate_size": 320,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": len(tokenizer),
        "initializer_range": 0.08,
        "max_position_embeddings": 1024,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]},
        **ends,
    }
    vision = {
        "depth": 3,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_heads": 2,
        "out_hidden_size": WIDTH,
        "patch_size": PATCH,
        "spatial_merge_size": MERGE,
        "temporal_patch_size": 2,
        "window_size": 96,
        "fullatt_block_indexes": [0, 1, 2],
        "tokens_per_second": 4,
        "initializer_range": 0.1,
    }
    config = Qwen2_5_VLConfig(
        text_config=text,
        vision_config=vision,
        tie_word_embeddings=True,
        image_token_id=number("<|image_pad|>"),
        video_token_id=number("<|video_pad|>"),
        vision_start_token_id=number("<|vision_start|>"),
        vision_end_token_id=number("<|vision_end|>"),
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config.update(do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **ends)
    return model, processor


def _tokenizer(texts: Sequence[str]) -> Qwen2Tokenizer:
    """Byte-pair tokenizer whose merges were learned on ``texts``; any other text falls back to bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=1024, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    learnt = json.loads(learner.to_str())["model"]["merges"]
    merges = [tuple(m) if not isinstance(m, str) else tuple(m.split(" ")) for m in learnt]
    pieces = dict.fromkeys([*alphabet, *("".join(m) for m in merges)])
    tokenizer = Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=1024,
        extra_special_tokens={"image_token": _PADS[0], "video_token": _PADS[1]},
    )
    tokenizer.add_tokens([s for s in (*_SPECIAL, *_PADS) if s not in tokenizer.get_vocab()], special_tokens=True)
    tokenizer.chat_template = _TEMPLATE
    return tokenizer


def batch(processor: Qwen2_5_VLProcessor, examples: Sequence[Example]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The model's inputs, and ``labels`` ``[B, L]``: the tokens of the answers and their ends, else -100."""
    texts, images, clips = [], [], []
    for e in examples:
        media: list[dict[str, str]] = [{"type": "image"}] * len(e.images) + [{"type": "video"}] * bool(e.frames)
        messages = []
        for i, (asked, answer) in enumerate(e.turns):
            content = [*(media if i == 0 else ()), {"type": "text", "text": asked}]
            messages += [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]
        texts.append(processor.apply_chat_template(messages, tokenize=False).rstrip("\n"))
        images += e.images
        if e.frames:
            clips.append(np.stack([np.asarray(f) for f in e.frames]))
    given: dict[str, Any] = {"images": images} if images else {}
    if clips:
        metadata = [
            VideoMetadata(len(c), fps=FPS, duration=len(c) / FPS, frames_indices=list(range(len(c)))) for c in clips
        ]
        given |= {"videos": clips, "video_metadata": metadata, "do_sample_frames": False}
    inputs = dict(processor(text=texts, padding=True, padding_side="right", return_tensors="pt", **given))
    return inputs, _labels(processor, inputs["input_ids"])


def _labels(processor: Any, ids: torch.Tensor) -> torch.Tensor:
    """Tokens between ``<|im_start|>assistant`` and ``<|im_end|>``, the latter included."""
    tokenizer = processor.tokenizer
    start = tokenizer("<|im_start|>assistant\n").input_ids
    end = tokenizer.eos_token_id
    labels = torch.full_like(ids, -100)
    for row, found in zip(ids.tolist(), labels, strict=True):
        i = 0
        while i < len(row):
            i += 1
            if row[i - len(start) : i] == start:
                stop = row.index(end, i) + 1
                found[i:stop] = torch.tensor(row[i:stop])
    return labels


def describe(objects: Sequence[Sequence[Any]]) -> str:
    """Words for the objects of a picture (``[colour, kind, x, y]``), in the order of reading a grid of 3 x 3."""
    rows, columns = ("top", "middle", "bottom"), ("left", "centre", "right")
    cells = sorted((min(int(y * 3), 2), min(int(x * 3), 2), f"{colour} {kind}") for colour, kind, x, y in objects)
    return ", ".join(f"{name} {rows[r]} {columns[c]}" for r, c, name in cells)


def from_scenes(prompts: Sequence[Any], described: bool = True, untold: float = 0.0) -> Iterator[Example]:
    """Conversations about the prompts of the ``scenes`` data set: question and answer, then, where ``described``, a
    description; a share ``untold`` of them has the description alone."""
    for i, p in enumerate(prompts):
        images = [Image.open(io.BytesIO(m.data)).convert("RGB") for m in p.media]
        told = "; ".join(describe(o) for o in p.meta["objects"])
        turns = [(p.text.replace("<image>", ""), p.meta["answer"])]
        turns = [] if int(i * untold) < int((i + 1) * untold) else turns
        yield Example([*turns, (DESCRIBE, told)] if described else turns, images)


def from_clips(n: int, rng: random.Random, split: str = "train") -> Iterator[Example]:
    """Conversations about ``n`` clips of the ``clips`` data set, as they were before encoding."""
    clips = mmrl.load("datasets", "clips")
    pairs = clips._pairs(split)
    for _ in range(n):
        (colour, kind), direction = rng.choice(pairs), rng.choice(list(clips.DIRECTIONS))
        frames = clips.clip(colour, kind, direction, rng)
        question = clips._ASK["direction"].format(colour=colour, kind=kind)
        yield Example([(question, direction), (DESCRIBE, f"{colour} {kind}")], frames=frames)


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


def train_vision(model: Any, processor: Any, minutes: float, log: Log) -> None:
    """Teach the vision tower alone what each picture token shows, for ``minutes`` of CPU time.

    The truth is the share of the token's pixels that each colour covers, and each kind of object, with the background
    as one more; two linear layers that are thrown away predict them (soft cross-entropy, less the truth's
    own entropy).
    """
    visual, heads = model.model.visual, torch.nn.ModuleList([torch.nn.Linear(WIDTH, 6), torch.nn.Linear(WIDTH, 5)])
    optimizer = _optimizer([visual, heads], 2e-3)
    rng, started, step = random.Random(5), time.process_time(), 0
    running: list[float] = []
    while (spent := (time.process_time() - started) / 60) < minutes:
        _set_lr(optimizer, 2e-3, step, spent / minutes)
        drawn = [_segmented(rng) for _ in range(_BATCH)]
        inputs = processor.image_processor(images=[image for image, _ in drawn], return_tensors="pt")
        features = visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"]).pooler_output
        shares = torch.from_numpy(np.concatenate([shares for _, shares in drawn])).split([6, 5], -1)
        pairs = list(zip(heads, shares, strict=True))
        excess = [
            F.cross_entropy(head(features), truth) + (truth * truth.clamp(min=1e-9).log()).sum(-1).mean()
            for head, truth in pairs
        ]
        loss = torch.stack(excess).sum()
        _step(optimizer, loss)
        running.append(loss.item())
        step += 1
        if step % 200 == 0:
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


def train(
    model: Any,
    processor: Any,
    examples: Sequence[Example],
    minutes: float,
    lr: float,
    log: Log,
    check: Callable[[], dict[str, float]],
) -> None:
    """Next-token prediction of the answers for ``minutes`` of CPU time; 32 conversations of like length a step."""
    optimizer = _optimizer([model], lr)
    rng, started, step = random.Random(3), time.process_time(), 0
    running: list[float] = []
    waiting: list[list[Example]] = []
    model.train()
    while (spent := (time.process_time() - started) / 60) < minutes:
        _set_lr(optimizer, lr, step, spent / minutes)
        if not waiting:
            drawn = sorted(rng.sample(examples, 8 * _BATCH), key=_length)
            waiting = [drawn[i : i + _BATCH] for i in range(0, len(drawn), _BATCH)]
            rng.shuffle(waiting)
        inputs, labels = batch(processor, waiting.pop())
        hidden = model.model(**inputs).last_hidden_state[:, :-1]
        wanted = labels[:, 1:] >= 0
        loss = F.cross_entropy(model.lm_head(hidden[wanted]), labels[:, 1:][wanted])
        _step(optimizer, loss)
        running.append(loss.item())
        step += 1
        if step % 200 == 0:
            model.eval()
            log(step=step, cpu_minutes=(time.process_time() - started) / 60, loss=np.mean(running), **check())
            model.train()
            running.clear()
    model.eval()


def _optimizer(modules: Sequence[torch.nn.Module], lr: float) -> torch.optim.AdamW:
    parameters = [p for module in modules for p in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def _set_lr(optimizer: torch.optim.Optimizer, peak: float, step: int, done: float) -> None:
    """100 steps of warm-up, then a linear fall to a tenth over the time allowed (``done`` in [0, 1])."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / 100) * (1 - 0.9 * done)


def _step(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()


def _length(e: Example) -> int:
    """Nearly the number of tokens."""
    pixels = sum(i.width * i.height for i in e.images) + sum(f.width * f.height for f in e.frames) // 2
    return pixels // (PATCH * MERGE) ** 2 + sum(len(t) for turn in e.turns for t in turn) // 5


def texts_of(examples: Sequence[Example]) -> list[str]:
    """Every text of the conversations, and what the judge that goes on from this model reads and writes: the
    tokenizer's words are learned from these."""
    captions = [p.text for p in mmrl.load("datasets", "shapes").prompts("all", None, None)]
    judged = ["Answer: red. Is that right?", "Does the picture show a red circle?", "yes", "no", "nothing"] * 100
    return [*(text for e in examples for turn in e.turns for text in turn), *captions, *judged]


def start_log(out: Path, module: str) -> Log:
    """A function that writes a row to ``out/log.jsonl`` and to the terminal; the first row is the command."""
    out.mkdir(parents=True, exist_ok=True)
    lines = (out / "log.jsonl").open("w")

    def log(**row: float | str) -> None:
        rounded = {k: v if isinstance(v, str | int) else round(float(v), 4) for k, v in row.items()}
        print(json.dumps(rounded), file=lines, flush=True)
        print("  ".join(f"{k} {v}" for k, v in rounded.items()), flush=True)

    log(command=shlex.join(["python", "-m", f"mmrl.pipelines.vlm.{module}", *sys.argv[1:]]))
    return log


def save(model: Any, processor: Any, out: Path) -> None:
    """Weights as float16 safetensors, and the processor, for ``AutoModelForImageTextToText`` and ``AutoProcessor``."""
    model.half().save_pretrained(out)
    processor.save_pretrained(out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument(
        "--questions", type=int, default=14_000, help="questions about pictures; a seventh as many clips"
    )
    parser.add_argument("--vision-minutes", type=float, default=1.5, help="CPU minutes for the vision tower alone")
    parser.add_argument("--cpu-minutes", type=float, default=6.0, help="CPU minutes for all of it")
    parser.add_argument("--lr", type=float, default=2e-3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # so that a minute of CPU time is the same amount of training everywhere
    log = start_log(arguments.out, "pretrain")
    scenes = mmrl.load("datasets", "scenes")
    examples = [
        *from_scenes(scenes.prompts("train", size=arguments.questions, seed=1)),
        *from_clips(arguments.questions // 7, random.Random(1)),
    ]
    asked = scenes.prompts("heldout", size=700)
    held_out = {kind: [p for p in asked if p.meta["kind"] == kind] for kind in scenes.QUESTIONS}
    sets = {kind: list(from_scenes(found)) for kind, found in held_out.items()}
    sets["clips"] = list(from_clips(200, random.Random(2), "heldout"))
    model, processor = build(texts_of(examples))

    def check() -> dict[str, float]:
        """Expected accuracy of sampled answers by kind, and over all pictures; ``greedy`` over all pictures."""
        found = {kind: accuracy(model, processor, held) for kind, held in sets.items()}
        pictures = [found[kind] for kind in scenes.QUESTIONS]
        total = {
            "sampled": np.mean([c.mean() for c, _ in pictures]),
            "greedy": np.mean([g.mean() for _, g in pictures]),
        }
        return {k: float(v) for k, v in {**total, **{kind: c.mean() for kind, (c, _) in found.items()}}.items()}

    train_vision(model, processor, arguments.vision_minutes, log)
    train(model, processor, examples, arguments.cpu_minutes, arguments.lr, log, check)
    save(model, processor, arguments.out)
    log(**check())


if __name__ == "__main__":
    main()

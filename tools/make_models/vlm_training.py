"""Shared code for making the small vision-language models: a random model, batches, a training loop, a log."""

# The model libraries annotate these constructors more narrowly than they are documented.
# pyright: reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

import json
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tools.make_models.learned_tokenizer import learned

allow_cpu_only()
from transformers import (  # noqa: E402
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLProcessor,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
)
from transformers.video_utils import VideoMetadata  # noqa: E402

PATCH, MERGE = 4, 2
WIDTH = 128
FPS = 8
IMAGE, _NONE = "<image>", {"type": "text", "text": ""}
BATCH = 32
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
    """A conversation about pictures, or about the frames of one clip: ``turns`` are a user's words and the answer.
    ``at``: the turn that shows each picture; empty: the first shows all. A picture stands where the words have
    ``IMAGE``, and those left over before the words."""

    turns: Sequence[tuple[str, str]]
    images: Sequence[Image.Image] = ()
    frames: Sequence[Image.Image] = ()
    at: Sequence[int] = ()


def build(texts: Sequence[str]) -> tuple[Qwen2_5_VLForConditionalGeneration, Qwen2_5_VLProcessor]:
    """A random model of 1.1 M parameters and its processor; a word that ``texts`` use is one token.

    A picture is cut into patches of 4 pixels, and 2 x 2 of these make a token: 16 tokens for 32 x 32 pixels.
    """
    media = {"image_token": _PADS[0], "video_token": _PADS[1]}
    tokenizer = learned(texts, 1024, (*_SPECIAL, *_PADS), _TEMPLATE, 1024, **media)
    pixels = {"shortest_edge": 16 * 16, "longest_edge": 96 * 96}
    sizes: dict[str, Any] = {"patch_size": PATCH, "merge_size": MERGE, "temporal_patch_size": 2}
    sizes |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    clip = {"shortest_edge": 16 * 16, "longest_edge": 16 * 96 * 96}
    processor = Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(size=pixels, **sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(size=clip, cap_pixels_per_frame=False, **sizes),
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


def batch(processor: Any, examples: Sequence[Example]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The model's inputs, and ``labels`` ``[B, L]``: the tokens of the answers and their ends, else -100."""
    texts = [processor.apply_chat_template(_messages(e, e.turns), tokenize=False).rstrip("\n") for e in examples]
    inputs = _inputs(processor, texts, examples, "right")
    return inputs, _labels(processor, inputs["input_ids"])


def prompt_inputs(processor: Any, examples: Sequence[Example], start: str = "") -> dict[str, torch.Tensor]:
    """The model's inputs for answering each example's first question, the answer beginning with ``start``."""
    asked = [_messages(e, [(e.turns[0][0], None)]) for e in examples]
    texts = [processor.apply_chat_template(m, tokenize=False, add_generation_prompt=True) + start for m in asked]
    return _inputs(processor, texts, examples, "left")


def _messages(e: Example, turns: Sequence[tuple[str, str | None]]) -> list[dict[str, Any]]:
    at = e.at or [0] * len(e.images)
    messages = []
    for i, (asked, answer) in enumerate(turns):
        media = [{"type": "image"}] * sum(turn == i for turn in at) + [{"type": "video"}] * (i == 0 and bool(e.frames))
        first, *rest = asked.split(IMAGE)
        parts = [{"type": "text", "text": first}]
        for text in rest:
            parts += [{"type": "image"}, {"type": "text", "text": text}]
        messages.append({"role": "user", "content": [*media[len(rest) :], *(p for p in parts if p != _NONE)]})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return messages


def _inputs(processor: Any, texts: list[str], examples: Sequence[Example], side: str) -> dict[str, torch.Tensor]:
    images, clips = [], []
    for e in examples:
        images += e.images
        if e.frames:
            clips.append(np.stack([np.asarray(f) for f in e.frames]))
    given: dict[str, Any] = {"images": images} if images else {}
    if clips:
        metadata = [
            VideoMetadata(len(c), fps=FPS, duration=len(c) / FPS, frames_indices=list(range(len(c)))) for c in clips
        ]
        given |= {"videos": clips, "video_metadata": metadata, "do_sample_frames": False}
    return dict(processor(text=texts, padding=True, padding_side=side, return_tensors="pt", **given))


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


def train(
    model: Any,
    processor: Any,
    examples: Sequence[Example],
    minutes: float,
    lr: float,
    log: Log,
    check: Callable[[], dict[str, float]],
    every: int = 200,
    verdict: int | None = None,
) -> None:
    """Next-token prediction of the answers for ``minutes`` of CPU time; 32 conversations of like length a step.

    ``verdict``: which token of the answers counts as much again as all others together (0: the first, -2: the last
    before its end).
    """
    optimizer = make_optimizer([model], lr)
    rng, started, step = random.Random(3), time.process_time(), 0
    running: list[float] = []
    waiting: list[list[Example]] = []
    model.train()
    while (spent := (time.process_time() - started) / 60) < minutes:
        set_lr(optimizer, lr, step, spent / minutes)
        if not waiting:
            drawn = sorted(rng.sample(examples, 8 * BATCH), key=_length)
            waiting = [drawn[i : i + BATCH] for i in range(0, len(drawn), BATCH)]
            rng.shuffle(waiting)
        inputs, labels = batch(processor, waiting.pop())
        hidden, labels = model.model(**inputs).last_hidden_state[:, :-1], labels[:, 1:]
        wanted = labels >= 0
        loss = F.cross_entropy(model.lm_head(hidden[wanted]), labels[wanted])
        if verdict is not None:
            there = token_of_answers(wanted, verdict)
            loss = loss + F.cross_entropy(model.lm_head(hidden[there]), labels[there])
        apply(optimizer, loss)
        running.append(loss.item())
        step += 1
        if step % every == 0:
            model.eval()
            log(step=step, cpu_minutes=(time.process_time() - started) / 60, loss=np.mean(running), **check())
            model.train()
            running.clear()
    model.eval()


def token_of_answers(wanted: torch.Tensor, which: int) -> torch.Tensor:
    """Where token ``which`` of every answer (a run of ``wanted`` ``[B, L]``) stands; from the end if negative."""
    if which < 0:
        return token_of_answers(wanted.flip(1), -which - 1).flip(1)
    there = wanted & ~F.pad(wanted[:, :-1], (1, 0))
    for _ in range(which):
        there = F.pad(there[:, :-1], (1, 0)) & wanted
    return there


def make_optimizer(modules: Sequence[torch.nn.Module], lr: float) -> torch.optim.AdamW:
    parameters = [p for module in modules for p in module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": 0.05},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.98))


def set_lr(optimizer: torch.optim.Optimizer, peak: float, step: int, done: float) -> None:
    """100 steps of warm-up, then a linear fall to a tenth over the time allowed (``done`` in [0, 1])."""
    for group in optimizer.param_groups:
        group["lr"] = peak * min(1.0, (step + 1) / 100) * (1 - 0.9 * done)


def apply(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 1.0)
    optimizer.step()


def _length(e: Example) -> int:
    """Nearly the number of tokens."""
    pixels = sum(i.width * i.height for i in e.images) + sum(f.width * f.height for f in e.frames) // 2
    return pixels // (PATCH * MERGE) ** 2 + sum(len(t) for turn in e.turns for t in turn) // 5


def start_log(out: Path, module: str) -> Log:
    """A function that writes a row to ``out/log.jsonl`` and to the terminal; the first row is the command."""
    out.mkdir(parents=True, exist_ok=True)
    lines = (out / "log.jsonl").open("w")

    def log(**row: float | str) -> None:
        rounded = {k: v if isinstance(v, str | int) else round(float(v), 4) for k, v in row.items()}
        print(json.dumps(rounded), file=lines, flush=True)
        print("  ".join(f"{k} {v}" for k, v in rounded.items()), flush=True)

    log(command=shlex.join(["python", "-m", f"tools.make_models.{module}", *sys.argv[1:]]))
    return log


def save(model: Any, processor: Any, out: Path) -> None:
    """Weights as float16 safetensors, and the processor, for ``AutoModelForImageTextToText`` and ``AutoProcessor``.

    ``model`` is left with what was written, in float32.
    """
    model.half().save_pretrained(out)
    model.float()
    processor.save_pretrained(out)

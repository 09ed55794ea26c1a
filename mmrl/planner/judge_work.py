"""The operators of a judge that answers in this process: its model's, counted on tensors without data."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from PIL import Image
from torch.nn.functional import pad

from mmrl.config.sampling import TextSampling
from mmrl.config.schema import Recipe
from mmrl.core.reward_contract import Weights
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.episodes.loading import draws
from mmrl.models.quantized import quantize
from mmrl.planner.fake_tensors import KnownMasks, LiveBytes, fake
from mmrl.planner.operations import Work
from mmrl.rewards.judging.asking import Ask
from mmrl.rewards.judging.local import empty_model, inputs_of
from mmrl.rewards.judging.protocol import kind_of

OF_ANSWER = 0.5
"""The share of its limit that a judge's answer is assumed to need: verdicts end themselves."""


@dataclass(frozen=True)
class Answering:
    """The operators of a batch of questions: of their forward, and of a further token of every answer. ``tokens``: of
    an answer at most; ``rows``: the questions; ``reading``: the seconds in which this machine makes their inputs."""

    rows: int
    tokens: int = 1
    reading: float = 0.0
    question: Work = field(default_factory=Work)
    token: Work = field(default_factory=Work)

    def seconds(self, lasts: Callable[[Work], float], token: float) -> float:
        """Seconds of one batch; ``token``: of the code around a token's forward."""
        further = (self.tokens - 1) * OF_ANSWER
        return self.reading + lasts(self.question) + further * lasts(self.token) + (1 + further) * token


def answering(model: Weights, sample: Sample, rows: int) -> Answering:
    """The operators of a judge that is asked about ``rows`` samples like this one. Raises ``UserError`` and
    ``ValueError``."""
    asks = model.asks
    assert asks is not None
    rows = min(rows, asks.batch)
    ask = Ask(cast("tuple[str | Image.Image, ...]", tuple(asks.question(sample))))
    module, sees = empty_model(model.path, model.dtype)
    read = inputs_of(module, model.path, asks.template, ask, rows, sees=sees)
    if bits := kind_of(model.quantize or None):
        quantize(module, bits)
    read()
    began = time.process_time()
    inputs = read()
    reading = time.process_time() - began
    fake([module])
    given: dict[str, Any] = dict(inputs)
    with torch.no_grad(), LiveBytes() as live, KnownMasks(live):
        out = module(**given, use_cache=True, logits_to_keep=1)
        question = Work(live.work)
        if asks.tokens > 1:
            mask = pad(given["attention_mask"], (0, 1), value=1)
            places = mask.sum(1, keepdim=True) - 1
            last = {"input_ids": given["input_ids"][:, -1:], "attention_mask": mask, "position_ids": places}
            module(**last, use_cache=True, past_key_values=out.past_key_values)
    return Answering(rows, asks.tokens, reading, question, Work(live.work.since(question)))


def sample_like(recipe: Recipe, prompt: Prompt) -> Sample:
    """A sample of the recipe's size, empty of content: what a reward is shown."""
    name = SampleId(0, 0, 0, 0)
    if isinstance(recipe.sampling, TextSampling):
        if (written := recipe.sampling.picture) is not None:
            blank = Image.new("RGB", (written.width, written.height))
            return Sample(prompt, name, blank, torch.zeros((3, written.height, written.width)))
        drawn = Image.new("RGB", (64, 64)) if draws(recipe.environment) else None
        return Sample(prompt, name, drawn, text="1 " * (recipe.decoding.max_new_tokens // 2))
    how = recipe.denoising
    picture = Image.new("RGB", (how.width, how.height))
    clip = (picture,) * how.frames if how.frames else None
    shape = (3, how.height, how.width)
    return Sample(prompt, name, picture, torch.zeros((how.frames, *shape) if how.frames else shape), video=clip)

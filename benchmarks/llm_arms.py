"""The arms of ``llm_step.py``: the models, our step, and its bare model calls.

All arms write responses of one length: the end token lies just outside the model's vocabulary, so that nobody can draw
it. Prompts have one length too, so that no arm pads.

The bare arm replays the very calls of the model that one of our steps made, tokens and masks and all: prefill and
decoding token by token over a cache, then the forward passes that train, with a backward pass each, and the optimizer
step. Nothing else: no drawing, no ``generate``, no log-probs, no text, no reward, no loss, no metrics.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from stepping import Arm, must_be_equal
from torch import Tensor, nn

import mmrl
from mmrl.app.build import build
from mmrl.config.schema import Recipe
from mmrl.controller.features import FeatureStore
from mmrl.core.clock import Clock
from mmrl.core.reward_contract import Context
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample
from mmrl.step.step_context import StepContext
from mmrl.training.loop import train_step

allow_cpu_only()  # before transformers imports torchvision

PHASES = ("encode", "sample", "decode", "reward", "prepare", "train")
TEMPLATE = "{% for m in messages %}{{ m['role'] }}:\n{{ m['content'] }}\n{% endfor %}assistant:\n"
"""A chat format without special tokens: the end token has no place in a prompt, the model does not know it."""
DIGITS = 24
"""Of a prompt; a digit is a token."""
LETTERS = "etaoinshrdlcumwfgypbvkjxqzETAOINSHRDLCUMWFGYPBVKJXQZ.,;:!?-_()[]{}<>@#%&*+=/|~^$"
LR = 1e-5


@dataclass(frozen=True)
class Size:
    """A Qwen3 and the work of a step on it."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    vocabulary: int
    new_tokens: int
    prompts: int
    group: int
    micro_batch: int

    @property
    def rows(self) -> int:
        """Samples of a step."""
        return self.prompts * self.group


SIZES = {
    "tiny": Size(1, 16, 2, 1, 32, 320, new_tokens=4, prompts=2, group=2, micro_batch=2),
    "small": Size(4, 128, 4, 2, 384, 4096, new_tokens=64, prompts=8, group=8, micro_batch=32),
    "large": Size(8, 384, 6, 2, 1024, 6144, new_tokens=64, prompts=8, group=8, micro_batch=32),
}
"""``tiny`` is for trying the script out; its times mean nothing."""


def write_model(size: Size, out: Path) -> None:
    """Write a Qwen3 of that size with random weights and a byte-pair tokenizer, as transformers saves them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    tokenizer = make_tokenizer(size.vocabulary)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            hidden_size=size.hidden,
            intermediate_size=size.intermediate,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.kv_heads,
            head_dim=size.hidden // size.heads,
            vocab_size=size.vocabulary,
            max_position_embeddings=512,
            initializer_range=0.1,
            tie_word_embeddings=True,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def make_tokenizer(vocabulary: int) -> Any:
    """Bytes, pairs and triples of characters, ``vocabulary`` tokens with the padding one; the end token is one more."""
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    singles = sorted(ByteLevel.alphabet())
    pairs: Any = itertools.product(LETTERS, LETTERS)
    triples = (("".join(pair), letter) for pair in itertools.product(LETTERS, LETTERS) for letter in LETTERS)
    pairs = list(itertools.islice(itertools.chain(pairs, triples), vocabulary - len(singles) - 1))
    pad, end = "<|pad|>", "<|end|>"
    vocab = {token: n for n, token in enumerate([*singles, *map("".join, pairs), pad, end])}
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=pairs, eos_token=end, pad_token=pad, unk_token=pad)
    tokenizer.chat_template = TEMPLATE
    if [tokenizer.pad_token_id, tokenizer.eos_token_id] != [vocabulary - 1, vocabulary]:
        raise ValueError("the end token must be the first that the model does not know")
    return tokenizer


def prompts(split: str, *, count: int = 64) -> list[Prompt]:
    """The data set of all arms: prompts of ``DIGITS`` digits, so of one length in tokens."""
    rng = random.Random(split)
    return [Prompt(f"digits/{n}", "".join(rng.choices("0123456789", k=DIGITS))) for n in range(count)]


@mmrl.reward(inputs=("text",))
def length(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """The reward of all arms: characters of the response."""
    return [float(len(sample.text or "")) for sample in samples]


def make_run(size: Size, model: Path, device: str = "cpu", dtype: str = "float32") -> StepContext:
    """A run of that size (on a CPU of one thread): GRPO without a reference, all weights train, one update a step.

    A step's samples are drawn in one go, as GRPOTrainer does; micro-batches are those of the update.
    """
    recipe = Recipe.model_validate(
        {
            "name": "benchmark",
            "device": device,
            "threads": 1,
            "pipeline": "llm/chat",
            "model": {"path": str(model.resolve()), "dtype": dtype},
            "data": {"name": f"{__file__}:prompts"},
            "sampling": {"max_new_tokens": size.new_tokens, "temperature": 1.0, "batch_size": size.rows},
            "rewards": [{"name": f"{__file__}:length"}],
            "algorithm": {"type": "grpo", "kl_coef": 0.0},
            "train": {
                "steps": 1,
                "prompts_per_step": size.prompts,
                "group_size": size.group,
                "micro_batch_size": size.micro_batch,
            },
            "optim": {"lr": LR},
        }
    )
    return build(recipe)


def ours(context: StepContext) -> Arm:
    """A step of ``mmrl.training.loop``. Its prompts are new to it each time, as if the data set never repeated."""

    def iterate(step: int, clock: Clock) -> None:
        context.pipeline.features = FeatureStore()
        train_step(context, step, clock)

    return iterate


@dataclass(frozen=True)
class Call:
    """A call of the model as it was made; ``train`` where it carried a graph.

    ``past``: positions in its cache before it, None where it had no cache.
    """

    train: bool
    past: int | None
    kwargs: dict[str, Any]

    @property
    def phase(self) -> str:
        return "train" if self.train else "prefill" if not self.past else "decode"

    def shape(self) -> tuple[str, int | None, tuple[int, ...]]:
        """Phase, positions in the cache and ``[rows, tokens]``: equal for calls of equal work."""
        return self.phase, self.past, tuple(self.kwargs["input_ids"].shape)


@contextmanager
def recording(model: nn.Module) -> Iterator[list[Call]]:
    """Keep every call of ``model`` (tensors, flags, and how full the cache was) while the block runs."""
    calls: list[Call] = []

    def watch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if args:
            raise ValueError("the model was called with arguments that have no name")
        cache = kwargs.get("past_key_values")
        kept = {k: v for k, v in kwargs.items() if isinstance(v, Tensor | bool | int)}
        past = None if cache is None else int(cache.get_seq_length())
        calls.append(Call(torch.is_grad_enabled(), past, kept))

    handle = model.register_forward_pre_hook(watch, with_kwargs=True)
    try:
        yield calls
    finally:
        handle.remove()


def bare(context: StepContext, calls: Sequence[Call]) -> Arm:
    """The calls alone, with a backward pass where there was a graph, and the optimizer step."""
    from transformers import DynamicCache

    model: Any = context.pipeline.policy
    optimizer = torch.optim.AdamW(context.policy.trainable.values(), lr=1e-9, fused=True)
    gradients: dict[torch.Size, Tensor] = {}

    def generate(group: Sequence[Call]) -> None:
        cache: Any = None
        for call in group:
            if not call.past:
                cache = None if call.past is None else DynamicCache(config=model.config)
            model(past_key_values=cache, **call.kwargs)

    def update(group: Sequence[Call]) -> None:
        for call in group:
            logits = model(**call.kwargs).logits
            if logits.shape not in gradients:
                gradients[logits.shape] = torch.randn(logits.shape)
            logits.backward(gradients[logits.shape])

    def iterate(step: int, clock: Clock) -> None:
        for train, group in itertools.groupby(calls, lambda call: call.train):
            with clock("train" if train else "sample"), torch.set_grad_enabled(train):
                (update if train else generate)(list(group))
        with clock("train"):
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    return iterate


def save_calls(calls: Sequence[Call], path: Path) -> None:
    torch.save([[c.train, c.past, c.kwargs] for c in calls], path)


def load_calls(path: Path) -> list[Call]:
    return [Call(train, past, kwargs) for train, past, kwargs in torch.load(path, weights_only=True)]


def same_work(calls: Mapping[str, Sequence[Call]]) -> dict[str, dict[str, dict[str, int]]]:
    """What each arm asks of the model: calls, and tokens in all of them, by phase.

    Raises ``ValueError`` where the arms' calls differ in number, shape or how full the cache is.
    """
    shapes = {arm: Counter(c.shape() for c in made) for arm, made in calls.items()}
    must_be_equal(shapes)
    work: dict[str, dict[str, dict[str, int]]] = {arm: {} for arm in calls}
    for arm, made in calls.items():
        for c in made:
            count = work[arm].setdefault(c.phase, {"calls": 0, "tokens": 0})
            count["calls"] += 1
            count["tokens"] += c.kwargs["input_ids"].numel()
    return work

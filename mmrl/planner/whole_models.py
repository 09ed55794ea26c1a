"""What whole models take beside the sum of their operators: the libraries' code between them, memory that is given out
anew, caches that other operators have filled. Small models of diffusers and transformers are timed, in sizes of no
recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.calibration import Calibration, Over, timed
from mmrl.planner.fake_tensors import LiveBytes
from mmrl.planner.rates import Calibrated, seconds

Run = Callable[[], Tensor]
_NEW = 16
"""Tokens that are written to time one."""
_LONGER = 10
"""A model is timed so many times as long as an operator."""


def with_whole_models(made: Calibration, device: torch.device | str) -> Calibration:
    """The calibration, with how much longer whole models take than its other measurements say."""
    allow_cpu_only()
    rates = Calibrated(made)
    forward, train = [], []
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for run in (*_pictures(device), *_texts(device)):
            with torch.no_grad():
                forward.append(_over(run, rates, device))
            train.append(_over(lambda run=run: run().backward(), rates, device))
        rates = Calibrated(replace(made, over=Over(_mean(forward), _mean(train), made.over.token)))
        return replace(made, over=replace(rates.of.over, token=_token(rates, device)))


def _mean(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def _over(run: Callable[[], object], rates: Calibrated, device: torch.device | str) -> float:
    """How often the sum of its operators a call takes."""
    with LiveBytes() as seen:
        run()
    return timed(run, device, _LONGER) / seconds(seen.work, rates)


def _pictures(device: torch.device | str) -> Iterator[Run]:
    """A step of a transformer that denoises pictures, of two sizes and two numbers of rows."""
    from diffusers import SD3Transformer2DModel

    for heads, layers, rows in ((3, 2, 12), (6, 3, 40)):
        width = 24 * heads
        model: Any = SD3Transformer2DModel(
            sample_size=6,
            patch_size=1,
            in_channels=4,
            out_channels=4,
            pos_embed_max_size=6,
            num_layers=layers,
            attention_head_dim=24,
            num_attention_heads=heads,
            joint_attention_dim=48,
            caption_projection_dim=width,
            pooled_projection_dim=48,
        )
        model = model.to(device)
        inputs = {
            "hidden_states": torch.randn(rows, 4, 6, 6, device=device),
            "encoder_hidden_states": torch.randn(rows, 10, 48, device=device),
            "pooled_projections": torch.randn(rows, 48, device=device),
            "timestep": torch.full((rows,), 500.0, device=device),
        }

        def run(model: Any = model, inputs: Any = inputs) -> Tensor:
            return model(**inputs, return_dict=False)[0].square().mean()

        yield run


def _texts(device: torch.device | str) -> Iterator[Run]:
    """The log-probs of texts under a language model, of two sizes and two numbers of rows."""
    for heads, layers, rows in ((3, 2, 12), (6, 3, 40)):
        model, ids = _language_model(heads, layers, device), torch.randint(4, 400, (rows, 28), device=device)

        def run(model: Any = model, ids: Tensor = ids) -> Tensor:
            logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
            return logits.log_softmax(-1).gather(2, ids[:, 1:, None]).mean()

        yield run


def _language_model(heads: int, layers: int, device: torch.device | str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    width = 24 * heads
    model: Any = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=400,
            hidden_size=width,
            intermediate_size=3 * width,
            head_dim=24,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=heads,
            max_position_embeddings=128,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=0,
        )
    )
    return model.to(device)


@torch.no_grad()
def _token(rates: Calibrated, device: torch.device | str) -> float:
    """Seconds of transformers' ``generate`` for a token, beside the model's forward."""
    model, ids = _language_model(3, 2, device), torch.randint(4, 400, (12, 20), device=device)

    def write(n: int) -> float:
        return timed(lambda: model.generate(ids, max_new_tokens=n, min_new_tokens=n, do_sample=False), device, _LONGER)

    each = (write(_NEW) - write(2)) / (_NEW - 2)
    cache = model(input_ids=ids, use_cache=True).past_key_values
    with LiveBytes() as seen:
        model(input_ids=ids[:, -1:], past_key_values=cache, use_cache=True)
    return max(each - seconds(seen.work, rates), 1e-9)

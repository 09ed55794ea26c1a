"""Rows of text in one forward without padding between them: whole rows behind one another in lines.

A row attends to its own tokens alone. transformers finds where rows begin in ``position_ids``, which start at 0 there,
where it is given no attention mask: it makes a mask of blocks, or has a kernel for rows of different lengths compute
each alone (``performance.attention: flash_attention_2``). verl calls it ``use_remove_padding``, TRL ``padding_free``.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from mmrl.config.schema import Recipe
from mmrl.controller.workload_balance import lines
from mmrl.core.errors import UserError
from mmrl.core.trajectory import TextRows
from mmrl.core.transfer import to_device
from mmrl.models.text.base_model import base_model
from mmrl.models.text.chat import Conditioner

FAMILIES = (
    *("qwen2", "qwen3", "qwen3_moe", "llama", "mistral", "gemma2", "gemma3_text", "phi3", "olmo2", "smollm3"),
    *("granite", "glm4"),
)
"""The types of models that a test compares with rows alone."""


def way(recipe: Recipe, policy: nn.Module, device: torch.device, conditioner: Conditioner) -> Packing | None:
    """How ``train.packing`` has the rows of an update computed; None: padded. Raises ``UserError`` where it is true and
    not possible."""
    asked, model = recipe.train.packing, base_model(policy)
    if asked is False or (asked == "auto" and device.type != "cuda"):
        return None
    why = ""
    if recipe.algorithm.trains_scores:
        why = "a model that scores whole texts reads each in a row of its own"
    elif conditioner.forbidden:  # such a model has tokens that stand for pictures
        why = "this model sees pictures, whose places in a line are not known"
    elif model.config.model_type not in FAMILIES:
        why = f"models of type {model.config.model_type} are not among those tested ({', '.join(FAMILIES)})"
    elif recipe.train.backend == "megatron" or recipe.train.width > 1:
        why = "devices that compute a row together divide it themselves"
    if why and asked is True:
        raise UserError(f"train.packing: {why}; remove it, or set it to false")
    return None if why or device.type == "meta" else Packing("flash" in str(recipe.performance.attention))


_SCALED = ("gemma2", "granite")
"""Of those, the ones that do more to logits than their output layer."""


def plain_head(policy: nn.Module) -> nn.Linear | None:
    """The output layer, where logits are its product and nothing else, and this process has all of it."""
    model = base_model(policy)
    layer, config = model.get_output_embeddings(), model.config
    scaled = config.model_type in _SCALED or getattr(config, "final_logit_softcapping", None) is not None
    if (
        scaled
        or type(layer) is not nn.Linear
        or getattr(layer, "bias", None) is not None
        or "forward" in layer.__dict__
    ):
        return None
    return None if isinstance(layer.weight, DTensor) else layer


@contextmanager
def headless(policy: nn.Module) -> Generator[None]:
    """``policy`` returns, in place of logits, the hidden states that its output layer would get."""
    layer = base_model(policy).get_output_embeddings()
    assert layer is not None
    layer.forward = nn.Identity().forward
    try:
        yield
    finally:
        del layer.forward


def behind(rows: TextRows) -> Tensor:
    """The places ``[K]`` of the tokens behind each prompt in a flattened ``padded``, on the device of ``rows``."""
    found = [torch.arange(i * rows.width, i * rows.width + n) for i, n in enumerate(rows.responses)]
    return to_device(torch.cat(found), rows.tokens.device)


def padded(rows: TextRows, values: Tensor) -> Tensor:
    """``[R, T]``: values ``[K]`` of the tokens behind each prompt in the layout of ``TextRows.padded``, with 0 behind
    each row."""
    step, n = torch.arange(rows.width), torch.tensor(rows.responses).unsqueeze(1)
    place = torch.where(step < n, step + n.cumsum(0) - n, len(values))
    return torch.cat([values, values.new_zeros(1)])[to_device(place, values.device)]


@dataclass(frozen=True)
class Packing:
    """``flat``: all rows of a micro-batch are one line; else several lines of one width (``lines``)."""

    flat: bool

    def of(self, rows: TextRows, pad_token: int) -> Lines:
        """``rows`` in lines, on their device."""
        width, found = lines(rows.lengths, flat=self.flat)
        positions = torch.stack([_positions([rows.lengths[i] for i in line], width) for line in found])
        begins = [0] * len(rows)
        for n, line in enumerate(found):
            for i, at in zip(line, accumulate([0, *(rows.lengths[i] for i in line)]), strict=False):
                begins[i] = n * width + at
        device = rows.tokens.device
        places = torch.cat([torch.arange(at, at + n) for at, n in zip(begins, rows.lengths, strict=True)])
        ids = torch.full((len(found) * width,), pad_token, device=device)
        ids[to_device(places, device)] = rows.tokens
        inputs = {"input_ids": ids.view(-1, width), "position_ids": to_device(positions, device)}
        spans = zip(rows.offsets, rows.prompts, rows.offsets[1:], strict=False)
        behind = torch.cat([torch.arange(at + asked, end) for at, asked, end in spans])  # no mask: a device would wait
        return Lines(inputs, to_device(places[behind] - 1, device))


def _positions(lengths: list[int], width: int) -> Tensor:
    """The place of each token of a line in its row, ``[width]``; padding is a row of its own."""
    return torch.cat([torch.arange(n) for n in (*lengths, width - sum(lengths))])


@dataclass(frozen=True)
class Lines:
    """Rows in lines. ``inputs``: ``input_ids`` and ``position_ids``, ``[lines, width]``. ``before`` ``[K]``: of each
    token behind a prompt, the place of the token before it in the flattened lines."""

    inputs: dict[str, Tensor]
    before: Tensor

    @contextmanager
    def head(self, policy: nn.Module) -> Generator[None]:
        """``policy`` computes logits ``[1, K, V]``, those before the ``K`` tokens alone: no others are ever made."""
        layer = base_model(policy).get_output_embeddings()
        assert layer is not None
        chosen = layer.register_forward_pre_hook(lambda _, given: (given[0].flatten(0, 1)[self.before].unsqueeze(0),))
        try:
            yield
        finally:
            chosen.remove()

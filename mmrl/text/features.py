"""The features of encoded prompts, and how rows of them become the arguments of one forward."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mmrl.controller.features import FeatureStore
from mmrl.trajectory import Prompt
from mmrl.transfer import to_device

PER_TOKEN = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Features with one entry per prompt token; all others belong to media and are joined along their first dimension."""


def key_of(prompt: Prompt) -> str:
    """Names a prompt's features: equal for equal content, whatever the prompt is called."""
    media = [(m.kind, m.path, m.offset, m.size, m.data, m.frames, m.show) for m in prompt.media]
    said = (prompt.system, prompt.text, media, *prompt.turns)
    return hashlib.blake2b(repr(said).encode(), digest_size=12).hexdigest()


def features_of(store: FeatureStore, key: str, tokens: int) -> dict[str, Tensor]:
    """The features ``key`` of a prompt's first ``tokens``."""
    found = store.get(key)
    if len(found["input_ids"]) == tokens:
        return found
    return {name: value[:tokens] if name in PER_TOKEN else value for name, value in found.items()}


def joined(
    rows: Sequence[Mapping[str, Tensor]],
    pad_token: int,
    responses: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    own_positions: bool,
) -> dict[str, Tensor]:
    """The model's arguments for prompts padded on the left, and responses ``[B, T]`` with their mask behind them.

    ``own_positions``: the model counts positions itself; otherwise they are counted here, from the attention mask.
    """
    longest = max(len(row["input_ids"]) for row in rows)
    own = [torch.ones_like(row["input_ids"]) for row in rows]
    out: dict[str, Tensor] = {"attention_mask": torch.stack([pad(m, (longest - len(m), 0)) for m in own])}
    for name in rows[0]:
        if name in PER_TOKEN:
            fill = pad_token if name == "input_ids" else 0
            out[name] = torch.stack([pad(row[name], (longest - len(row[name]), 0), value=fill) for row in rows])
    for name in {name for row in rows for name in row} - PER_TOKEN:
        out[name] = torch.cat(_alike([row[name] for row in rows if name in row]))
    if responses is not None and mask is not None:
        behind = {"input_ids": responses, "attention_mask": mask.long()}
        for name in set(out) & PER_TOKEN:
            out[name] = torch.cat([out[name], behind.get(name, torch.zeros_like(responses))], 1)
    if not own_positions:
        out["position_ids"] = (out["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return out


def _alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Padded with zeros to one shape but for the first dimension, as the processors do that have a row per prompt: a
    picture of zeros is one that is not there, to the models that take such rows."""
    sizes = [max(lengths) for lengths in zip(*(t.shape[1:] for t in tensors), strict=True)]
    return [
        pad(t, [n for size, own in zip(sizes[::-1], t.shape[:0:-1], strict=True) for n in (0, size - own)])
        for t in tensors
    ]


def as_weights(features: Mapping[str, Tensor], model: nn.Module, device: torch.device) -> dict[str, Tensor]:
    """``features`` on ``device``, and pixels in the dtype of the weights of ``model``: some processors make them in
    bfloat16, whatever the weights are in."""
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    moved = {name: to_device(tensor, device) for name, tensor in features.items()}
    return {name: t.to(dtype) if name.startswith("pixel_values") else t for name, t in moved.items()}

"""The features of encoded prompts, and how rows of them become the arguments of one forward."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mmrl.controller.features import FeatureStore
from mmrl.core.trajectory import Prompt
from mmrl.core.transfer import to_device

PER_TOKEN = frozenset({"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"})
"""Features with one entry per prompt token; all others belong to media and are joined along their first dimension."""


PICTURES_IN_ROWS = 5
"""Dimensions of ``pixel_values`` in families that have the pictures of a prompt in its row, ``[1, pictures, ...]``."""


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


def with_told(prompt: Mapping[str, Tensor], told: Sequence[tuple[int, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The features of a prompt, and of pictures that were told behind it, each from a token of the row on. What there
    is per token ends with the last of them; ``input_ids`` stay those of the prompt."""
    found = dict(prompt)
    for start, features in told:
        for name, value in features.items():
            known = found.get(name)
            if name in PER_TOKEN:
                known = value[:0] if known is None else known
                found[name] = torch.cat([pad(known, (0, start - len(known))), value])
            elif known is None:
                found[name] = value
            elif features["pixel_values"].ndim == PICTURES_IN_ROWS:
                found[name] = torch.cat(_alike([known[0], value[0]])).unsqueeze(0)
            else:
                found[name] = torch.cat([known, value])
    return found


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
    What ``rows`` have per token beyond the prompt (``with_told``) is that of the response.
    """
    lengths = [len(row["input_ids"]) for row in rows]
    longest = max(lengths)
    own = [torch.ones_like(row["input_ids"]) for row in rows]
    out: dict[str, Tensor] = {"attention_mask": torch.stack([pad(m, (longest - len(m), 0)) for m in own])}
    behind = {} if responses is None or mask is None else {"input_ids": responses, "attention_mask": mask.long()}
    for name in {name: None for row in rows for name in row if name in PER_TOKEN}:
        fill = pad_token if name == "input_ids" else 0
        of = [row.get(name, row["input_ids"][:0]) for row in rows]
        asked = [_fitted(value, n) for value, n in zip(of, lengths, strict=True)]
        out[name] = torch.stack([pad(value, (longest - len(value), 0), value=fill) for value in asked])
        if responses is not None and name not in behind:
            width = responses.shape[1]
            behind[name] = torch.stack([_fitted(value[n:], width) for value, n in zip(of, lengths, strict=True)])
    for name in {name for row in rows for name in row} - PER_TOKEN:
        out[name] = torch.cat(_alike([row[name] for row in rows if name in row]))
    out |= {name: torch.cat([out[name], value], 1) for name, value in behind.items()}
    if not own_positions:
        out["position_ids"] = (out["attention_mask"].cumsum(1) - 1).clamp(min=0)
    return out


def _fitted(values: Tensor, length: int) -> Tensor:
    """The first ``length`` values, with zeros behind them where there are fewer."""
    return values if len(values) == length else pad(values[:length], (0, max(0, length - len(values))))


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

"""A vision-language model whose language part ranks share, and whose vision tower each has for itself.

Pictures go through Hugging Face's own forward: its tower, its projection, its embeddings in place of the tokens that
stand for pictures, its positions. Only two things in it are exchanged: tokens' embeddings come from Megatron-Core's
``GPTModel``, and the decoder is that model's. The gradient that reaches the embeddings is whole and the same on every
rank, so the tower's is too, and nobody adds it.

Known are Qwen2.5-VL's rotary positions in three directions (time, height, width), in sections one behind the other.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import pad

from mmrl.engines.megatron.model import padding


class Decoded(NamedTuple):
    """As Hugging Face's output of a decoder."""

    last_hidden_state: Tensor
    past_key_values: None = None
    hidden_states: None = None
    attentions: None = None


class Seeing:
    """Final class: Hugging Face's ``body`` with ``model``, this rank's part of its language part, in place of its own.
    ``by``: what the length of rows is made a multiple of, for ranks that divide it."""

    def __init__(self, body: Any, model: Any, by: int) -> None:
        self._body, self._model, self._by = body, model, by
        self._decoder = body.language_model
        self._embeddings = self._decoder.embed_tokens

    def __call__(self, input_ids: Tensor, attention_mask: Tensor, **media: Any) -> Tensor:
        """What ``model`` makes of rows that are padded on the left, and of their ``media``, as the body takes them."""
        self._left = padding(attention_mask)
        whole = self._embeddings.forward, self._decoder.forward
        self._embeddings.forward, self._decoder.forward = self._embedded, self._decoded
        try:
            return self._body(input_ids=input_ids, attention_mask=attention_mask, **media).last_hidden_state
        finally:
            self._embeddings.forward, self._decoder.forward = whole

    def _embedded(self, tokens: Tensor) -> Tensor:
        """``[B, S, H]``."""
        return self._model.embedding(tokens, None).transpose(0, 1)

    def _decoded(self, inputs_embeds: Tensor, position_ids: Tensor | None, **_: Any) -> Decoded:
        """Of rows that are padded on the left, which are computed padded on the right."""
        columns = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)
        own = (columns + self._left) % len(columns)
        if position_ids is None:  # no picture is in any row
            position_ids = columns.expand(own.shape)
        hidden = inputs_embeds.gather(1, own.unsqueeze(-1).expand_as(inputs_embeds))
        places = position_ids.expand(3, *own.shape).gather(2, own.expand(3, *own.shape))
        more = -len(columns) % self._by
        hidden, places = pad(hidden, (0, 0, 0, more)).transpose(0, 1), pad(places, (0, more))
        if self._by > 1:  # its backward pass gathers: each rank has the gradient of all tokens again
            hidden = scatter_to_sequence_parallel_region(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            out = self._model(None, places, None, decoder_input=hidden.contiguous())
        return Decoded(out)


def probe(config: Any, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Two rows with a picture each, the first with padding, and the tokens that its logits are for."""
    vision, length = config.vision_config, 16
    merged, first, seen = vision.spatial_merge_size, 5, 8  # two tokens high and four wide
    rows = torch.arange(2 * length, device=device).view(2, -1) % config.get_text_config().vocab_size
    rows[:, first : first + seen] = config.image_token_id
    kinds = (rows == config.image_token_id).long()
    mask = torch.ones_like(rows)
    mask[0, :3] = 0
    size = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    pixels = torch.arange(2 * seen * merged**2 * size, device=device, dtype=torch.float32).sin().view(-1, size)
    kept = torch.arange(first, length - 1, device=device)
    given = {"input_ids": rows, "attention_mask": mask, "mm_token_type_ids": kinds, "pixel_values": pixels}
    grid = torch.tensor([[1, 2 * merged, 4 * merged]] * 2, device=device)
    return {**given, "image_grid_thw": grid, "logits_to_keep": kept, "use_cache": False}, rows[:, first + 1 :]

"""A vision-language model whose language part is sharded over ranks; each rank has the whole vision tower.

Pictures go through Hugging Face's own forward: tower, projection, embeddings in place of the picture tokens, and
positions. Only two parts of it are replaced: the embeddings of tokens, and the decoder, are those of Megatron-Core's
``GPTModel``. The gradient of the embeddings is complete and equal on every rank; so is the tower's, which is therefore
not summed over ranks.

Supported are Qwen2.5-VL's rotary positions in three directions (time, height, width), in consecutive sections.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from mmrl.models.megatron.rows import Packed

if TYPE_CHECKING:  # slow to import
    from transformers import PretrainedConfig, PreTrainedModel
    from transformers.modeling_outputs import BaseModelOutputWithPast


class VisionTower:
    """Final class: Hugging Face's ``body`` with ``model``, this rank's part of the language part, in place of its own.
    ``divided``: sequence parallelism is on."""

    def __init__(self, body: PreTrainedModel, model: GPTModel, *, divided: bool) -> None:
        self._body, self._model, self._divided = body, model, divided
        self._decoder = body.get_submodule("language_model")
        self._embeddings = self._decoder.get_submodule("embed_tokens")

    def __call__(self, packed: Packed, **inputs: Tensor) -> Tensor:
        """The output of ``model`` for rows and their media: ``inputs`` of the body, and how they are ``packed``."""
        self._packed = packed
        whole = self._embeddings.forward, self._decoder.forward
        self._embeddings.forward, self._decoder.forward = self._embedded, self._decoded
        try:
            return self._body(**inputs).last_hidden_state
        finally:
            self._embeddings.forward, self._decoder.forward = whole

    def _embedded(self, tokens: Tensor) -> Tensor:
        """``[B, S, H]``."""
        return self._model.embedding(tokens, None).transpose(0, 1)

    def _decoded(self, inputs_embeds: Tensor, position_ids: Tensor | None, **_: object) -> BaseModelOutputWithPast:
        from transformers.modeling_outputs import BaseModelOutputWithPast

        packed = self._packed
        if position_ids is None:  # no picture is in any row
            position_ids = packed.ends - packed.ends[:, :1]
        places = position_ids.expand(3, *inputs_embeds.shape[:2]).permute(1, 2, 0)
        hidden = packed.pack(inputs_embeds).transpose(0, 1)
        if self._divided:  # its backward pass gathers the gradient of all tokens on each rank
            hidden = scatter_to_sequence_parallel_region(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            there = packed.pack(places).permute(2, 0, 1)
            out = self._model(None, there, None, decoder_input=hidden.contiguous(), packed_seq_params=packed)
        return BaseModelOutputWithPast(out)


def probe(config: PretrainedConfig, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Arguments for two rows with a picture each, the first with padding, and the tokens of its logits."""
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

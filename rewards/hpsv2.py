"""HPS v2.1 (Wu et al. 2023, arXiv 2306.09341): OpenCLIP ViT-H/14 tuned on people's choices between pictures.

The score is the cosine of picture and prompt, about 0.2 to 0.35. ``path`` is ``HPS_v2.1_compressed.pt`` (OpenCLIP's
names, put into transformers' CLIPModel); ``base`` gives the configuration and the tokenizer of the model it was tuned
from. Pictures are prepared as the authors' code does: resized by torch so that the longer edge fits, then padded with
black to a square, where CLIP crops. Departures: OpenCLIP mends broken Unicode and HTML entities in prompts first, and
pads a picture only if it had to resize it, so that it fails on one of 224 x 100.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch

import mmrl
from mmrl.core.hub_files import check_files
from mmrl.core.library_loading import check_tokens, try_processor
from mmrl.core.media.images import to_tensor
from mmrl.core.reward_contract import Context, weights_at
from mmrl.core.trajectory import Sample
from mmrl.rewards.checkpoints import fill, read_tensors
from mmrl.rewards.sleeping import Sleeping, check_dtype

from .clip import cosine, no_model, normalised

DEFAULT = "xswu/HPSv2/HPS_v2.1_compressed.pt"
BASE = "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"

_BLOCKS = {
    "visual.transformer.resblocks.": "vision_model.encoder.layers.",
    "transformer.resblocks.": "text_model.encoder.layers.",
}
_IN_A_BLOCK = {
    "ln_1.": "layer_norm1.",
    "ln_2.": "layer_norm2.",
    "mlp.c_fc.": "mlp.fc1.",
    "mlp.c_proj.": "mlp.fc2.",
    "attn.out_proj.": "self_attn.out_proj.",
}
_OUTSIDE = {
    "visual.class_embedding": "vision_model.embeddings.class_embedding",
    "visual.positional_embedding": "vision_model.embeddings.position_embedding.weight",
    "visual.conv1.weight": "vision_model.embeddings.patch_embedding.weight",
    "visual.ln_pre.weight": "vision_model.pre_layrnorm.weight",
    "visual.ln_pre.bias": "vision_model.pre_layrnorm.bias",
    "visual.ln_post.weight": "vision_model.post_layernorm.weight",
    "visual.ln_post.bias": "vision_model.post_layernorm.bias",
    "token_embedding.weight": "text_model.embeddings.token_embedding.weight",
    "positional_embedding": "text_model.embeddings.position_embedding.weight",
    "ln_final.weight": "text_model.final_layer_norm.weight",
    "ln_final.bias": "text_model.final_layer_norm.bias",
}
_TRANSPOSED = {"visual.proj": "visual_projection.weight", "text_projection": "text_projection.weight"}


@mmrl.reward(device=True, paths=("path", "base"), models=weights_at(DEFAULT), checks=True)
class HPSv2(Sleeping):
    """HPS v2.1 of each picture with its prompt. Prompts are cut at the text encoder's length."""

    def __init__(self, path: str = DEFAULT, base: str = BASE, dtype: str = "auto") -> None:
        self.dtype = check_dtype(dtype)
        self.model, self.processor = self.kept(partial(_load, path, base))

    def score(self, samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
        """``[B]``."""
        self.wake(context.device)
        size = self.model.config.vision_config.image_size
        boxed = torch.stack([letterboxed(picture, size) for picture in self._pictures(samples)])
        pixels = normalised(boxed, self.processor.image_processor)
        return cosine(self.model, self.processor, samples, pixels, context, self.dtype)

    def _pictures(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        return [to_tensor(sample.image) for sample in samples if sample.image is not None]


@mmrl.reward(inputs=("tensor",), differentiable=True, paths=("path", "base"), checks=True)
class PathwiseHPSv2(HPSv2):
    """The same with the gradient to ``sample.tensor``."""

    def _pictures(self, samples: Sequence[Sample]) -> list[torch.Tensor]:
        return [sample.tensor for sample in samples if sample.tensor is not None]


score = HPSv2
pathwise = PathwiseHPSv2


def from_open_clip(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """OpenCLIP's weights of a CLIP with a vision transformer, under the names of transformers' ``CLIPModel``.

    Its attention holds queries, keys and values in one matrix, and its projections lie the other way round. Names
    that are not OpenCLIP's stay as they are.
    """
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        block = next((old for old in _BLOCKS if name.startswith(old)), None)
        if block is None:
            found[_TRANSPOSED.get(name) or _OUTSIDE.get(name, name)] = tensor.T if name in _TRANSPOSED else tensor
            continue
        index, _, inner = name.removeprefix(block).partition(".")
        place = f"{_BLOCKS[block]}{index}."
        if inner.startswith("attn.in_proj_"):
            for which, part in zip("qkv", tensor.chunk(3), strict=True):
                found[f"{place}self_attn.{which}_proj.{inner.removeprefix('attn.in_proj_')}"] = part
        else:
            old = next((old for old in _IN_A_BLOCK if inner.startswith(old)), "")
            found[place + _IN_A_BLOCK.get(old, "") + inner.removeprefix(old)] = tensor
    return found


def letterboxed(picture: torch.Tensor, size: int) -> torch.Tensor:
    """A picture ``[3, H, W]`` in [0, 1] resized to fit into ``size``, in the middle of a black square of that size."""
    scale = size / max(picture.shape[-2:])
    height, width = (round(n * scale) for n in picture.shape[-2:])
    if scale != 1:
        shape = max(height, 1), max(width, 1)
        picture = torch.nn.functional.interpolate(picture[None], shape, mode="bicubic", antialias=True)[0]
    high, wide = size - picture.shape[-2], size - picture.shape[-1]
    return torch.nn.functional.pad(picture, (wide // 2, wide - wide // 2, high // 2, high - high // 2))


def _load(path: str, base: str) -> tuple[Any, Any]:
    """The model (frozen, float32, on the CPU) and the processor of its base. Raises ``UserError``."""
    from transformers import CLIPConfig, CLIPModel, CLIPProcessor

    check_files(base)
    mmrl.before_loading()
    tensors = from_open_clip(read_tensors(path))
    with no_model(base, "base"):
        config, processor = CLIPConfig.from_pretrained(base), CLIPProcessor.from_pretrained(base)
        try_processor(processor)
        check_tokens(processor.tokenizer, config)
        return fill(lambda: CLIPModel(config), tensors, path), processor

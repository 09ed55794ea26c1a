"""ImageReward v1.0 (Xu et al. 2023, arXiv 2304.05977): BLIP reads the picture with its prompt, a linear head rates it.

The score is standardised with the authors' constants, so that 0 is the mean of their pictures and 1 a deviation.
``path`` is ``ImageReward.pt``; its BLIP is put into transformers' classes, and sizes are read off its shapes.
``tokenizer`` is BERT's. ``pathwise`` has a gradient, for ReFL.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_files
from mmrl.core.library_loading import check_tokens, refused, try_tokenizer
from mmrl.core.reward_contract import Context, weights_at
from mmrl.core.trajectory import Sample
from mmrl.rewards.checkpoints import fill, read_tensors
from mmrl.rewards.sleeping import Sleeping, check_dtype, multiplying, single

from .aesthetic import linear_head
from .clip import resized

DEFAULT = "THUDM/ImageReward/ImageReward.pt"
TOKENIZER = "google-bert/bert-base-uncased"
MEAN, STD = 0.16717362830052426, 1.0333394966054072
LENGTH = 35
"""Tokens of a prompt, padding among them."""
HEAD_WIDTH = 64
"""Of every attention head of BLIP's, picture and text, base and large."""

_RENAMED = (
    (r"^blip\.visual_encoder\.cls_token$", "vision.embeddings.class_embedding"),
    (r"^blip\.visual_encoder\.pos_embed$", "vision.embeddings.position_embedding"),
    (r"^blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"^blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.norm([12])\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"vision.encoder.layers.\1.self_attn.projection."),
    (r"^blip\.visual_encoder\.blocks\.(\d+)\.mlp\.", r"vision.encoder.layers.\1.mlp."),
    (r"^blip\.text_encoder\.", "text."),
    (r"^mlp\.layers\.", "head."),
)
_UNUSED = ("blip.vision_proj.", "blip.text_proj.", "position_ids")


@mmrl.reward(device=True, paths=("path", "tokenizer"), models=weights_at(DEFAULT), checks=True)
class ImageReward(Sleeping):
    """ImageReward of each picture with its prompt."""

    def __init__(self, path: str = DEFAULT, tokenizer: str = TOKENIZER, dtype: str = "auto") -> None:
        self.dtype = check_dtype(dtype)
        self.model, self.tokenizer, self.images = self.kept(partial(_load, path, tokenizer))

    def score(self, samples: Sequence[Sample], *, context: Context) -> torch.Tensor:
        """``[B]``."""
        self.wake(context.device)
        return _rate(self.model, self.tokenizer, samples, self._pixels(samples), context, self.dtype)

    def _pixels(self, samples: Sequence[Sample]) -> torch.Tensor:
        return self.images([s.image for s in samples], return_tensors="pt")["pixel_values"]


@mmrl.reward(inputs=("tensor",), differentiable=True, paths=("path", "tokenizer"), checks=True)
class PathwiseImageReward(ImageReward):
    """The same with the gradient to ``sample.tensor``: pictures are resized on the way by torch (bicubic)."""

    def _pixels(self, samples: Sequence[Sample]) -> torch.Tensor:
        return resized(samples, self.model["vision"].config.image_size, self.images)


score = ImageReward
pathwise = PathwiseImageReward


def from_blip(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The weights under the names of transformers' BLIP classes; those of no such name stay as they are."""
    found = {}
    for name, tensor in tensors.items():
        for old, new in _RENAMED:
            name, replaced = re.subn(old, new, name)
            if replaced:
                break
        found[name] = tensor
    return found


def _load(path: str, tokenizer: str) -> tuple[Any, Any, Any]:
    """The model (vision, text, head; frozen, float32, on the CPU), the tokenizer and the image processor."""
    from transformers import AutoTokenizer, CLIPImageProcessor

    check_files(tokenizer)
    mmrl.before_loading()
    tensors = from_blip(read_tensors(path))
    try:
        vision, text = _configs(tensors)
    except (KeyError, ValueError, IndexError) as error:
        raise UserError(
            f"{path} is no checkpoint of ImageReward: it has no BLIP in it ({error}); "
            f"set options.path to ImageReward.pt ({DEFAULT})"
        ) from error
    with refused(
        lambda reason: (
            f"cannot load a tokenizer from {tokenizer}: {reason}; "
            f"set the reward's options.tokenizer to a directory that holds {TOKENIZER}, or to that name while online"
        )
    ):
        words = AutoTokenizer.from_pretrained(tokenizer)
        try_tokenizer(words)
        check_tokens(words, text)
    side = int(vision.image_size)
    images = CLIPImageProcessor(size={"shortest_edge": side}, crop_size={"height": side, "width": side})
    return fill(lambda: _build(vision, text), tensors, path, _UNUSED), words, images


def _configs(tensors: Mapping[str, torch.Tensor]) -> tuple[Any, Any]:
    """The configurations of picture and text encoder, read off the shapes. Raises ``KeyError`` where one is missing."""
    from transformers import BlipTextConfig, BlipVisionConfig

    _, positions, wide = tensors["vision.embeddings.position_embedding"].shape
    patch = tensors["vision.embeddings.patch_embedding.weight"].shape[-1]
    vision = BlipVisionConfig(
        hidden_size=wide,
        intermediate_size=tensors["vision.encoder.layers.0.mlp.fc1.weight"].shape[0],
        num_hidden_layers=_layers(tensors, "vision.encoder.layers."),
        num_attention_heads=wide // HEAD_WIDTH,
        image_size=patch * round((positions - 1) ** 0.5),
        patch_size=patch,
        layer_norm_eps=1e-6,
    )
    words, width = tensors["text.embeddings.word_embeddings.weight"].shape
    text = BlipTextConfig(
        vocab_size=words,
        hidden_size=width,
        encoder_hidden_size=wide,
        intermediate_size=tensors["text.encoder.layer.0.intermediate.dense.weight"].shape[0],
        num_hidden_layers=_layers(tensors, "text.encoder.layer."),
        num_attention_heads=width // HEAD_WIDTH,
        max_position_embeddings=tensors["text.embeddings.position_embeddings.weight"].shape[0],
    )
    return vision, text


def _layers(tensors: Mapping[str, torch.Tensor], prefix: str) -> int:
    return len({name.removeprefix(prefix).partition(".")[0] for name in tensors if name.startswith(prefix)})


def _build(vision: Any, text: Any) -> torch.nn.ModuleDict:
    from transformers import BlipTextModel, BlipVisionModel

    parts = {
        "vision": BlipVisionModel(vision),
        "text": BlipTextModel(text, add_pooling_layer=False),
        "head": linear_head(text.hidden_size),
    }
    return nn.ModuleDict(parts)


def _rate(
    model: Any, tokenizer: Any, samples: Sequence[Sample], pixels: torch.Tensor, context: Context, dtype: str
) -> torch.Tensor:
    """The head, whose numbers are the scores, is float32 whatever ``dtype`` is."""
    texts = [sample.prompt.text for sample in samples]
    tokens = tokenizer(texts, padding="max_length", truncation=True, max_length=LENGTH, return_tensors="pt")
    with multiplying(dtype, context.device):
        seen = model["vision"](pixel_values=pixels.to(context.device)).last_hidden_state
        read = model["text"](
            input_ids=tokens["input_ids"].to(context.device),
            attention_mask=tokens["attention_mask"].to(context.device),
            encoder_hidden_states=seen,
        )
    with multiplying("float32", context.device):
        return (model["head"](single(read.last_hidden_state[:, 0]))[:, 0] - MEAN) / STD

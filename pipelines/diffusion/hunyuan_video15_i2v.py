"""HunyuanVideo 1.5 image-to-video (``HunyuanVideo15ImageToVideoPipeline``): a text and the picture that the clip begins
with, which the model is shown by channel and by an image encoder (SigLIP)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import diffusers  # its parts are loaded when they are first used
import torch
from PIL import Image
from torch import Tensor

from . import loading
from .fields import Width
from .hunyuan_video15 import HunyuanVideo15Adapter
from .pictures import scaled


class HunyuanVideo15I2VAdapter(HunyuanVideo15Adapter):
    """Final class. Every prompt carries one picture, which is brought to the size that is sampled.

    The stock call takes no size: it computes one of the picture's proportions and the checkpoint's ``target_size``.
    ``prepare`` has it take the size that is sampled.
    """

    family = "HunyuanVideo 1.5 image-to-video"
    pipeline = "HunyuanVideo15ImageToVideoPipeline"
    edits = True
    sized = False
    encoders = ("text_encoder", "text_encoder_2", "image_encoder")
    shows = "feature_extractor"

    @classmethod
    def widths(cls, pipe: diffusers.DiffusionPipeline) -> Iterator[Width]:
        yield from super().widths(pipe)
        config: Any = pipe.transformer.config
        width: int = pipe.image_encoder.config.hidden_size
        yield "image_embed_dim", config["image_embed_dim"], width, f"an image encoder of width {width}"

    def encode_source(self, pictures: Sequence[Image.Image]) -> dict[str, Tensor]:
        """``source``: the latents ``[C, 1, h, w]`` of the first frame; ``seen``: the states ``[T, width]`` of the image
        encoder."""
        source = self.encode_image(scaled(pictures[0]).to(self.device)[None, None])[0].float()
        return {"source": source, "seen": self._states(pictures[0]).to(self.device)}

    def _states(self, picture: Image.Image) -> Tensor:
        encoder: Any = self.pipe.image_encoder
        extractor: Any = self.pipe.feature_extractor
        if extractor is None:  # a plan: the model looks whether all states are 0, so that they need values
            side: int = encoder.config.image_size
            states = encoder(torch.zeros(1, 3, side, side, dtype=encoder.dtype)).last_hidden_state
            return torch.ones(states.shape[1:], dtype=states.dtype)
        shown = extractor.preprocess(images=picture, do_resize=True, return_tensors="pt", do_convert_rgb=True)
        return encoder(**shown.to(device=encoder.device, dtype=encoder.dtype)).last_hidden_state[0]

    def _condition(self, x: Tensor, features: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        known, _ = super()._condition(x, features)
        known[:, :-1, :1], known[:, -1, 0] = features["source"], 1
        return known, features["seen"]

    @property
    def prepare(self) -> str:
        height, width = self.sampling.size
        return (
            f"{super().prepare}pipe.video_processor.calculate_default_height_width = lambda **_: ({height}, {width})\n"
        )


build, describe = loading.entry_points(HunyuanVideo15I2VAdapter)

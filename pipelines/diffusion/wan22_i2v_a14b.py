"""Wan 2.2 A14B image-to-video (``WanImageToVideoPipeline`` with ``transformer_2``): two models, shown the picture by
channel."""

from __future__ import annotations

from . import loading
from .wan22_a14b import Wan22A14BAdapter
from .wan_i2v import WanI2VAdapter


class Wan22I2VA14BAdapter(Wan22A14BAdapter, WanI2VAdapter):
    """Final class. What is of two models is that of text-to-video, what is of the picture that of Wan 2.1."""

    family = "Wan 2.2 A14B image-to-video"
    of_one = "diffusion/wan_i2v"


build, describe = loading.entry_points(Wan22I2VA14BAdapter)

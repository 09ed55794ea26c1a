"""FLUX.1 Kontext (``FluxKontextPipeline``): a picture and an edit instruction."""

from __future__ import annotations

from mmrl.core.json_types import Json

from . import loading
from .flux import FluxAdapter


class FluxKontextAdapter(FluxAdapter):
    """Final class. Every prompt carries one picture, which is brought to the size that is sampled; its tokens follow
    those of the picture that is made. The stock call would bring it to about a million pixels, whatever is sampled."""

    family = "FLUX.1 Kontext"
    pipeline = "FluxKontextPipeline"
    edits = True

    def call(self) -> dict[str, Json]:
        return super().call() | {"max_area": self.sampling.height * self.sampling.width, "_auto_resize": False}


build, describe = loading.entry_points(FluxKontextAdapter)

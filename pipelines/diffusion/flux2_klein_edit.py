"""FLUX.2-klein as an editor (``Flux2KleinPipeline`` with ``image``): a picture and an edit instruction."""

from __future__ import annotations

from . import loading
from .flux2_klein import Flux2KleinAdapter


class Flux2KleinEditAdapter(Flux2KleinAdapter):
    """Final class. Every prompt carries one picture, which is brought to the size that is sampled."""

    family = "FLUX.2-klein (editing)"
    edits = True


build, describe = loading.entry_points(Flux2KleinEditAdapter)

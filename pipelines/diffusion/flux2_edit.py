"""FLUX.2 dev as an editor (``Flux2Pipeline`` with ``image``): an edit instruction and one picture or several."""

from __future__ import annotations

from . import loading
from .flux2 import Flux2Adapter


class Flux2EditAdapter(Flux2Adapter):
    """Final class. Every prompt carries ``sampling.pictures`` pictures, which are brought to the size that is
    sampled."""

    family = "FLUX.2 (editing)"
    edits = True
    several = True


build, describe = loading.entry_points(Flux2EditAdapter)

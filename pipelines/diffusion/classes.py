"""Which pipeline classes of diffusers have a family here; of the others why not, and which family is nearest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import isclass, signature

import diffusers  # its parts are loaded when they are first used

import mmrl
from mmrl.config.drop_ins import entries

from .adapter import Adapter
from .fields import declared

SAME_WEIGHTS = ("Img2Img", "PAG")
"""Parts of the names of classes that draw with the weights of the class without that part."""
_DENOISERS = ("transformer", "unet", "prior", "decoder")
_STEERING = ("controlnet", "adapter", "motion_adapter")
"""Components that steer the denoiser, and are not trained here."""


@dataclass(frozen=True)
class Verdict:
    """``families``: the pipelines of a recipe that are for the class; where there are none, ``why``, and the
    ``nearest`` one, empty where none has a part in common with it."""

    families: tuple[str, ...]
    why: str = ""
    nearest: str = ""

    def __str__(self) -> str:
        if self.families:
            return f"pipeline: {' or '.join(self.families)}"
        near = f"; the nearest pipeline is {self.nearest} ({shipped()[self.nearest].pipeline})" if self.nearest else ""
        return self.why + near


def verdict(kind: str) -> Verdict:
    """What mmrl does with a checkpoint whose ``model_index.json`` names the class ``kind``."""
    fitting = sorted(name for name, family in shipped().items() if kind in (family.pipeline, *family.saved_as))
    if fitting:
        return Verdict(tuple(fitting))
    parts = _parts(kind)
    denoiser = next((name for name in _DENOISERS if name in parts), "")
    return Verdict((), _why(kind, parts, denoiser), _nearest(parts, denoiser))


@cache
def shipped() -> dict[str, type[Adapter]]:
    """The adapter class of every shipped family, by its pipeline's name in a recipe."""
    found: dict[str, type[Adapter]] = {}
    for entry in entries("pipelines"):
        if not entry.name.startswith("diffusion/"):
            continue
        module = mmrl.load("pipelines", entry.name)
        for value in vars(module).values():
            if isinstance(value, type) and value.__module__ == module.__name__ and hasattr(value, "lora_targets"):
                found[entry.name] = value
    return found


def same_weights(kind: str) -> str:
    """The class of a family that draws with the weights of ``kind``; empty where there is none."""
    others = {kind.replace(part, "") for part in SAME_WEIGHTS} | {kind.replace("PAG", "").replace("Img2Img", "")}
    return next((family.pipeline for family in shipped().values() if family.pipeline in others - {kind}), "")


def _parts(kind: str) -> Mapping[str, tuple[type, ...]]:
    """The components of a class, each with the classes that it may have; none where diffusers has no such class, or
    one that is put together from blocks."""
    try:
        return declared(kind)
    except (AttributeError, ImportError, RuntimeError):  # it needs a package that is not here
        return {}


def _why(kind: str, parts: Mapping[str, tuple[type, ...]], denoiser: str) -> str:
    if not hasattr(diffusers, kind):
        return f"diffusers {diffusers.__version__} has no {kind}"
    if not parts:
        return "it is put together from blocks, or needs a package that is not here"
    if not denoiser:
        return "it has no transformer or UNet among its components"
    if steering := [name for name in parts if name.startswith(_STEERING)]:
        return f"its {steering[0]} is not trained here, nor without it the rest"
    if other := same_weights(kind):
        return f"it draws with the weights of a {other}: save it as that"
    alike = [one for one in shipped().values() if _names(declared(one.pipeline), one.trains) & _names(parts, denoiser)]
    if not alike:
        return f"there is no adapter for its {denoiser} ({' or '.join(sorted(_names(parts, denoiser)))})"
    family = max(alike, key=lambda one: len(_shared(declared(one.pipeline), parts)))
    said = f"its {denoiser} is that of a {family.pipeline}"
    if more := sorted(_inputs(kind) - _inputs(family.pipeline)):
        return f"{said}, which is not told {', '.join(more[:3])}"
    other = _shared(declared(family.pipeline), parts) < _all(parts)
    return f"{said}, beside other parts" if other else f"{said}, which it calls in another way"


def _nearest(parts: Mapping[str, tuple[type, ...]], denoiser: str) -> str:
    """The family that has most classes in common: that of the denoiser before others, and more than one without it."""

    def common(family: type[Adapter]) -> tuple[bool, int, bool]:
        theirs, plain = declared(family.pipeline), not (family.saved_as or family.also_trains)
        return bool(_names(theirs, family.trains) & _names(parts, denoiser)), len(_shared(theirs, parts)), plain

    name, family = max(shipped().items(), key=lambda one: common(one[1]))
    same, shared, _ = common(family)
    return name if same or shared > 1 else ""


def _shared(a: Mapping[str, tuple[type, ...]], b: Mapping[str, tuple[type, ...]]) -> set[str]:
    return _all(a) & _all(b)


def _all(parts: Mapping[str, tuple[type, ...]]) -> set[str]:
    """The names of the classes of networks."""
    network, found = import_module("torch.nn").Module, (one for kinds in parts.values() for one in kinds)
    return {one.__name__ for one in found if isclass(one) and issubclass(one, network)}  # others are tuples of numbers


def _names(parts: Mapping[str, tuple[type, ...]], name: str) -> set[str]:
    return {getattr(one, "__name__", "") for one in parts.get(name, ())}


def _inputs(kind: str) -> set[str]:
    """What a call can be given that shows the model something: pictures, clips, sound, masks."""
    shown = ("image", "video", "mask", "audio", "pose", "camera", "action", "box", "layout", "reference")
    counts = {"num_images_per_prompt", "num_videos_per_prompt", "ip_adapter_image"}
    names = signature(getattr(diffusers, kind).__call__).parameters.keys() - counts
    return {name for name in names if any(part in name for part in shown) and "embeds" not in name and name[0] != "_"}

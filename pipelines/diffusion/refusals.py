"""Refuse checkpoints that a family would not draw as diffusers does: classes of components, and fields of their
configurations.

A field is used, is without effect, or is refused by name, before a weight is read.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Collection, Iterator
from importlib import import_module
from inspect import signature
from itertools import product
from math import inf
from pathlib import Path
from typing import Any

import diffusers  # its parts are loaded when they are first used

from mmrl.core.errors import UserError, refuse
from mmrl.core.hub_files import json_of
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.untrusted import printable

from .adapter import Adapter
from .classes import same_weights, verdict
from .fields import as_json, declared, is_number, latent_channels, plain

# -- classes ---------------------------------------------------------------------------------------------------------


def check_path(family: type[Adapter], path: str) -> None:
    """Raises ``UserError`` where ``path`` is one file, with the command that makes a folder of it."""
    if not Path(path).is_file():
        return
    said = f"model.path: {path} is a single file, and a diffusers folder (with model_index.json) is what is read"
    if not hasattr(getattr(import_module("diffusers"), family.pipeline), "from_single_file"):
        raise UserError(f"{said}; diffusers reads no single file of a {family.pipeline}: download its folder")
    folder = f"{path.removesuffix(Path(path).suffix)}-diffusers"
    code = f"import diffusers; diffusers.{family.pipeline}.from_single_file({path!r}).save_pretrained({folder!r})"
    raise UserError(f"{said}: make one, and set model.path={printable(folder)}\n  python -c {shlex.quote(code)}")


def check_scheduler(path: str) -> None:
    """Raises ``UserError`` where the scheduler's file in ``path`` has a number that is not finite, or a wrong count of
    training timesteps, before diffusers computes with it."""
    name = "scheduler/scheduler_config.json"
    try:
        config = json_of(path, name) if Path(path, name).is_file() else {}
    except (OSError, ValueError):  # whoever loads it says so
        return
    for key, value in config.items():
        if key == "lambda_min_clipped" and value == -inf:  # what diffusers writes where nothing is clipped
            continue
        numbers = [v for v in (value if isinstance(value, list) else [value]) if isinstance(v, float)]
        counts = key == "num_train_timesteps"
        if not all(map(is_number, numbers)) or (counts and not (type(value) is int and value > 0)):
            what = "a whole number above 0, 1000 for most models" if counts else "finite numbers"
            raise UserError(f"model.path: {name} says {key}: {as_json(value)}; correct it to {what}")


def variant_of(family: type[Adapter], path: str) -> str | None:
    """The variant of the weights in the folder ``path`` (``fp16``) where some component has no others; None where all
    have plain ones, or where ``path`` is no folder here."""
    needed = set[str]()
    for name in (*family.trained(), "vae", *family.encoders):
        found = [_WEIGHTS.fullmatch(file.name) for file in Path(path, name).glob("*")]
        variants = {match["variant"] for match in found if match}
        if variants and None not in variants:
            needed |= {str(one) for one in variants}
    return min(needed, default=None)


_WEIGHTS = re.compile(
    r"(?:diffusion_pytorch_model|pytorch_model|model)(?:\.(?P<variant>(?!safetensors|bin)[\w-]+?))?"
    r"(?:-\d+-of-\d+)?\.(?:safetensors|bin)"
)
"""Names of files with weights, whole or in parts: ``model.fp16-00001-of-00002.safetensors``."""


def check_classes(family: type[Adapter], path: str, index: JsonObject) -> None:
    """Raises ``UserError`` where ``model_index.json`` names another class than the family is for, of the pipeline or of
    a component that it uses."""
    kind = index.get("_class_name")
    if kind not in (family.pipeline, *family.saved_as):
        raise UserError(f"model.path: {path} {_another(family, path, kind)}")
    allowed = declared(family.pipeline)
    transformers = import_module("transformers")
    if transformers.CLIPVisionModel in allowed.get("image_encoder", ()):  # its states are read, no projection of them
        allowed["image_encoder"] += (transformers.CLIPVisionModelWithProjection,)
    wrong = [
        f"model.path: {path} has a {_named(index.get(name))} as its {name}, and the {name} of a {family.pipeline} is a "
        f"{' or a '.join(sorted(one.__name__ for one in allowed[name]))}; give a checkpoint that has one"
        for name in (*family.trained(), "vae", *family.encoders, *([family.guider] if family.guider else []))
        if not _fits(index.get(name), allowed[name], absent=name in family.may_lack)
    ]
    wrong += [
        f"model.path: {path} has a {name} and no {family.tokenizer_of(name)} for it; give a checkpoint that has one"
        for name in family.encoders
        if _named(index.get(name)) != _NOTHING == _named(index.get(family.tokenizer_of(name)))
    ]
    wrong += [
        f"model.path: {path} has {json.dumps(index.get(name))[:60]} as its {name}, which is no class of diffusers or "
        "transformers; give a checkpoint that has one"
        for name in ("scheduler", *map(family.tokenizer_of, family.encoders))
        if _class(index.get(name)) is None and (name == "scheduler" or _named(index.get(name)) != _NOTHING)
    ]
    wrong += [  # of which transformers would make one that knows no word
        f"model.path: {path} has no files in {family.tokenizer_of(name)}, which its model_index.json names; download "
        "it again"
        for name in family.encoders
        if Path(path).is_dir() and _named(index.get(family.tokenizer_of(name))) != _NOTHING
        if not any(Path(path, family.tokenizer_of(name)).glob("*"))
    ]
    wrong += [
        f"model.path: model_index.json of {path} says {name}: {as_json(index.get(name))}, which is of another kind of "
        f"model than {family.family}: give one that says {' or '.join(map(as_json, allowed))}, or nothing"
        for name, allowed in family.index.items()
        if index.get(name) not in allowed
    ]
    refuse(wrong)


def _another(family: type[Adapter], path: str, kind: Json) -> str:
    """What the checkpoint is, where it is none of the family, and the edit."""
    if not isinstance(kind, str):
        return (
            f"does not say what it is (_class_name in model_index.json is {json.dumps(kind)}); write "
            f'"_class_name": "{family.pipeline}" there if it is one'
        )
    said = f"is a {kind}, and this pipeline is for a {family.pipeline} ({family.family})"
    known = verdict(kind)
    if known.families:
        return f"{said}; set pipeline to {' or '.join(known.families)}"
    if same_weights(kind) == family.pipeline:
        return (
            f"{said}. Both draw with the same weights: save it as the other, and set model.path to that folder\n"
            f"  python -c \"import diffusers; diffusers.{family.pipeline}.from_pretrained('{path}')"
            f".save_pretrained('{path.rstrip('/')}-as-text-to-image')\""
        )
    return f"{said}; there is none for {kind}: {known} (docs/families.md says how to add one)"


def _fits(listed: Json, allowed: Collection[type], *, absent: bool) -> bool:
    """Whether a component of ``model_index.json``, ``[library, class]``, is one of ``allowed``."""
    if not isinstance(listed, list) or len(listed) != 2 or listed[1] is None:
        return absent
    kind = _class(listed)
    return kind is not None and issubclass(kind, tuple(allowed))


def _class(listed: Json) -> type | None:
    """The class that a component of ``model_index.json`` names; None where there is none."""
    library, name = listed if isinstance(listed, list) and len(listed) == 2 else (None, None)
    kind = getattr(import_module(str(library)), str(name), None) if library in ("diffusers", "transformers") else None
    return kind if isinstance(kind, type) else None


_NOTHING = "nothing"


def _named(listed: Json) -> str:
    return str(listed[1]) if isinstance(listed, list) and len(listed) == 2 and listed[1] else _NOTHING


# -- fields ----------------------------------------------------------------------------------------------------------


def check_fields(family: type[Adapter], pipe: diffusers.DiffusionPipeline) -> None:
    """Raises ``UserError`` with all fields of ``pipe``, whose weights may be on the meta device, that the family does
    not use as diffusers does."""
    found = [*_fixed(family, pipe), *_statistics(family, pipe), *_widths(family, pipe), *_numbers(family, pipe)]
    refuse(f"model.path: {line}" for line in found)


def _fixed(family: type[Adapter], pipe: diffusers.DiffusionPipeline) -> Iterator[str]:
    for part, (name, allowed) in product(family.trained(), family.fixed.items()):
        value = getattr(pipe, part).config.get(name)
        if plain(value) not in allowed:
            yield (
                f"{part}/config.json says {name}: {as_json(value)}, which is a model of another kind: "
                f"{family.pipeline} draws with {name}: {' or '.join(map(as_json, allowed))}; give one that has it"
            )


def _numbers(family: type[Adapter], pipe: diffusers.DiffusionPipeline) -> Iterator[str]:
    """Numbers that are none; diffusers would fail at the first forward, or the last."""
    for name in (*family.trained(), "vae"):
        model = getattr(pipe, name)
        for key, parameter in signature(type(model).__init__).parameters.items():
            value = plain(model.config.get(key))
            if parameter.annotation in (int, float, "int", "float") and isinstance(value, list | dict | str):
                yield f"{name}/config.json says {key}: {as_json(value)[:60]}, and it is a number; download it again"


def _statistics(family: type[Adapter], pipe: diffusers.DiffusionPipeline) -> Iterator[str]:
    """The numbers that latents are scaled by."""
    config: Any = pipe.vae.config
    channels = latent_channels(pipe)
    for name in family.statistics:
        value = plain(config.get(name))
        if name.startswith("latents_"):
            right = isinstance(value, list) and len(value) == channels and all(map(is_number, value))
            right = right and (name == "latents_mean" or all(value))
            what = f"{channels} finite numbers" + (", none of them 0" if name == "latents_std" else "")
        else:
            right = is_number(value) and (name == "shift_factor" or value != 0)
            what = "a finite number" + (" other than 0" if name == "scaling_factor" else "")
        if not right:
            yield (f"vae/config.json says {name}: {as_json(value)}, which scales latents; correct it to {what}")


def _widths(family: type[Adapter], pipe: diffusers.DiffusionPipeline) -> Iterator[str]:
    for name, value, needed, why in family.widths(pipe):
        if plain(value) != needed:
            yield (
                f"{family.trains}/config.json says {name}: {as_json(value)}, and a {family.pipeline} with {why} has "
                f"{as_json(needed)}; give a checkpoint whose parts fit"
            )

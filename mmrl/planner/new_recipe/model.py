"""What ``mmrl init`` finds out about a model: its pipeline, its sizes, and a shipped recipe for one like it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from os.path import expanduser
from pathlib import Path
from typing import Protocol

import yaml

import mmrl
from mmrl.config.errors import did_you_mean
from mmrl.config.names import missing_model, resolve, shipped_recipes
from mmrl.core.errors import UserError
from mmrl.core.hub_files import json_of
from mmrl.core.json_types import JsonObject, as_object


class Modality(StrEnum):
    """What a model reads and makes."""

    text = "text"
    vision_language = "vision-language"
    pictures = "pictures"
    clips = "clips"


TEXTS = (Modality.text, Modality.vision_language)
"""Those whose samples are texts."""
ALGORITHMS = {
    Modality.text: "grpo",
    Modality.vision_language: "grpo",
    Modality.pictures: "flow_grpo",
    Modality.clips: "flow_grpo",
}
"""The algorithm where the user names none."""
_CHAT = {Modality.text: "llm/chat", Modality.vision_language: "vlm/chat"}
_WRITER = "llm/emu3"
_MADE = {"image": Modality.pictures, "video": Modality.clips}
_CONTEXT = ("max_position_embeddings", "n_positions", "max_seq_len")
"""What configurations call the longest sequence of tokens."""


class UnknownModalityError(UserError):
    """The model does not say what it makes, and nobody else did."""


class _Family(Protocol):
    """The adapter class of a family of diffusion models."""

    pipeline: str
    trains: str
    also_trains: tuple[str, ...]
    makes: str
    edits: bool
    holds: bool
    clips: bool
    saved_as: tuple[str, ...]


@dataclass(frozen=True)
class Shipped:
    """A recipe that comes with mmrl. ``same``: it is for the same model, not only for one of the same pipeline."""

    name: str
    values: JsonObject
    same: bool

    def section(self, key: str) -> JsonObject:
        """A section of it; empty where it has none."""
        found = self.values.get(key)
        return found if isinstance(found, Mapping) else {}


@dataclass(frozen=True)
class FirstModel:
    """``path``: a local directory, absolute, or a hub name; ``given``: as the user wrote it. ``context``: the tokens
    of the longest text; ``size``: height and width of what it was made for; each None where its files do not say.
    ``readable``: whether its configuration is on this machine. ``tokens``: of a picture of ``size``, which a language
    model writes; None for others."""

    given: str
    path: str
    modality: Modality
    pipeline: str
    says: str
    context: int | None = None
    size: tuple[int, int] | None = None
    readable: bool = True
    like: Shipped | None = field(default=None, repr=False)
    tokens: int | None = None

    @property
    def usual_algorithm(self) -> str:
        """The algorithm where the user names none."""
        return ALGORITHMS[Modality.text if self.tokens else self.modality]


def look_at_model(name: str, modality: Modality | None, *, edits: bool, algorithm: str | None) -> FirstModel:
    """Read the configuration of the model ``name``, a directory or a hub name; no weight is loaded.

    ``modality``: what the user says that it makes. ``edits``: whether prompts carry pictures to edit. ``algorithm``: a
    shipped recipe that has it goes before others. Raises ``UnknownModalityError`` where the configuration is not here
    and ``modality`` is None, and ``UserError`` where it is no model of these pipelines.
    """
    if wrong := missing_model(Path.cwd(), name):
        raise UserError(f"--model: {wrong}")
    path = resolve(Path.cwd(), name)
    index, config = _read(path, "model_index.json"), _read(path, "config.json")
    if index is not None:
        found = _of_pictures(path, index, edits=edits)
    elif config is not None:
        found = _of_text(path, config)
    elif Path(path).exists():
        raise UserError(
            f"--model: {name} has neither model_index.json (diffusers) nor config.json (transformers); name the "
            "directory that has one, as save_pretrained writes it"
        )
    else:
        return _not_here(name, modality, algorithm, edits=edits)
    if modality not in (None, found.modality):
        raise UserError(f"--modality {modality}: {name} is for {found.modality}: {found.says}; leave --modality out")
    return _with_shipped(replace(found, given=expanduser(name)), algorithm)


def _with_shipped(found: FirstModel, algorithm: str | None) -> FirstModel:
    known = _recipes_like(found.path, algorithm or found.usual_algorithm)
    same = next((one for one in known if one.same and one.values.get("pipeline") == found.pipeline), None)
    near = next((one for one in known if one.values.get("pipeline") == found.pipeline), None)
    like = same or (None if found.modality in TEXTS else near)
    return replace(found, like=like)


def _not_here(name: str, modality: Modality | None, algorithm: str | None, *, edits: bool) -> FirstModel:
    """A model on the hub whose configuration cannot be read: from a shipped recipe, or as the user says."""
    known = [one for one in _recipes_like(name, algorithm) if one.same]
    chats = {chat: made for made, chat in _CHAT.items()} | {_WRITER: Modality.pictures}
    for shipped in known:
        pipeline = str(shipped.values["pipeline"])
        made = chats.get(pipeline)
        if made is None:
            family = _families()[pipeline]
            if family.edits != edits and shipped is not known[-1]:
                continue
            made = _MADE[family.makes]
        if modality not in (None, made):
            raise UserError(
                f"--modality {modality}: {name} is for {made}, says the recipe {shipped.name}; leave it out"
            )
        says = f"not downloaded; the shipped recipe {shipped.name} is for it"
        return FirstModel(name, name, made, pipeline, says, readable=False, like=shipped)
    why = f"--model: {name} cannot be read here, and no shipped recipe is for it; download it (hf download {name})"
    if modality is None:
        raise UnknownModalityError(f"{why}, or say what it makes: --modality {', '.join(Modality)}")
    says = "not downloaded"
    if modality in TEXTS:
        return FirstModel(name, name, modality, _CHAT[modality], says, readable=False)
    of_one = {name: family for name, family in _families().items() if not family.also_trains}  # the index says of two
    fitting = [
        name for name, one in of_one.items() if _MADE[one.makes] is modality and one.edits == edits and not one.clips
    ]
    if len(fitting) > 1:
        raise UserError(f"{why}: of which of the pipelines {', '.join(fitting)} it is, its model_index.json says")
    return _with_shipped(FirstModel(name, name, modality, fitting[0], says, readable=False), algorithm)


def _of_writer(path: str, config: JsonObject) -> FirstModel:
    """An Emu3, and the largest square that its context has room for beside a prompt."""
    vq, text = (of if isinstance(of := config.get(key), Mapping) else {} for key in ("vq_config", "text_config"))
    levels, context = vq.get("channel_multiplier"), text.get("max_position_embeddings")
    factor = 2 ** (len(levels) - 1 if isinstance(levels, list) else 3)
    room = 0.8 * (context if isinstance(context, int) else 9216)
    side = max(1, next(n for n in range(10**4) if (n + 1) * (n + 2) + 3 > room))
    says = "config.json: model_type emu3, which writes pictures as tokens"
    size, tokens = (side * factor, side * factor), side * (side + 1) + 3
    return FirstModel(path, path, Modality.pictures, _WRITER, says, size=size, tokens=tokens)


def _of_text(path: str, config: JsonObject) -> FirstModel:
    if config.get("model_type") == "emu3":
        return _of_writer(path, config)
    sees = isinstance(config.get("vision_config"), Mapping)
    modality = Modality.vision_language if sees else Modality.text
    inner = config.get("text_config")
    places = [config, *([inner] if isinstance(inner, Mapping) else [])]
    context = next((n for at in places for key in _CONTEXT if isinstance(n := at.get(key), int)), None)
    says = f"config.json: model_type {config.get('model_type')}" + (", with a vision tower" if sees else "")
    return FirstModel(path, path, modality, _CHAT[modality], says, context)


def _of_pictures(path: str, index: JsonObject, *, edits: bool) -> FirstModel:
    kind = str(index.get("_class_name"))
    known = _families()
    fitting = [(name, one) for name, one in known.items() if kind in (one.pipeline, *one.saved_as)]
    if not fitting:
        classes = sorted({one.pipeline for one in known.values()})
        why = mmrl.load("pipelines", "diffusion/classes").verdict(kind)
        raise UserError(
            f"--model: {path} is a {kind}, and no pipeline here is for that: {why}{did_you_mean(kind, classes)}  "
            f"(there are {', '.join(classes)}; docs/families.md says how to add one)"
        )
    two = index.get("boundary_ratio") is not None  # models, each for noise of its own
    held = bool(index.get("expand_timesteps"))  # a time for each token, so that the first frame can stay
    may_hold = held or not kind.startswith("Wan")  # others say nothing of it
    fitting.sort(
        key=lambda one: (
            one[1].clips,  # for clips, which nobody has said that the prompts carry
            one[1].holds > may_hold,
            one[1].edits != edits,
            bool(one[1].also_trains) != two,
            held > one[1].holds,
        )
    )
    name, family = fitting[0]
    return FirstModel(
        path, path, _MADE[family.makes], name, f"model_index.json: {kind}", size=_size(path, family.trains)
    )


def _size(path: str, trains: str) -> tuple[int, int] | None:
    """The checkpoint's own size in pixels: that of its latents, as its configuration says, times the VAE's factor."""
    config, vae = _read(path, f"{trains}/config.json") or {}, _read(path, "vae/config.json") or {}
    latents = config.get("sample_size")
    widths = vae.get("block_out_channels", vae.get("encoder_block_out_channels"))
    if isinstance(latents, list) and len(latents) == 2:
        sides = tuple(side for side in latents if isinstance(side, int))
    else:
        sides = (latents, latents) if isinstance(latents, int) else ()
    if len(sides) != 2 or not isinstance(widths, list):
        return None
    factor = 2 ** (len(widths) - 1)
    return sides[0] * factor, sides[1] * factor


def _families() -> dict[str, _Family]:
    """The diffusion pipelines by the name in a recipe."""
    return mmrl.load("pipelines", "diffusion/classes").shipped()


def _recipes_like(path: str, algorithm: str | None) -> list[Shipped]:
    """The shipped recipes, those for ``path`` first, and of others those for a published model. Of equals, one with
    ``algorithm`` is first, and one without an environment, which init does not write."""
    found: list[tuple[tuple[bool, bool, bool, bool, bool], Shipped]] = []
    for name, file in shipped_recipes().items():
        values = as_object(yaml.safe_load(file.read_text(encoding="utf-8")))
        own = resolve(file.parent, str(as_object(values["model"])["path"]))
        one = Shipped(name, values, own == path)
        other = one.section("algorithm").get("type") != algorithm
        world = one.section("environment")
        order = not one.same, Path(own).exists(), other, bool(world), ":" in str(world.get("name"))
        found.append((order, one))
    return [one for _, one in sorted(found, key=lambda pair: pair[0])]


def _read(path: str, name: str) -> JsonObject | None:
    """A configuration file of the checkpoint; None where it is not to be had."""
    try:
        return json_of(path, name)
    except (OSError, ValueError):
        return None

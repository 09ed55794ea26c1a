"""Read the settings of a saved LoRA adapter without loading its weights: a folder of peft, or a safetensors file of
diffusers, kohya, ai-toolkit, ComfyUI and the like. Imports no torch.

What changes the arithmetic of the adapter is taken, or refused by name.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open

from mmrl.core.json_types import Json, JsonObject
from mmrl.core.untrusted import parse_json, read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a folder that peft wrote."""
DIFFUSERS = "pytorch_lora_weights.safetensors"
SETTINGS = "mmrl_lora"
"""The metadata of a file that we export for other programs: peft's settings. The scale is in the weights there."""
_SETTINGS_OF_DIFFUSERS = "lora_adapter_metadata"
_LARGEST_CONFIG, _LARGEST_FILE, _MOST_TENSORS = 4 * 2**20, 32 * 2**30, 200_000
_NUMBERS = ("F64", "F32", "F16", "BF16", "I64", "I32")
"""What an alpha may be stored as."""
_ABOUT = {
    *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("inference_mode", "runtime_config", "megatron_core", "qalora_group_size"),
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),
}
"""Settings of peft that change no number once the weights are there. The last row says how the first weights were made,
which ``init_lora_weights`` names too."""
_PLAIN_INIT = ("true", "false", "none", "gaussian", "orthogonal", "eva")
"""First weights after which the base model is as it was. Others (PiSSA, OLoRA, CorDA, LoftQ) change it."""
_PAIR = re.compile(
    r"(?:lora_(?P<a>A)|lora_(?P<b>B)|lora_(?P<down>down)|lora_(?P<up>up)|lora\d?\.(?P<xdown>down)|lora\d?\.(?P<xup>up)"
    r"|lora_linear_layer\.(?P<ldown>down)|lora_linear_layer\.(?P<lup>up))(?:\.default)?\.weight$"
    r"|lora_embedding_(?P<ea>A)$|lora_embedding_(?P<eb>B)$"
)
_FIRST = ("a", "down", "xdown", "ldown", "ea")
_OTHERS = {
    r"lora_te\d?_|^text_encoder|^te\d?_|cond_stage_model|^conditioner\.|^clip_[lg]\.|^t5xxl\.": "a part for a text "
    "encoder, and text encoders do not train here",
    r"dora_scale|lora_magnitude_vector|\.magnitude$": "DoRA",
    r"\.lokr_": "LoKr of LyCORIS",
    r"\.hada_": "LoHa of LyCORIS",
    r"\.oft_|\.boft_|oft_blocks": "OFT",
    r"lora_mid": "a LoRA with a middle matrix (Tucker or CP)",
    r"\.diff(_b)?$|\.set_weight$": "whole differences of weights",
    r"on_input|ia3": "(IA)3",
    r"lora_B(\.default)?\.bias$|lora_up\.bias$|lora_bias": "biases (lora_bias)",
    r"bundle_emb|string_to_param|emb_params": "an embedding of textual inversion",
    r"\.[ab][12]\.weight$": "GLoRA",
}
"""What names of weights say that is no plain LoRA."""
_HEADS = {"score", "classifier"}
"""What peft saves whole with the adapter of a reward model: it names both, and the model has one."""
_MERGED = ("use_dora", "bias", "modules_to_save", "trainable_token_indices", "init_lora_weights")
"""Settings that are no plain LoRA's and that peft and diffusers can merge into the base model."""
_NEW = "remove lora.path, and a new adapter is trained"
_ITS_OWN = f"or {_NEW}"

Factor = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Rank = Annotated[int, Field(gt=0, strict=True)]


class Settings(BaseModel):
    """What peft's ``LoraConfig`` says that changes numbers and is taken as it is. Other keys are only looked at."""

    model_config = ConfigDict(extra="allow", frozen=True)
    r: Rank
    lora_alpha: Factor
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    rank_pattern: dict[str, Rank] | None = None
    alpha_pattern: dict[str, Factor] | None = None
    use_rslora: bool | None = False
    fan_in_fan_out: bool | None = False
    lora_dropout: Annotated[float, Field(ge=0, lt=1)] | None = 0.0
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    target_parameters: list[str] | None = None
    modules_to_save: list[str] | None = None
    init_lora_weights: bool | str | None = True

    @property
    def largest(self) -> int:
        """The largest rank that a module may have."""
        return max([self.r, *(self.rank_pattern or {}).values()])

    def refused(self) -> Iterator[str]:
        """The names of settings that are not of a plain LoRA."""
        if str(self.init_lora_weights).lower() not in _PLAIN_INIT:
            yield f"init_lora_weights={self.init_lora_weights} (it changes the base model too)"
        more = {"modules_to_save": sorted({*(self.modules_to_save or ())} - _HEADS)}
        for key, value in [*(self.model_extra or {}).items(), *more.items()]:
            if key not in _ABOUT and value not in (None, False, [], {}, "none"):
                yield key if value is True else f"{key}={json.dumps(value)[:60]}"
        for key, pattern in [("rank_pattern", p) for p in self.rank_pattern or ()] + [
            ("alpha_pattern", p) for p in self.alpha_pattern or ()
        ]:
            if not _tame(pattern):
                yield f"{key} with the expression {pattern[:60]}"


@dataclass(frozen=True)
class SavedAdapter:
    """``weights``: a safetensors file. ``rank``: the largest of a module; ``alpha``: of most modules. ``targets``:
    names of modules, or one pattern as a text; None where they follow from the names of the weights.

    ``settings``: peft's; None where the weights alone say what they are. ``peft``: whether the weights have peft's
    names, which other names are converted to. ``scaled``: whether the scale is multiplied into the weights. ``base``:
    the model that it says it was trained on.
    """

    weights: Path
    rank: int
    alpha: float
    targets: list[str] | str | None
    settings: Settings | None
    peft: bool = False
    scaled: bool = False
    base: str | None = None


def read_adapter(path: str) -> SavedAdapter:
    """The adapter at ``path``, a folder or a file. Raises ``ValueError`` if it is not a plain LoRA."""
    place = Path(path)
    if place.name in (CONFIG, WEIGHTS) and (place.parent / CONFIG).is_file():
        place = place.parent
    if (place / CONFIG).is_file():
        return _of_peft(place)
    if place.is_dir():
        place = _file_in(place)
    if place.suffix != ".safetensors" or not place.is_file():
        raise ValueError(
            f"path: {place} is no safetensors file, and other files can run code when they are read; save its tensors "
            f"with safetensors.torch.save_file, {_ITS_OWN}"
        )
    return _of_file(place)


def with_adapters_settings(values: Mapping[str, Json]) -> dict[str, Json]:
    """The section ``model.lora`` with rank, alpha and targets of the adapter at its ``path``; unchanged if there is no
    file. Raises ``ValueError`` if the section contradicts the adapter."""
    path = values.get("path")
    if not isinstance(path, str) or not Path(path).exists():  # the check of the recipe's names reports it
        return dict(values)
    saved = read_adapter(path)
    targets: Json = list(saved.targets) if isinstance(saved.targets, list) else None
    found: dict[str, Json] = {"rank": saved.rank, "alpha": saved.alpha, "targets": targets}
    for key, value in found.items():
        written = values.get(key)
        alike = sorted(map(str, written)) == value if isinstance(written, list) else written == value
        if written is not None and not alike:
            own = value if value is not None else saved.targets or "modules of its own"
            raise ValueError(f"{key}: the adapter at {path} has {own!r}, not {written}; remove the key, or lora.path")
    if values.get("init") == "default":
        raise ValueError(f"init: the adapter at {path} has weights to begin with; remove the key, or lora.path")
    return {**values, **found}


def _file_in(folder: Path) -> Path:
    if (folder / DIFFUSERS).is_file():
        return folder / DIFFUSERS
    found = sorted(f for f in folder.glob("*.safetensors") if f.is_file())
    if len(found) == 1 and found[0].name != WEIGHTS and any(_PAIR.search(name) for name in _header(found[0])[0]):
        return found[0]
    nothing = f"path: {folder} has no {CONFIG} and no {DIFFUSERS}; "
    if (folder / WEIGHTS).is_file():
        raise ValueError(f"{nothing}{WEIGHTS} does not say its alpha: copy the {CONFIG} that peft wrote beside it here")
    several = ", ".join(f.name for f in found[:5])
    edit = f"give one of its files ({several})" if len(found) > 1 else "give a folder that peft or diffusers wrote"
    raise ValueError(nothing + edit)


def _of_peft(folder: Path) -> SavedAdapter:
    said = _object(None, folder / CONFIG)
    if said.get("peft_type") != "LORA":
        raise ValueError(f"path: {folder} has an adapter of type {said.get('peft_type')}; give a LoRA, {_ITS_OWN}")
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"path: {folder} has no {WEIGHTS}; save the adapter with safe_serialization=True, {_ITS_OWN}")
    settings = _checked(said, folder, of_peft=True)
    names, _ = _header(folder / WEIGHTS)
    whole = [name for name in names if not _PAIR.search(name) and not _other(name)]
    ranks = _ranks({name: shape for name, shape in names.items() if name not in whole}, folder / WEIGHTS)
    targets = settings.target_modules or []
    most = max(ranks.values())
    return SavedAdapter(
        folder / WEIGHTS,
        min(settings.largest, most) if settings.target_parameters else most,  # a matrix is of all experts there
        settings.lora_alpha,
        targets if isinstance(targets, str) else sorted(targets),
        settings,
        peft=True,
        base=base if isinstance(base := said.get("base_model_name_or_path"), str) else None,
    )


def _of_file(file: Path) -> SavedAdapter:
    names, metadata = _header(file)
    if any(name.startswith("base_model.model.") for name in names) and not any("_blocks." in name for name in names):
        raise ValueError(
            f"path: {file} has the names of peft and not its settings; copy the {CONFIG} that peft wrote beside it, "
            f"as {file.with_name(CONFIG)}, and give {WEIGHTS} in that folder"
        )
    ranks = _ranks(names, file)
    alphas = _alphas(file, names)
    if wrong := [a for a in alphas if not (math.isfinite(a) and a > 0)]:
        raise ValueError(f"path: {file} has an alpha of {wrong[0]}, with which it does nothing; {_NEW}")
    rank = max(ranks.values())
    alpha = Counter(alphas).most_common(1)[0][0] if alphas else float(rank)
    settings, scaled = None, False
    if SETTINGS in metadata:
        settings, scaled = _checked(_object(metadata[SETTINGS], file), file, of_peft=False), True
    elif _SETTINGS_OF_DIFFUSERS in metadata:
        said = _object(metadata[_SETTINGS_OF_DIFFUSERS], file)
        component = next(iter(ranks)).partition(".")[0]
        own = {key.removeprefix(f"{component}."): v for key, v in said.items() if key.startswith(f"{component}.")}
        settings = _checked(own, file, of_peft=False) if own else None
    if settings is not None:
        alpha = settings.lora_alpha
    return SavedAdapter(file, rank, alpha, None, settings, scaled=scaled)


def _checked(said: JsonObject, place: Path, *, of_peft: bool) -> Settings:
    try:
        settings = Settings.model_validate(said)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(
            f"path: the settings of {place} cannot be read: {where}: {first['msg']}; save the adapter again, {_ITS_OWN}"
        ) from error
    if odd := list(settings.refused()):
        tool = "peft's merge_and_unload" if of_peft else "diffusers' load_lora_weights, fuse_lora and save_pretrained"
        merge = f"merge it into its base model ({tool}) and set model.path to that, or "
        can = all(one.partition("=")[0] in _MERGED for one in odd)
        raise ValueError(
            f"path: the adapter at {place} has {', '.join(odd)}, and a plain LoRA goes on; {merge if can else ''}{_NEW}"
        )
    return settings


def _ranks(names: Mapping[str, list[int]], file: Path) -> dict[str, int]:
    """The rank of each first matrix. Raises ``ValueError`` if a name or a shape is not of a plain LoRA."""
    ranks: dict[str, int] = {}
    sides: dict[str, set[bool]] = {}
    for name, shape in names.items():
        found, alpha = _PAIR.search(name), name.endswith(".alpha")
        if reason := _other(name) or (None if found or alpha else "no weight of a LoRA"):
            raise ValueError(
                f"path: {file} has {name}, which is {reason}; merge the file into its base model with the program that "
                f"made it and set model.path to that, {_ITS_OWN}"
            )
        if found is None:
            continue
        first = any(found.group(key) for key in _FIRST)
        if len(shape) < 2 or 0 in shape:
            raise ValueError(f"path: {file} has {name} of shape {shape}, which is no matrix; save the adapter again")
        sides.setdefault(name[: found.start()], set()).add(first)
        if first:
            ranks[name] = shape[0]
    if lone := [name.rstrip("._") for name, both in sides.items() if len(both) < 2]:
        raise ValueError(f"path: {file}: {len(lone)} weights have no counterpart, such as that of {lone[0]}; save the "
                         "adapter again")  # fmt: skip
    if not ranks:
        raise ValueError(f"path: {file} has no weights of a LoRA; give a folder that peft or diffusers wrote")
    return ranks


def _other(name: str) -> str | None:
    """What a weight of this name is, if it is a part of something that is no plain LoRA."""
    return next((what for pattern, what in _OTHERS.items() if re.search(pattern, name)), None)


def _tame(pattern: str) -> bool:
    """Whether a regular expression is surely fast: few repetitions, and none of a group."""
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        return False
    return len(pattern) <= 500 and len(re.findall(r"[*+{]", pattern)) <= 4 and not re.search(r"\)[*+{]", pattern)


def _object(content: str | bytes | None, file: Path) -> JsonObject:
    """Settings that are written in ``content``; None: in the file. Raises ``ValueError``."""
    try:
        said = read_json(file, most=_LARGEST_CONFIG) if content is None else parse_json(content)
    except OSError as error:
        raise ValueError(
            f"path: {file} cannot be read: {error.strerror}; save the adapter again, {_ITS_OWN}"
        ) from error
    except ValueError as error:
        raise ValueError(
            f"path: {file} has settings that are no JSON: it {str(error)[:200]}; save the adapter again, {_ITS_OWN}"
        ) from error
    if not isinstance(said, dict):
        raise ValueError(f"path: {file} has settings that are no JSON object; save the adapter again, {_ITS_OWN}")
    return said


def _header(file: Path) -> tuple[dict[str, list[int]], dict[str, str]]:
    """The shapes of the tensors by name, and the metadata. Raises ``ValueError``."""
    try:
        if file.stat().st_size > _LARGEST_FILE:
            raise ValueError(f"path: {file} has more than {_LARGEST_FILE // 2**30} GiB, which no LoRA has")
        with safe_open(file, framework="numpy") as opened:
            shapes = {name: opened.get_slice(name).get_shape() for name in opened.keys()}  # noqa: SIM118
            metadata = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"path: {file} cannot be read: {error}; copy the file again") from error
    if len(shapes) > _MOST_TENSORS:
        raise ValueError(f"path: {file} has {len(shapes)} tensors, which no LoRA has")
    return shapes, metadata


def _alphas(file: Path, shapes: Mapping[str, list[int]]) -> list[float]:
    """The number of each tensor ``NAME.alpha``. Imports torch, as numpy has no bfloat16."""
    found = list[float]()
    with safe_open(file, framework="pt") as opened:
        for name in (name for name in shapes if name.endswith(".alpha")):
            if math.prod(shapes[name]) != 1 or opened.get_slice(name).get_dtype() not in _NUMBERS:
                raise ValueError(f"path: {file} has an alpha that is not one number; save the adapter again")
            found.append(float(opened.get_tensor(name)))
    return found

"""Read the settings of a saved LoRA adapter (a folder of peft, a file of diffusers) without loading its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmrl.json_types import Json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""The files of a folder that peft wrote."""
DIFFUSERS = "pytorch_lora_weights.safetensors"
_PLAIN: Mapping[str, tuple[Json, ...]] = {
    "bias": ("none",),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "trainable_token_indices": ([], None),
    "target_parameters": ([], None),
    "layer_replication": ([], None),
}
"""Settings of a plain LoRA: two matrices for each target, all of one rank."""


@dataclass(frozen=True)
class SavedAdapter:
    """``weights``: a safetensors file. ``config``: the folder with peft's settings, or None for a file of diffusers,
    whose names begin with ``component`` (``transformer``, ``unet``). ``targets``: names, or one pattern as a text."""

    weights: Path
    rank: int
    alpha: float
    targets: list[str] | str
    config: Path | None = None
    component: str = ""


def read_adapter(path: str) -> SavedAdapter:
    """The adapter at ``path``, a folder or a file of diffusers. Raises ``ValueError`` if it is not a plain LoRA."""
    place = Path(path)
    if (place / CONFIG).is_file():
        return _of_peft(place)
    file = place / DIFFUSERS if place.is_dir() else place
    if not file.is_file() or file.suffix != ".safetensors":
        raise ValueError(f"path: {path} has no {CONFIG} and no {DIFFUSERS}; give a folder that peft or diffusers wrote")
    return _of_diffusers(file)


def with_adapters_settings(values: Mapping[str, Json]) -> dict[str, Json]:
    """The section ``model.lora`` with rank, alpha and targets of the adapter at its ``path``; unchanged if there is no
    file. Raises ``ValueError`` if the section contradicts the adapter."""
    path = values.get("path")
    if not isinstance(path, str) or not Path(path).exists():  # the check of the recipe's names reports it
        return dict(values)
    saved = read_adapter(path)
    targets: Json = None if isinstance(saved.targets, str) else list(saved.targets)
    found: dict[str, Json] = {"rank": saved.rank, "alpha": saved.alpha, "targets": targets}
    for key, value in found.items():
        written = values.get(key)
        alike = sorted(map(str, written)) == value if isinstance(written, list) else written == value
        if written is not None and not alike:
            raise ValueError(f"{key}: the adapter at {path} has {value if value is not None else saved.targets!r}, not "
                             f"{written}; remove the key, or lora.path")  # fmt: skip
    if values.get("init") == "default":
        raise ValueError(f"init: the adapter at {path} has weights to begin with; remove the key, or lora.path")
    return {**values, **found}


def _of_peft(folder: Path) -> SavedAdapter:
    said = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    if said.get("peft_type") != "LORA":
        raise ValueError(f"path: {folder} has an adapter of type {said.get('peft_type')}; give a LoRA")
    odd = [key for key, plain in _PLAIN.items() if key in said and said[key] not in plain]
    if odd:
        raise ValueError(
            f"path: the adapter at {folder} has {', '.join(odd)}, and a plain LoRA goes on; merge it into its base "
            "model and set model.path to that"
        )
    if not (folder / WEIGHTS).is_file():
        raise ValueError(f"path: {folder} has no {WEIGHTS}; save the adapter with safe_serialization")
    targets = said.get("target_modules") or []
    targets = targets if isinstance(targets, str) else sorted(targets)
    return SavedAdapter(folder / WEIGHTS, int(said["r"]), float(said["lora_alpha"]), targets, folder)


def _of_diffusers(file: Path) -> SavedAdapter:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="numpy") as opened:
            shapes = {key: opened.get_slice(key).get_shape() for key in opened.keys()}  # noqa: SIM118  no mapping
            metadata = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"path: {file} cannot be read: {error}") from error
    down = {key.removesuffix(".lora_A.weight"): shape for key, shape in shapes.items() if key.endswith("lora_A.weight")}
    if 2 * len(down) != len(shapes):
        other = next(key for key in shapes if not key.endswith(("lora_A.weight", "lora_B.weight")))
        raise ValueError(
            f"path: {file} has {other}, which is not as diffusers names a LoRA today; load it with load_lora_weights "
            "and save it with save_lora_weights"
        )
    components, ranks = {key.partition(".")[0] for key in down}, {shape[0] for shape in down.values()}
    if len(components) > 1 or len(ranks) > 1:
        several = (
            ", ".join(sorted(components)) if len(components) > 1 else f"ranks {', '.join(map(str, sorted(ranks)))}"
        )
        raise ValueError(f"path: {file} has {several}; a LoRA of one module with one rank goes on")
    component, rank = components.pop(), ranks.pop()
    said = json.loads(metadata.get("lora_adapter_metadata", "{}"))
    alpha = float(said.get(f"{component}.lora_alpha", rank))  # as diffusers has it where the file does not say
    return SavedAdapter(file, rank, alpha, sorted(key.partition(".")[2] for key in down), None, component)

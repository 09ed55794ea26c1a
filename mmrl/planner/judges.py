"""The reward models on a device, and their sizes, read from their files without loading them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path

from mmrl.config.evaluation_checks import label_of
from mmrl.config.replicas import of_engine
from mmrl.config.schema import Recipe, Reward
from mmrl.core.errors import UserError
from mmrl.core.hub_files import cached_folder, json_of, numbers_on_hub
from mmrl.core.packages.places import lacking
from mmrl.core.reward_contract import HALF, Weights
from mmrl.core.sizes import size
from mmrl.models.quantized import saved
from mmrl.rewards.checkpoints import read_tensors
from mmrl.rewards.judging.local import empty_model
from mmrl.rewards.judging.protocol import kind_of
from mmrl.rewards.loading import Found, asked_of_options, can_sleep

_WIDTHS = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "I64": 8, "I32": 4}
"""Bytes per number; any other dtype takes one."""
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes, by safetensors' names, that are converted to the dtype the model is loaded in."""


@dataclass(frozen=True)
class Asked:
    """A reward that runs on a device. ``parameters`` and ``bytes`` of its models are 0 if they are not known.

    ``trained_on`` is False for one in ``eval.rewards``, which runs in the controller's process and never sleeps;
    ``can_sleep`` is False for one without ``sleep`` and ``wake``.
    """

    label: str
    trained_on: bool
    batch_size: int | None
    what: str = ""
    parameters: int = 0
    bytes: int = 0
    weights: int = 0
    """Bytes of the weights; a server may take more of the device."""
    can_sleep: bool = True
    models: Sequence[Weights] = ()

    @property
    def sleeps(self) -> bool:
        """Whether it frees its memory with ``placement.sleep``."""
        return self.trained_on and self.can_sleep


def on_devices(
    recipe: Recipe,
    found: Sequence[Found],
    evaluated: Sequence[Found],
    device: str = "cpu",
    memory: int | None = None,
    *,
    half: bool = False,
) -> tuple[list[Asked], list[str], list[str]]:
    """The rewards of the recipe that run on a device, problems with their options, and notes on what is not counted.

    ``found`` and ``evaluated`` are those of ``rewards`` and of ``eval.rewards``, in the recipe's order; ``memory`` is
    that of the device in bytes, None if it is not known; ``half``: whether it multiplies bfloat16.
    """
    asked: list[Asked] = []
    problems: list[str] = []
    notes: list[str] = []
    listed = [("rewards", config, one) for config, one in zip(recipe.rewards, found, strict=True)]
    listed += [("eval.rewards", config, one) for config, one in zip(recipe.eval.rewards, evaluated, strict=True)]
    for key, config, one in listed:
        label = label_of(config.name, config.label)
        try:
            models = _models(one, config, "bfloat16" if half else "float32")
        except UserError as error:
            problems.append(f"{key} ({label}): {error}")
            continue
        if models is None:
            asked.append(Asked(label, key == "rewards", config.batch_size, can_sleep=can_sleep(one.target)))
            notes.append(f"{key} ({label}): it does not declare its model, so the model's memory is not counted")
        elif models:
            sized = replace(_sized(label, key, config, models, problems, notes), can_sleep=can_sleep(one.target))
            problems += [f"{key} ({label}): {why}" for why in _refused(recipe, sized, models, device, memory)]
            asked.append(_served(sized, models, device, memory, notes))
    return asked, problems, notes


def _refused(recipe: Recipe, one: Asked, models: Sequence[Weights], device: str, memory: int | None) -> Iterator[str]:
    """Errors, with the edit, about model servers that do not fit on the devices that judge."""
    several, spread = recipe.controllers * recipe.devices_per_controller, max(model.devices for model in models)
    divided = recipe.placement.type in ("partial", "disaggregated") and one.trained_on
    if several > 1 and spread > 1 and not divided:
        devices = spread + of_engine(recipe)
        yield (
            f"its server needs {spread} devices, and each of this run's {several} devices starts its own server when "
            + "it judges; "
            + (
                f"set devices_per_controller to {devices} or more and set placement={{type: partial, judges: {spread}}}"
                ", so that the devices that judge are divided into such servers, "
                if one.trained_on
                else ""
            )
            + "remove tensor_parallel_size and similar options from options.model.args, take a smaller or quantised "
            "judge, or run a separate server and name it as options.model: {url, name}"
        )
    share = sum(model.share for model in models)
    if device.startswith("cuda") and memory is not None and share and one.weights / spread > share * memory:
        yield (
            f"its weights take {size(one.weights // spread)} of a device, and its server may use {share:.0%} of "
            f"{size(memory)}; raise options.model.args.gpu_memory_utilization if that is enough, take a smaller or "
            "quantised judge, or run a separate server and name it as options.model: {url, name}"
        )


def _served(one: Asked, models: Sequence[Weights], device: str, memory: int | None, notes: list[str]) -> Asked:
    """``one`` with the memory of its server: on a GPU a share of its memory, weights included, else a cache."""
    share, beside = sum(model.share for model in models), sum(model.beside for model in models)
    if not share:
        return one
    what = f"{one.what}, in a separate server"
    if not device.startswith("cuda"):
        return replace(one, what=what, bytes=one.bytes + beside)
    if memory is None:
        notes.append(
            f"reward {one.label}: its server takes {share:.0%} of the device's memory, which is not known here"
        )
    return replace(one, what=f"{what}: {share:.0%} of the device's memory", bytes=int(share * (memory or 0)))


def _models(one: Found, config: Reward, half: str) -> Sequence[Weights] | None:
    """The models of a reward, with the dtype ``half`` for ``HALF``; None if it runs on a device and does not declare
    its model."""
    declared = one.declaration
    if declared.models is not None:
        models = declared.models
        found = asked_of_options(one, lambda: models(config.options))
        return [replace(model, dtype=half) if model.dtype == HALF else model for model in found]
    return None if declared.device else []


def _sized(
    label: str, key: str, config: Reward, models: Sequence[Weights], problems: list[str], notes: list[str]
) -> Asked:
    parameters = size = 0
    dtypes: dict[str, None] = {}
    for model in models:
        if unset := lacking(model.path):
            problems.append(f"{key} ({label}): {unset}")
            continue
        if model.path.startswith(("/", ".")) and not Path(model.path).exists():
            problems.append(f"{key} ({label}): there is no model {model.path}; correct its options")
            continue
        try:
            for stored, count in _stored(model):
                stored = _NAMES.get(stored, stored)
                dtype = model.dtype if stored in _NAMES.values() and model.dtype in _WIDTHS else stored
                parameters, size = parameters + count, size + count * _WIDTHS.get(dtype, 1)
                dtypes[dtype] = None
            if bits := kind_of(model.quantize or None):
                size -= saved(empty_model(model.path, model.dtype)[0], bits)
                dtypes[bits] = None
        except (OSError, ValueError, UserError) as error:
            notes.append(f"{key} ({label}): {model.path} is not counted, its weights cannot be read here ({error})")
    names = ", ".join(Path(model.path).name for model in models)
    what = ", ".join([names, *dtypes])
    return Asked(label, key == "rewards", config.batch_size, what, parameters, size, size, models=models)


def _stored(model: Weights) -> Iterator[tuple[str, int]]:
    """(dtype, numbers) of every tensor. Raises ``OSError``, ``ValueError`` and ``UserError``."""
    if model.path.endswith((".pt", ".pth")):
        for tensor in read_tensors(model.path, "meta", fetch=False).values():
            yield str(tensor.dtype).removeprefix("torch."), tensor.numel()
        return
    from safetensors import SafetensorError, safe_open

    files = _files(model.path)
    if files is None:
        yield from numbers_on_hub(model.path).items()
        return
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118  # not a mapping
                    tensor = opened.get_slice(name)
                    yield tensor.get_dtype(), prod(tensor.get_shape())
        except SafetensorError as error:
            raise ValueError(f"{file.name}: {error}") from error


def _files(path: str) -> list[Path] | None:
    """The safetensors files of a directory, or of a hub name in the cache, by transformers' rules; of a diffusers
    pipeline those of all its models. None where the cache has nothing of a hub name."""
    folder = Path(path) if Path(path).exists() else cached_folder(path)
    if folder is None:
        return None
    if not (folder / "model_index.json").is_file():
        return _shards(path, folder, "model")
    parts = [name for name, of in json_of(path, "model_index.json").items() if isinstance(of, list)]
    models = [name for name in parts if (folder / name / "config.json").is_file()]  # no tokenizer, no scheduler
    if not models:
        raise OSError("model_index.json names no model that is there")
    return [file for name in models for file in _shards(path, folder, f"{name}/{_stem(folder / name)}")]


def _stem(folder: Path) -> str:
    """How the files of a pipeline's model begin: of a text encoder as transformers calls them."""
    of_transformers = any((folder / f"model.safetensors{end}").is_file() for end in ("", ".index.json"))
    return "model" if of_transformers else "diffusion_pytorch_model"


def _shards(path: str, folder: Path, stem: str) -> list[Path]:
    """The files of one model of ``path``, which lies in ``folder``; ``stem``: how their names begin there."""
    whole, index = folder / f"{stem}.safetensors", f"{stem}.safetensors.index.json"
    if not (folder / index).is_file():
        if not whole.is_file():
            raise OSError(f"no {stem}.safetensors" + ("" if Path(path).exists() else " in the hub's cache"))
        return [whole]
    shards = json_of(path, index).get("weight_map")
    if not isinstance(shards, Mapping):
        raise ValueError(f"{Path(index).name} lists no files")
    found = [whole.with_name(name) for name in sorted({str(name) for name in shards.values()})]
    if missing := [file.name for file in found if not file.is_file()]:
        raise OSError(f"{missing[0]} is missing")
    return found

"""Build a family's pipeline from its configuration: real classes on the meta device, no weight read."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from mmrl.core.errors import UserError
from mmrl.core.hub_files import json_of, unreadable
from mmrl.core.library_loading import refused
from mmrl.core.stored import read_object

from .adapter import Adapter
from .fields import declared
from .prompt_lengths import readers
from .refusals import check_classes, check_path, check_scheduler

if TYPE_CHECKING:  # slow to import
    from diffusers import DiffusionPipeline
    from transformers import BatchEncoding, PreTrainedModel

Configs = dict[str, dict[str, Any]]
_INDEX = "model_index"
"""What ``model_index.json`` says, among the configurations of components."""


def empty_pipeline(
    family: type[Adapter], path: str, architecture: Path | None, dtypes: Mapping[str, torch.dtype]
) -> tuple[DiffusionPipeline, str]:
    """The family's pipeline without weights, and a sentence on where its sizes come from.

    ``path`` is a directory or a hub name; where its configuration files cannot be read, the ``architecture`` file is.
    ``dtypes`` by component, with a ``default``. Raises ``UserError``.
    """
    check_path(family, path)
    check_scheduler(path)
    configs, source = _configurations(family, path, architecture)
    with refused(
        lambda reason: (
            f"model.path: no {family.family} can be made from {source}: {reason}\n"
            f"  Give a checkpoint of {family.pipeline}, or another pipeline."
        )
    ):
        return _assemble(family, configs, dtypes), source


def _assemble(family: type[Adapter], configs: Configs, dtypes: Mapping[str, torch.dtype]) -> DiffusionPipeline:
    from accelerate import init_empty_weights

    diffusers = import_module("diffusers")  # its lazy names, and a tokenizer's stand-in, mean nothing to a checker
    kind = getattr(diffusers, family.pipeline)
    made: dict[str, Any] = dict.fromkeys((*family.encoders, *family.unused, *([family.sees] if family.sees else [])))
    made |= {family.tokenizer_of(name): None for name in family.encoders}
    with init_empty_weights(include_buffers=True):
        for name in configs.keys() - {"scheduler", family.guider, _INDEX}:
            dtype = dtypes.get(name, dtypes["default"])
            wanted = name in family.encoders
            module = _module(configs[name], () if wanted else declared(family.pipeline)[name])
            made[name] = torch.nn.Module.to(module, dtype)  # diffusers' own ``to`` warns of half precision, wanted here
            _keep_in_float32(module, dtype, wanted)
    length = next(iter(_lengths(made[name] for name in readers(family))), 512)
    for name in readers(family):
        own = next(iter(_lengths([made[name]])), length)
        made[family.tokenizer_of(name)] = TokenShapes(own)
    for name in ("scheduler", *([family.guider] if family.guider else [])):
        made[name] = getattr(diffusers, configs[name]["_class_name"]).from_config(configs[name])
    stored = inspect.signature(kind.__init__).parameters.keys() - made.keys()  # arguments that are no components
    given = {name: value for name, value in configs.get(_INDEX, {}).items() if name in stored}
    return kind(**made, **(given | family.options))


def _lengths(encoders: Iterable[PreTrainedModel | None]) -> list[int]:
    found = [getattr(e.config, "max_position_embeddings", None) for e in encoders if e is not None]
    return [n for n in found if n is not None]


def _keep_in_float32(module: nn.Module, dtype: torch.dtype, wanted: bool) -> None:
    """What the libraries keep in float32: transformers (``wanted``, an encoder) where float16 overflows, diffusers in
    any half precision."""
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or () if dtype == torch.float16 or not wanted else ())
    for part, parameter in module.named_parameters():
        if kept & set(part.split(".")):
            parameter.data = parameter.data.float()


def _module(config: dict[str, Any], declared: Iterable[type]) -> Any:
    """A text encoder is from transformers; other modules are from diffusers, which does not show those that are of one
    pipeline alone, but ``declared`` with it."""
    if declared:
        name = config["_class_name"]
        kind: Any = getattr(import_module("diffusers"), name, None)
        return (kind or next(one for one in declared if one.__name__ == name)).from_config(config)
    kind = getattr(import_module("transformers"), config["architectures"][0])
    left_out = ("architectures", "transformers_version", "dtype", "torch_dtype")
    return kind(kind.config_class(**{k: v for k, v in config.items() if k not in left_out}))


class TokenShapes:
    """A replacement of a tokenizer for when only the shape of its output matters: all token ids are 0."""

    def __init__(self, length: int) -> None:
        self.model_max_length, self.pad_token = length, ""

    def __call__(
        self, text: str | list[str], padding: str, max_length: int | None = None, **_: object
    ) -> BatchEncoding:
        length = 1 if padding == "longest" else max_length or self.model_max_length  # so that nothing is cut off
        ids = torch.zeros(1 if isinstance(text, str) else len(text), length, dtype=torch.long)
        kind: type[BatchEncoding] = import_module("transformers").BatchEncoding
        return kind({"input_ids": ids, "attention_mask": torch.ones_like(ids)})

    def encode(self, text: str) -> list[int]:
        """About as many ids as the text has tokens, for the length of a text before every prompt."""
        return [0] * (len(text) // 4)

    def apply_chat_template(
        self, messages: list[Any], *, tokenize: bool = False, padding: str = "longest", **given: Any
    ) -> str | BatchEncoding:
        """The text of the last message, or its ids: the length is padded, so that a template does not change it."""
        return self("", padding, **given) if tokenize else messages[-1]["content"]

    def tokenize(self, text: str) -> list[str]:
        """Empty: the text has no token of textual inversion."""
        return []


def _configurations(family: type[Adapter], path: str, architecture: Path | None) -> tuple[Configs, str]:
    """Configurations by component: the checkpoint's, else the recorded ones."""
    try:
        return _of_checkpoint(family, path), f"the configuration files of {path}"
    except (OSError, ValueError) as error:
        if architecture is None:
            raise unreadable(path, "model_index.json", "component configurations", error) from error
    try:
        components = read_object(architecture)["components"]
        needed = [name for name in _files(family) if name not in family.encoders[1:]]
        lacking = [name for name in needed if not isinstance(components.get(name), dict)]
        if lacking:
            raise ValueError(f"no object under {', '.join(lacking)}")
        return components, f"the architecture recorded in {architecture.name}, because {path} cannot be read here"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(
            f"architecture: {architecture} cannot be read as component configurations ({type(error).__name__}: "
            f"{error}); "
            'it is a JSON object {"components": {"transformer": {...}, "vae": {...}, "scheduler": {...}, ...}}'
        ) from error


def _of_checkpoint(family: type[Adapter], path: str) -> Configs:
    """Raises ``OSError`` or ``ValueError`` where a configuration is not to be had."""
    index: dict[str, Any] = dict(json_of(path, "model_index.json"))
    check_classes(family, path, index)
    found = {name: (index.get(name) or [None, None])[1] for name in _files(family)}
    configs: Configs = {
        name: dict(json_of(path, file)) for name, file in _files(family).items() if found[name] is not None
    }
    for name, config in configs.items():  # the class that the index names counts, as for diffusers
        if not isinstance(config.get("_class_name", ""), str):
            raise ValueError(f"{_files(family)[name]} says _class_name: {config['_class_name']}, which is no class")
        config |= {"architectures": [found[name]]} if name in family.encoders else {"_class_name": found[name]}
    return {_INDEX: index} | configs


def _files(family: type[Adapter]) -> dict[str, str]:
    """Where the configuration of each component lies in a checkpoint."""
    beside = (*family.connects, *family.sounds)
    modules = {name: f"{name}/config.json" for name in (*family.trained(), "vae", *family.encoders, *beside)}
    guider = {family.guider: f"{family.guider}/guider_config.json"} if family.guider else {}
    return modules | guider | {"scheduler": "scheduler/scheduler_config.json"}

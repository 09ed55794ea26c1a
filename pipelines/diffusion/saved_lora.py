"""Read a LoRA file of any of the programs that diffusers knows, by diffusers' own conversion."""

from __future__ import annotations

import inspect
import logging
import re
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from mmrl.config.adapters import SavedAdapter
from mmrl.core.errors import UserError
from mmrl.models.lora import PREFIX, Converted, config_of, exactly, modules_of, read_weights

from .adapter import Adapter

if TYPE_CHECKING:  # slow to import
    from peft import LoraConfig

_CONVERTS = "lora_state_dict"


def reader(adapter: Adapter) -> Callable[[nn.Module, SavedAdapter], Converted]:
    """How an adapter for the family is read."""
    return lambda model, saved: read_weights(model, saved) if saved.peft else _converted(adapter, model, saved)


def _converted(adapter: Adapter, model: nn.Module, saved: SavedAdapter) -> Converted:
    """Settings and weights by peft's names. Raises ``UserError`` for what diffusers cannot convert for this family."""
    from safetensors.torch import load_file

    if not hasattr(adapter.pipe, _CONVERTS):
        raise UserError(
            f"model.lora.path: diffusers reads no file of a LoRA for {adapter.family}; give a folder that peft wrote "
            "(mmrl export --what lora writes one)"
        )
    try:
        own, alphas = convert(adapter, load_file(saved.weights))
    except Exception as error:  # each family has a conversion of its own, with errors of its own
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise UserError(
            f"model.lora.path: {saved.weights} cannot be read for {adapter.family} by diffusers: {why.strip()[:300]}. "
            "Give a LoRA of this family, or remove model.lora.path, and a new adapter is trained"
        ) from error
    config = config_of(saved.settings) if saved.settings else _by_weights(own, alphas)
    config.target_modules = exactly(model, modules_of(own))  # type: ignore[assignment]
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
    return config, {f"{PREFIX}{name}": value for name, value in own.items()}


def check_experts(adapter: Adapter, saved: SavedAdapter) -> None:
    """Raises ``UserError`` where ``saved`` lacks the LoRA of one of several models that train."""
    if not adapter.also_trains:
        return
    from safetensors import safe_open

    with safe_open(saved.weights, framework="pt") as file:
        found = {name.removeprefix(PREFIX).partition(".")[0] for name in file.keys()}  # noqa: SIM118
    if saved.peft and not {*adapter.trained()} - found:
        return
    lacks = " and ".join(sorted({*adapter.trained()} - found)) if saved.peft else "the names of its models"
    raise UserError(
        f"model.lora.path: {saved.weights} lacks {lacks}, and {adapter.family} has a LoRA for each of "
        f"{' and '.join(adapter.trained())}; give the folder that mmrl export --what lora wrote, or remove "
        "model.lora.path, and new ones are trained"
    )


def convert(adapter: Adapter, tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights by the names of the model, and alphas of modules that are not multiplied into them, as diffusers converts
    the ``tensors`` of a file. Raises ``ValueError`` for what is left out, and what diffusers raises."""
    read = getattr(type(adapter.pipe), _CONVERTS)
    options: dict[str, Any] = {}
    if adapter.trains == "unet":
        options["unet_config"] = adapter.pipe.unet.config
    if "return_alphas" in inspect.signature(read).parameters:
        options["return_alphas"] = True
    with _told() as dropped:
        state, *more = read(dict(tensors), return_lora_metadata=True, **options)
    if dropped:
        raise ValueError(dropped[0])
    alphas: dict[str, Tensor | float] = more[0] if len(more) > 1 and more[0] else {}
    begin = f"{adapter.trains}."
    if other := next((name for name in state if not name.startswith(begin)), None):
        raise ValueError(f"it has {other}, and what trains is the {adapter.trains}")
    own = {_peft_name(name.removeprefix(begin)): value for name, value in state.items()}
    if odd := next((name for name in own if not name.endswith((".lora_A.weight", ".lora_B.weight"))), None):
        raise ValueError(f"it has {odd}, and weights of a LoRA of such a model end in lora_A.weight or lora_B.weight")
    of_module = {
        _peft_name(name.removeprefix(begin).removesuffix(".alpha")).partition(".lora_A")[0]: float(alpha)
        for name, alpha in alphas.items()
        if name.startswith(begin)
    }
    return own, of_module


def _peft_name(name: str) -> str:
    """The name of a weight as peft has it; diffusers had others before it used peft."""
    from diffusers.utils import convert_unet_state_dict_to_peft

    return next(iter(convert_unet_state_dict_to_peft({name: None})))


def _by_weights(state: dict[str, Tensor], alphas: dict[str, float]) -> LoraConfig:
    """Settings where the file has none: ranks are those of the weights, and a module without an alpha has the scale 1.

    diffusers gives every module of an old layout the alpha that most modules have; here each has its own.
    """
    from peft import LoraConfig

    ranks = {name.partition(".lora_B.")[0]: value.shape[1] for name, value in state.items() if ".lora_B." in name}
    scales = {name: alphas.get(name, float(rank)) for name, rank in ranks.items()}
    rank, alpha = (Counter(of.values()).most_common(1)[0][0] for of in (ranks, scales))
    return LoraConfig(
        r=int(rank),
        lora_alpha=alpha,  # type: ignore[arg-type]
        rank_pattern={f"^{re.escape(name)}": r for name, r in ranks.items() if r != rank},
        alpha_pattern={f"^{re.escape(name)}": a for name, a in scales.items() if a != alpha},
        target_modules=[],
    )


@contextmanager
def _told() -> Generator[list[str]]:
    """What diffusers says that it leaves out of a file, which it says as a warning or in passing."""
    lines: list[str] = []

    class Keeps(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()
            if record.levelno >= logging.WARNING or "filter" in text:
                lines.append(text)

    logger, handler = logging.getLogger("diffusers.loaders"), Keeps()
    level, passes, children = logger.level, logger.propagate, logging.Logger.manager.loggerDict
    below = [one for name in children if name.startswith("diffusers.loaders.") for one in [logging.getLogger(name)]]
    levels = [one.level for one in below]
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    for one in below:
        one.setLevel(logging.NOTSET)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = passes
        for one, before in zip(below, levels, strict=True):
            one.setLevel(before)

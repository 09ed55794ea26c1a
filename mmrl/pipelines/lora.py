"""Go on with a saved LoRA adapter."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from mmrl.config.adapters import SavedAdapter, read_adapter
from mmrl.config.schema import Lora
from mmrl.errors import UserError

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


def saved_adapter(lora: Lora) -> SavedAdapter | None:
    """What the recipe goes on with; None where its adapter begins anew. Raises ``UserError``."""
    if lora.path is None:
        return None
    try:
        return read_adapter(lora.path)
    except ValueError as error:
        raise UserError(f"model.lora.{error}") from error


def config_of(saved: SavedAdapter) -> LoraConfig:
    """Its settings, to train with."""
    from peft import LoraConfig

    if saved.config is None:
        return LoraConfig(r=saved.rank, lora_alpha=saved.alpha, target_modules=saved.targets)  # type: ignore[arg-type]
    config = LoraConfig.from_pretrained(str(saved.config))
    config.inference_mode = False
    return config  # type: ignore[return-value]


def adapted(model: nn.Module, saved: SavedAdapter, base: str) -> PeftModel:
    """``model`` with the saved adapter, which trains; on the meta device without its weights.

    ``base``: the recipe's name of the model. One that the adapter was not trained on gets a warning where the names say
    so. Raises ``UserError`` where the adapter does not fit.
    """
    from peft import PeftModel, get_peft_model

    config = config_of(saved)
    said, config.base_model_name_or_path = config.base_model_name_or_path, None
    try:
        policy = get_peft_model(model, config)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(_wrong(saved, str(error).splitlines()[0])) from error
    assert isinstance(policy, PeftModel)
    if not next(policy.parameters()).is_meta:
        if said and Path(said).name != Path(base).name:
            print(
                f"warning: the adapter {saved.weights.parent} says that it was trained on {said}, and model.path is "
                f"{base}",
                file=sys.stderr,
            )
        _load(policy, saved)
    return policy


def _load(policy: PeftModel, saved: SavedAdapter) -> None:
    """Raises ``UserError`` where the weights do not fit."""
    from peft.utils import set_peft_model_state_dict
    from safetensors.torch import load_file

    state = load_file(saved.weights)
    if saved.component:
        state = {f"base_model.model.{key.removeprefix(f'{saved.component}.')}": value for key, value in state.items()}
    try:
        result = set_peft_model_state_dict(policy, state)
    except RuntimeError as error:  # of another shape
        raise UserError(_wrong(saved, str(error).splitlines()[-1].strip())) from error
    wrong = [*result.unexpected_keys, *(key for key in result.missing_keys if "lora_" in key)]
    if wrong:
        raise UserError(_wrong(saved, f"{len(wrong)} weights have no counterpart, such as {wrong[0]}"))


def _wrong(saved: SavedAdapter, why: str) -> str:
    return (
        f"model.lora.path: the adapter {saved.weights} does not fit the model: {why}. Set model.path to the model that "
        "it was trained on"
    )

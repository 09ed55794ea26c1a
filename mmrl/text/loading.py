"""Load a Hugging Face text model and unfreeze its trained part: all weights, some, or adapters."""

from __future__ import annotations

import copy
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmrl.config.schema import Recipe
from mmrl.errors import UserError
from mmrl.pipelines.lora import adapted, saved_adapter

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of the common decoder layer; vision towers are left out."""
_VISION = r".*(visual|vision_tower|vision_model|vision_encoder|multi_modal_projector|connector).*"


def load_model(auto: Any, recipe: Recipe, path: str, tested: tuple[str, ...], otherwise: str) -> Any:
    """The model at ``path`` by the auto class ``auto``, frozen and without dropout.

    A model type outside ``tested`` is tried with a warning. ``otherwise``: what to do with a model of another sort.
    Raises ``UserError`` for what cannot be loaded.
    """
    import transformers.utils.logging

    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, recipe.model.dtype) if recipe.model.lora else torch.float32
    try:
        model = auto.from_pretrained(path, dtype=dtype)
    except (OSError, ValueError, KeyError) as error:
        where = f"the directory {path}" if Path(path).exists() else f"{path!r} (no such directory here)"
        reason, mend = why(error, "a directory with config.json and safetensors", otherwise)
        raise UserError(f"model.path: {where} cannot be loaded by {auto.__name__}: {reason}\n  {mend}") from error
    kind = model.config.model_type
    if kind not in tested:
        print(
            f"warning: models of type {kind!r} are not among those tested ({', '.join(tested)}); compare the metric "
            "mismatch/log_prob_gap_max, which is near 0 where sampling and training agree",
            file=sys.stderr,
        )
    return without_wishes(model)


def why(error: Exception, wanted: str, otherwise: str) -> tuple[str, str]:
    """Why an auto class refused a model, on one line, and the edit: ``otherwise`` where it is of another sort."""
    reason = str(error).splitlines()[0]
    if found := re.match(r"Unrecognized configuration class .*\.(\w+)'>", reason):
        return f"it has a {found[1]}", otherwise
    return reason, f"Give {wanted} as transformers saves it, or a hub name while online."


def without_wishes(model: Any) -> Any:
    """The model frozen, without dropout, and with generation settings that only say where a response ends.

    What the checkpoint wishes for sampling (a repetition penalty, say) would change the distribution behind the
    log-probs' back; it is kept for export only.
    """
    model.requires_grad_(False).eval()
    model.exported_generation_config = model.generation_config
    plain = copy.deepcopy(model.generation_config)
    stop, padding = plain.eos_token_id, plain.pad_token_id
    model.generation_config = type(plain)(eos_token_id=stop, pad_token_id=padding)
    return model


def open_weights(model: Any, recipe: Recipe) -> nn.Module:
    """Let train what the recipe says; what trains is float32. Raises ``UserError`` where it names no such module, and
    where the model has not the attention that it names."""
    _attend(model, recipe)
    if recipe.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.base_model.register_forward_pre_hook(_checkpoint_graphs)
    policy = _adapted(model, recipe) if recipe.model.lora else model.requires_grad_(True)
    for frozen in recipe.model.freeze:
        found = [m for name, m in policy.named_modules() if frozen in (name, name.rpartition(".")[2])]
        if not found:
            known = sorted({name.rpartition(".")[2] for name, m in policy.named_modules() if any(m.children())})
            raise UserError(f"model.freeze: the model has no module {frozen!r}; it has {', '.join(known[:40])}")
        for module in found:
            module.requires_grad_(False)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return policy


def _attend(model: Any, recipe: Recipe) -> None:
    """On the meta device only what takes more memory than a kernel that keeps no matrix of all pairs."""
    name = recipe.performance.attention
    if name is None or (next(model.parameters()).is_meta and name != "eager"):
        return
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"performance.attention: {name}: {reason}; set it to another, or remove it") from error


def _checkpoint_graphs(body: nn.Module, _: Any) -> None:
    """The library's layers checkpoint in training mode alone, and then keep no cache. The models here never are in that
    mode, for it would bring dropout; so each layer, and nothing in it, is put there where a graph is made."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in body.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = torch.is_grad_enabled()


def stop_tokens(model: Any, tokenizer: Any) -> list[int]:
    """The tokens that end a response: the model's and the tokenizer's. Raises ``UserError`` where there is none."""
    given = model.exported_generation_config.eos_token_id
    found = {*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id} - {None}
    if not found:
        raise UserError(
            "model.path: neither generation_config.json nor the tokenizer names an end-of-text token, so every "
            "response would run to its limit; set eos_token in tokenizer_config.json"
        )
    return sorted(found)


def _adapted(model: Any, recipe: Recipe) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    lora = recipe.model.lora
    assert lora is not None
    if saved := saved_adapter(lora):
        return adapted(model, saved, recipe.model.path)
    torch.manual_seed(recipe.seed)
    sees = any(re.fullmatch(_VISION, name) for name, _ in model.named_modules())
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        init_lora_weights="gaussian" if lora.init == "gaussian" else True,
        target_modules=lora.targets or LORA_TARGETS,
        exclude_modules=_VISION if not lora.targets and sees else None,
        task_type="CAUSAL_LM" if model.can_generate() else None,
    )
    try:
        return get_peft_model(model, config)
    except ValueError as error:
        names = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
        raise UserError(f"model.lora.targets: {error}\n  Its linear layers are called {', '.join(names)}.") from error

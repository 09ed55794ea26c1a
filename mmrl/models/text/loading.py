"""Load a Hugging Face text model and unfreeze its trained part: all weights, some, or adapters."""

from __future__ import annotations

import copy
import re
import sys
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor, nn

from mmrl.config.schema import Recipe
from mmrl.core import sharded_loading
from mmrl.core.errors import UserError
from mmrl.core.hub_files import check_weights, place_of
from mmrl.core.library_loading import check_size, refused
from mmrl.core.whole_weights import whole_weights
from mmrl.models.gradient_check import excuse
from mmrl.models.lora import adapted, new_adapter, open_adapter, saved_adapter
from mmrl.models.quantized import quantize
from mmrl.models.text.conditioner import Tokenizer
from mmrl.models.text.row_loading import load_rows

if TYPE_CHECKING:  # slow to import
    from transformers import GenerationConfig, PretrainedConfig, PreTrainedModel

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
"""The linear layers of the common decoder layer; vision towers are left out."""
_VISION = r".*(visual|vision_tower|vision_model|vision_encoder|multi_modal_projector|connector).*"


_WITHOUT_GRADIENT = {
    "indexer": "it chooses which tokens attention reads (DeepSeek 3.2), and the choice has no gradient",
    "expert_bias": "it is added to what experts are chosen by, and the choice has no gradient",
    "e_score_correction_bias": "the same by another name",
}
_EXPORTED = "exported_generation_config"
_READ_PADDING = ("rwkv",)
"""Kinds of models that know no attention mask."""


class AutoModel(Protocol):
    """One of transformers' auto classes."""

    @classmethod
    def from_pretrained(cls, path: str, /, *, dtype: torch.dtype) -> PreTrainedModel: ...

    @classmethod
    def from_config(cls, config: PretrainedConfig, /, *, dtype: torch.dtype) -> PreTrainedModel: ...


def check_kind(kind: str) -> None:
    """Raises ``UserError`` for a kind of model that cannot be trained, whatever its weights."""
    if kind in _READ_PADDING:
        raise UserError(
            f"model.path: transformers' models of type {kind} read the padding before a prompt as if it were text, so "
            "that sampling and training disagree; set it to a model of another type"
        )


def load_model(
    auto: type[AutoModel], recipe: Recipe, path: str, tested: tuple[str, ...], otherwise: str
) -> PreTrainedModel:
    """Load the model at ``path`` with the auto class ``auto``, frozen and without dropout.

    Where it is about to be sharded, this rank reads only its rows (``mmrl.core.sharded_loading``). A model type that is
    not in ``tested`` gets a warning. ``otherwise``: the advice for a model of another kind.
    Raises ``UserError`` for what cannot be loaded.
    """
    import transformers.utils.logging
    from transformers import AutoConfig

    transformers.utils.logging.disable_progress_bar()
    dtype = getattr(torch, recipe.model.dtype) if recipe.model.lora else torch.float32
    ranks = sharded_loading.group()
    wanted = "a directory with config.json and safetensors"
    said = f"model.path: {place_of(path)} cannot be loaded by {auto.__name__}: "
    with refused(lambda reason: said + why(reason, wanted, otherwise)), whole_weights(f"model.path: {path}"):
        check_weights(path)
        check_kind(AutoConfig.from_pretrained(path).model_type)
        check_size(auto, path)
        model = None if ranks is None else load_rows(auto.from_pretrained, path, dtype, ranks)
        if model is None:
            model = auto.from_pretrained(path, dtype=dtype)
    kind = model.config.model_type
    if kind not in tested:
        print(
            f"warning: models of type {kind!r} are not among those tested ({', '.join(tested)}); compare the metric "
            "mismatch/log_prob_gap_max, which is near 0 where sampling and training agree",
            file=sys.stderr,
        )
    return without_sampling_defaults(model)


def why(reason: str, wanted: str, otherwise: str) -> str:
    """Why an auto class refused a model, on one line, and below the edit: ``otherwise`` if it is of another kind."""
    if found := re.match(r"Unrecognized configuration class .*\.(\w+)'>", reason):
        return f"it has a {found[1]}\n  {otherwise}"
    return f"{reason}\n  Give {wanted} as transformers saves it, or a hub name while online."


def without_sampling_defaults(model: PreTrainedModel) -> PreTrainedModel:
    """Freeze the model, turn dropout off, and keep only the end of a response from its generation settings.

    Other defaults of the checkpoint, such as a repetition penalty, would change the distribution that tokens are drawn
    from, and the recomputed log-probs would not know it. They are kept for the export (``exported_config``).
    """
    model.requires_grad_(False).eval()
    set_exported_config(model, model.generation_config)
    plain = copy.deepcopy(model.generation_config)
    stop, padding = plain.eos_token_id, plain.pad_token_id
    for name, ids in (("eos_token_id", stop), ("pad_token_id", padding)):
        if not all(one is None or (type(one) is int and abs(one) < 2**63) for one in _listed(ids)):
            raise UserError(f"model.path: generation_config.json: {name} is no token's number; correct the file")
    model.generation_config = type(plain)(eos_token_id=stop, pad_token_id=padding)
    return model


def _listed(ids: object) -> list[object]:
    return list(ids) if isinstance(ids, list | tuple) else [ids]


def set_exported_config(model: PreTrainedModel, config: GenerationConfig | None) -> None:
    """Keep the checkpoint's generation settings for the export."""
    setattr(model, _EXPORTED, config)


def exported_config(model: PreTrainedModel) -> GenerationConfig:
    """The generation settings that the checkpoint came with."""
    return getattr(model, _EXPORTED)


def open_weights(model: PreTrainedModel, recipe: Recipe) -> nn.Module:
    """Unfreeze the weights that the recipe trains, in float32. Raises ``UserError`` where the recipe names a module or
    an attention that the model does not have, or a quantisation that it cannot have."""
    _attend(model, recipe)
    excuse(model.base_model, _WITHOUT_GRADIENT)
    if recipe.model.quantize:
        quantize(model, recipe.model.quantize)
    if recipe.model.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        model.base_model.register_forward_pre_hook(_checkpoint_graphs)
    policy = _adapted(model, recipe) if recipe.model.lora else model.requires_grad_(True)
    for frozen in recipe.model.freeze:
        found = [m for name, m in policy.named_modules() if frozen in (name, name.rpartition(".")[2])]
        if not found:
            names = sorted({name.rpartition(".")[2] for name, m in policy.named_modules() if any(m.children())})
            raise UserError(f"model.freeze: the model has no module {frozen!r}; it has {', '.join(names[:40])}")
        for module in found:
            module.requires_grad_(False)
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    return policy


def _attend(model: PreTrainedModel, recipe: Recipe) -> None:
    """Set ``performance.attention``. On the meta device only ``eager``: it takes more memory than the other kernels,
    since it keeps the matrix of all pairs of tokens."""
    name = recipe.performance.attention
    if name is None or (next(model.parameters()).is_meta and name != "eager"):
        return
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise UserError(f"performance.attention: {name}: {reason}; set it to another, or remove it") from error


def _checkpoint_graphs(body: nn.Module, _: tuple[Tensor, ...]) -> None:
    """Checkpoint the layers of ``body`` where a graph is made.

    transformers' layers checkpoint only in training mode, in which they keep no cache. The models here are never in
    training mode, because of dropout; so only the layer itself is set to it, and not its modules.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    for layer in body.modules():
        if isinstance(layer, GradientCheckpointingLayer):
            layer.training = torch.is_grad_enabled()


def stop_tokens(model: PreTrainedModel, tokenizer: Tokenizer) -> list[int]:
    """The tokens that end a response: the model's and the tokenizer's. Raises ``UserError`` where there is none."""
    given = exported_config(model).eos_token_id
    every = [*(given if isinstance(given, list) else [given]), tokenizer.eos_token_id]
    found = {token for token in every if token is not None}
    if not found:
        raise UserError(
            "model.path: neither generation_config.json nor the tokenizer names an end-of-text token, so every "
            "response would run to its limit; set eos_token in tokenizer_config.json"
        )
    return sorted(found)


def _adapted(model: PreTrainedModel, recipe: Recipe) -> nn.Module:
    lora = recipe.model.lora
    assert lora is not None
    task = "CAUSAL_LM" if model.can_generate() else None
    if saved := saved_adapter(lora):
        return open_adapter(adapted(model, saved, recipe.model.path, task=task))
    sees = any(re.fullmatch(_VISION, name) for name, _ in model.named_modules())
    exclude = _VISION if not lora.targets and sees else None
    names = sorted({n.rpartition(".")[2] for n, m in model.named_modules() if isinstance(m, nn.Linear)})
    policy = new_adapter(
        model, recipe, LORA_TARGETS, f"Its linear layers are called {', '.join(names)}.", exclude, task
    )
    return open_adapter(policy).eval()  # a new layer is in training mode

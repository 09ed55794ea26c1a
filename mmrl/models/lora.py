"""Go on with a saved LoRA adapter."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from types import MethodType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from mmrl.config.adapters import SavedAdapter, Settings, read_adapter
from mmrl.config.schema import Lora, Recipe
from mmrl.core.errors import UserError
from mmrl.core.notices import note

_SMALL = 256
"""A rank that costs next to nothing, whatever the layers are."""

if TYPE_CHECKING:  # slow to import
    from peft import LoraConfig, PeftModel
    from peft.tuners.lora import LoraLayer

PREFIX = "base_model.model."
"""How names of weights begin in a file of peft."""
_ADAPTER = re.compile(r"\.lora_(A|B|embedding_A|embedding_B)(\.|$)")


def saved_adapter(lora: Lora) -> SavedAdapter | None:
    """What the recipe goes on with; None where its adapter begins anew. Raises ``UserError``."""
    if lora.path is None:
        return None
    try:
        return read_adapter(lora.path)
    except ValueError as error:
        raise UserError(f"model.lora.{error}") from error


def config_of(settings: Settings) -> LoraConfig:
    """Peft's settings to train with. The weights are loaded, so the kind of the first ones has no say."""
    from peft import LoraConfig

    taken = settings.model_dump(
        exclude={*(settings.model_extra or ()), "init_lora_weights", "modules_to_save"}, exclude_none=True
    )
    return LoraConfig(**taken)


Converted = tuple["LoraConfig", dict[str, Tensor]]
"""Settings, and weights by peft's names."""


def read_weights(model: nn.Module, saved: SavedAdapter) -> Converted:
    """An adapter with peft's settings. Raises ``UserError``."""
    from peft.utils import load_peft_weights

    if not saved.peft or saved.settings is None:
        raise UserError(
            f"model.lora.path: {saved.weights} has the names of a program that draws pictures, and this model writes "
            "text; give a folder that peft wrote, or remove model.lora.path"
        )
    renamed = getattr(model, "_checkpoint_conversion_mapping", None)
    state = load_peft_weights(str(saved.weights.parent), device="cpu", key_mapping=renamed)
    config, settings = config_of(saved.settings), saved.settings
    named = isinstance(settings.target_modules, list) and not settings.exclude_modules
    if not named or settings.layers_to_transform is not None or settings.r > saved.rank:
        # a pattern of a stranger may take for ever, and the names of the weights say the same
        config.target_modules = exactly(model, [n for n in modules_of(state) if _is_layer(model, n)])  # type: ignore[assignment]
        config.exclude_modules = config.layers_to_transform = config.layers_pattern = None
        config.r = min(settings.r, saved.rank)
    return config, state


def modules_of(state: Collection[str]) -> list[str]:
    """The modules that weights of the names ``state`` are for."""
    found = {name[: match.start()] for name in state if (match := _ADAPTER.search(name))}
    return sorted(name.removeprefix(PREFIX) for name in found)


def _is_layer(model: nn.Module, name: str) -> bool:
    """Whether a module, if there is one, has a weight; experts have parameters of other names."""
    try:
        return hasattr(model.get_submodule(name), "weight")
    except AttributeError:
        return not name.endswith(".base_layer")


def exactly(model: nn.Module, names: Collection[str]) -> list[str] | str:
    """What peft takes for the modules ``names`` of ``model`` and no others: it takes others too whose name ends so."""
    ends = tuple(f".{name}" for name in names)
    others = any(name.endswith(ends) and name not in names for name, _ in model.named_modules())
    return f"({'|'.join(map(re.escape, sorted(names)))})" if others else sorted(names)


def check_rank(model: nn.Module, rank: int) -> None:
    """Raises ``UserError`` for an adapter of a larger rank than any layer of ``model`` can have."""
    sizes = [
        min(layer.weight.shape[0], layer.weight[0].numel())
        for layer in model.modules()
        if isinstance(layer, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d) and layer.weight.ndim > 1
    ]
    most = max(sizes, default=0)
    if rank > max(most, _SMALL):
        raise UserError(
            f"model.lora.rank: {rank:,} is more than any layer of the model has (the widest has rank {most:,}); set it "
            "to 16 or 32, say, or remove model.lora to train all weights"
        )


def adapted(
    model: nn.Module,
    saved: SavedAdapter,
    base: str,
    read: Callable[[nn.Module, SavedAdapter], Converted] = read_weights,
    task: str | None = None,
) -> PeftModel:
    """``model`` with the saved adapter, which trains, in evaluation mode; on the meta device without its weights.

    ``base``: the recipe's name of the model. One that the adapter was not trained on gets a warning where the names say
    so. Raises ``UserError`` where the adapter does not fit.
    """
    from peft import PeftModel, get_peft_model

    config, state = read(model, saved)
    config.task_type = task
    check_rank(model, config.r)
    try:
        policy = get_peft_model(model, config)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(_wrong(saved, str(error).splitlines()[0][:300])) from error
    assert isinstance(policy, PeftModel)
    if not next(policy.parameters()).is_meta:
        for line in _said(saved, base):
            note(line)
    _load(policy, saved, state)
    if saved.scaled:
        _unscale(policy)
    return policy.eval()


def new_adapter(
    model: nn.Module,
    recipe: Recipe,
    usual: Collection[str],
    advice: str,
    exclude: str | None = None,
    task: str | None = None,
) -> PeftModel:
    """``model`` with an adapter as the recipe's ``model.lora`` says, by default on the modules ``usual``. Raises
    ``UserError``, with ``advice``, where it has none of the modules that are named."""
    from peft import LoraConfig, PeftModel, get_peft_model

    lora = recipe.model.lora
    assert lora is not None
    check_rank(model, lora.rank)
    torch.manual_seed(recipe.seed)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        init_lora_weights="gaussian" if lora.init == "gaussian" else True,
        target_modules=targets_of(model, lora.targets or usual),
        exclude_modules=exclude,
        task_type=task,
    )
    try:
        policy = get_peft_model(model, config)  # type: ignore[arg-type]
    except ValueError as error:
        raise UserError(f"model.lora.targets: {error}\n  {advice}") from error
    assert isinstance(policy, PeftModel)
    return policy


def save_adapter(policy: PeftModel, base: str, out: Path) -> None:
    """Write the adapter for ``PeftModel.from_pretrained``, of a model called ``base``."""
    policy.peft_config["default"].base_model_name_or_path = base
    # save_embedding_layers: peft would ask the hub for the base model's vocabulary, which training never changes
    policy.save_pretrained(str(out), save_embedding_layers=False)
    (out / "README.md").unlink(missing_ok=True)  # peft's empty template


def _said(saved: SavedAdapter, base: str) -> Iterator[str]:
    folder = saved.weights.parent
    if saved.base and Path(saved.base).name != Path(base).name:
        yield f"warning: the adapter {folder} says that it was trained on {saved.base}, and model.path is {base}"
    if saved.settings and saved.settings.lora_dropout:
        yield (
            f"note: the adapter {folder} has lora_dropout {saved.settings.lora_dropout}, which stays off: samples and "
            "updates are computed with the same weights"
        )


def _load(policy: PeftModel, saved: SavedAdapter, state: dict[str, Tensor]) -> None:
    """Raises ``UserError`` where the weights do not fit."""
    from peft.utils import set_peft_model_state_dict

    whole = {name for name in state if not _ADAPTER.search(name)}
    heads = tuple(f"{PREFIX}{name}." for name in (saved.settings and saved.settings.modules_to_save) or ())
    taken = {name for name in whole if name.startswith(heads) and _is_head(policy, name, state[name])}
    changed = sorted(name for name in whole - taken if not _is_of_base(policy, name, state[name]))
    if changed:
        raise UserError(
            f"model.lora.path: the adapter {saved.weights} changes {changed[0]} of the base model, and a plain LoRA "
            "goes on; merge it into its base model (peft's merge_and_unload) and set model.path to that, or remove "
            "lora.path, and a new adapter is trained"
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")  # a plan has no weights
            result = set_peft_model_state_dict(policy, {k: v for k, v in state.items() if k not in whole})
    except (RuntimeError, KeyError, ValueError) as error:  # of another shape
        raise UserError(_wrong(saved, str(error).splitlines()[-1].strip()[:300])) from error
    wrong = [*result.unexpected_keys, *(key for key in result.missing_keys if "lora_" in key)]
    if wrong:
        raise UserError(_wrong(saved, f"{len(wrong)} weights have no counterpart, such as {wrong[0]}"))


def _is_head(policy: PeftModel, name: str, tensor: Tensor) -> bool:
    """Whether the weight of a head, which an adapter's file has whole, is one of the model's; it gets it then."""
    own = dict(policy.get_base_model().named_parameters()).get(name.removeprefix(PREFIX))
    if own is None or own.shape != tensor.shape:
        return False
    own.data = own.data if own.is_meta else tensor.to(own.device)
    return True


def _is_of_base(policy: PeftModel, name: str, tensor: Tensor) -> bool:
    """Whether a weight in an adapter's file (peft saves embeddings that have an adapter) is the base model's own."""
    path, _, of = name.removeprefix(PREFIX).replace(".base_layer.", ".").rpartition(".")
    try:
        module = policy.get_base_model().get_submodule(path)
    except AttributeError:
        return False
    own = getattr(getattr(module, "base_layer", module), of, None)
    if not isinstance(own, Tensor) or own.shape != tensor.shape:
        return False
    return own.is_meta or bool((own.cpu() == tensor.to(own.dtype)).all())


def lora_layers(policy: PeftModel) -> Iterator[tuple[str, LoraLayer]]:
    """The layers with an adapter, by their names in the plain model."""
    from peft.tuners.lora import LoraLayer

    for name, layer in policy.get_base_model().named_modules():
        if isinstance(layer, LoraLayer):
            yield name, layer


def open_adapter(policy: PeftModel) -> PeftModel:
    """Keep the weights of the adapter in float32, and multiply by copies of them in the dtype of what a layer is given.

    Each pass makes the copies anew, and its gradients are added in float32. peft itself would turn the input of every
    layer into float32, and multiply in that.
    """
    for parameter in policy.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()
    for _, layer in lora_layers(policy):
        layer.cast_input_dtype_enabled = False
        for part in (*layer.lora_A.values(), *layer.lora_B.values()):
            part.forward = MethodType(_in_dtype_of_input, part)
    return policy


def _in_dtype_of_input(part: nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d, given: Tensor) -> Tensor:
    weight = part.weight.to(given.dtype)  # without a bias, which no plain LoRA has
    if isinstance(part, nn.Linear):
        return linear(given, weight)
    return part._conv_forward(given, weight, None)  # pyright: ignore[reportPrivateUsage]


def targets_of(model: nn.Module, targets: Collection[str]) -> list[str] | str:
    """What ``model.lora.targets`` says, as peft takes it: ``all-linear`` alone is every linear layer but the head."""
    if list(targets) != ["all-linear"]:
        return list(targets)
    from transformers import PreTrainedModel

    if isinstance(model, PreTrainedModel):
        return "all-linear"
    return sorted(name for name, module in model.named_modules() if isinstance(module, nn.Linear))


def _unscale(policy: PeftModel) -> None:
    """Take the scale out of weights that have it, since the settings have it too."""
    for _, layer in lora_layers(policy):
        layer.lora_B["default"].weight.data /= layer.scaling["default"]


def _wrong(saved: SavedAdapter, why: str) -> str:
    return (
        f"model.lora.path: the adapter {saved.weights} does not fit the model: {why}. Set model.path to the model that "
        "it was trained on"
    )

"""The weights of a module with its adapters merged, as copies: for export and for other engines."""

from __future__ import annotations

from torch import Tensor, nn


def merged_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights of ``module`` under the names of its plain class; adapters are added in float32, on copies."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    state = module.state_dict()
    layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, BaseTunerLayer)}
    for name, layer in layers.items():
        if name.removesuffix(".base_layer") in layers and name.endswith(".base_layer"):
            continue  # peft wraps a layer of experts once for each of its parameters
        wrappers = [layer, *(inner for other, inner in layers.items() if _is_within(other, name))]
        for key in [k for k in state if k.startswith(f"{name}.")]:
            del state[key]
        for key, value in layer.get_base_layer().state_dict().items():
            state[f"{name}.{key}"] = value
        for one in wrappers:
            key = f"{name}.{getattr(one, 'parameter_name', 'weight')}"
            for adapter in one.active_adapters:
                delta: Tensor = one.get_delta_weight(adapter)  # type: ignore[operator]
                state[key] = state[key].float() + delta.float()
    return state


def _is_within(name: str, outer: str) -> bool:
    """Whether a wrapper called ``name`` is inside the one called ``outer``."""
    rest = name.removeprefix(outer)
    return rest != "" and rest == ".base_layer" * rest.count(".base_layer") and name.startswith(outer)

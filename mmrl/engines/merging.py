"""The weights of a module with its adapters merged, as copies: for export and for other engines."""

from __future__ import annotations

from torch import Tensor, nn


def merged_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights of ``module`` under the names of its plain class; adapters are added in float32, on copies."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    state = module.state_dict()
    for name, layer in module.named_modules():
        if isinstance(layer, BaseTunerLayer):
            for key in [k for k in state if k.startswith(f"{name}.")]:
                del state[key]
            for key, value in layer.get_base_layer().state_dict().items():
                state[f"{name}.{key}"] = value
            for adapter in layer.active_adapters:
                delta: Tensor = layer.get_delta_weight(adapter)  # type: ignore[operator]
                state[f"{name}.weight"] = state[f"{name}.weight"].float() + delta.float()
    return state

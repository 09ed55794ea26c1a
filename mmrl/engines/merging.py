"""The weights of a module with its adapters merged, as copies: for export and for other engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:  # slow to import
    from peft.tuners.tuners_utils import BaseTunerLayer


def merged_weights(module: nn.Module) -> dict[str, Tensor]:
    """The weights of ``module`` under the names of its plain class; adapters are added in float32, on copies."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    state = module.state_dict()
    inner: set[nn.Module] = set()
    for name, layer in module.named_modules():
        if not isinstance(layer, BaseTunerLayer) or layer in inner:
            continue
        wrappers = list(_wrappers(layer))
        inner.update(wrappers)
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


def _wrappers(layer: nn.Module) -> Iterator[BaseTunerLayer]:
    """The layer and those that it wraps: peft adds one for each parameter of a layer of experts."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    while isinstance(layer, BaseTunerLayer):
        yield layer
        layer = layer.base_layer

"""Stop a run whose trained weights get no gradient: they would stay as they are, and nothing else would show it.

A kernel without a backward, a layer whose output is dropped and a model that was replaced after its adapter was made
all train without an error.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from mmrl.core.errors import UserError, first_of

_EXCUSED = "weights_without_gradient"
_PART = re.compile(
    r"(?:^|.*\.)(?:experts\.\d+|transformer_\d+|visual|vision_\w+|audio_\w+|multi_modal_projector|connector)(?=\.)"
)
"""How the names of weights begin that no row may need: an expert, one of two models, an encoder of pictures."""
_NAMED = 4


def excuse(module: nn.Module, parts: Mapping[str, str]) -> None:
    """Say which weights of ``module`` get no gradient by its architecture: parts of their names, whole between dots,
    each with the reason. A module around it excuses them too."""
    setattr(module, _EXCUSED, dict(parts))


class GradientCheck:
    """Final class: every trained weight of ``module`` has a gradient in the first update that needs it, of ``names``,
    those that this rank steps on. A gradient of zeros counts.

    What no row of an update may need (an expert, an encoder of pictures) is checked in the first update in which any of
    its weights has a gradient. What ``excuse`` named is not checked.
    """

    def __init__(self, module: nn.Module, names: Iterable[str]) -> None:
        excused = {part for one in module.modules() for part in getattr(one, _EXCUSED, ())}
        self._left: dict[str, list[str]] = {}
        for name in names:
            if not any(f".{part}." in f".{name}." for part in excused):
                found = _PART.match(name)
                self._left.setdefault(found[0] if found else "", []).append(name)

    def check(self, gradients: Mapping[str, Tensor | None], *, rows: bool) -> None:
        """Look at the summed ``gradients`` of an update. ``rows``: whether this rank computed any.

        Raises ``UserError`` that names the weights without one.
        """
        if not self._left:
            return
        lacks = {part: [name for name in of if gradients[name] is None] for part, of in self._left.items()}
        met = [part for part, of in self._left.items() if len(lacks[part]) < len(of)]
        if not met:
            if rows and all(gradient is None for gradient in gradients.values()):
                raise UserError(_all(sum(map(len, lacks.values())), next(iter(lacks.values()))[0]))
            return
        if missing := [name for part in met for name in lacks[part]]:
            raise UserError(_some(missing, sum(len(self._left[part]) for part in met)))
        for part in met:
            del self._left[part]


def _some(missing: list[str], of: int) -> str:
    adapters = any(".lora_" in name for name in missing)
    edit = (
        "give model.lora.targets a list without these layers"
        if adapters
        else "name these modules in model.freeze (pictures: set model.lora, with targets that leave them out)"
    )
    return (
        f"model: {len(missing)} of {of} trained weights have no gradient after the first backward pass, so they would "
        f"never learn: {first_of(missing, _NAMED)}. The model drops what these layers compute, or a kernel of theirs "
        f"has no backward pass. If the model should not read them, {edit}; an adapter of your own names them in "
        "weights_without_gradient"
    )


def _all(count: int, one: str) -> str:
    return (
        f"model: none of {count} trained weights (such as {one}) has a gradient after the first backward pass, so the "
        "run would learn nothing: a kernel of the frozen layers has no backward pass, or the model was replaced after "
        "its adapter was made. Remove what replaces layers (model.quantize, performance.compile, "
        "performance.attention), one after another"
    )

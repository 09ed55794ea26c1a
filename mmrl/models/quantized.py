"""A frozen base in 8 or 4 bits under LoRA (QLoRA, Dettmers et al. 2023, arXiv 2305.14314), and text encoders beside it.

torchao makes int8 and fp8, bitsandbytes makes nf4. The product with them is done here, the same way for all three,
with and without a gradient, in sampling, replay and training. Tensors of torchao leave every weight that they
dequantised in the graph until the backward pass, which takes the memory that they save; and a layer of bitsandbytes
may be repacked in its first forward into a form without gradients (on a CPU with bfloat16 instructions).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from mmrl.config.model import Quantize
from mmrl.core.errors import UserError
from mmrl.core.installing import install
from mmrl.models.sharded import blocks

BLOCK = 64
"""Weights of nf4 that share a scale (bitsandbytes' default)."""
NEEDS = {"int8": ("torchao", "quantize"), "fp8": ("torchao", "quantize"), "nf4": ("bitsandbytes", "bitsandbytes")}
"""The package of each kind, and the extra that has it."""
_COMPUTES = {"int8": ("cpu", "cuda", "xpu", "mps"), "fp8": ("cpu", "cuda", "xpu"), "nf4": ("cpu", "cuda", "xpu")}


def refusals(kind: Quantize | None, device: str) -> Iterator[str]:
    """What is missing here for ``model.quantize: kind`` on a ``device`` of torch's type, each with the edit that mends
    it."""
    if kind is None:
        return
    if lacks := _lacks(kind):
        yield lacks
    if device not in _COMPUTES[kind]:
        yield f"model.quantize: {kind} has no kernels for {device}; remove model.quantize"


def _lacks(kind: Quantize) -> str | None:
    package, extra = NEEDS[kind]
    if find_spec(package) is not None:
        return None
    return f"model.quantize: {kind} is of {package}, which is not here; {install(extra)}, or remove model.quantize"


def quantize(model: nn.Module, kind: Quantize) -> None:
    """Replace the linear layers in the blocks of ``model`` by quantised ones, in place. Embeddings, norms, the head and
    what is no linear layer (convolutions, experts that are one tensor) stay as they are.

    On the meta device the layers have their sizes and no values. Raises ``UserError`` where there is nothing to
    quantise, or without the package of ``kind``, which sizes of int8 and fp8 do not need.
    """
    if (lacks := _lacks(kind)) and (kind == "nf4" or not next(model.parameters()).is_meta):
        raise UserError(lacks)
    count = 0
    for block in blocks(model):
        for parent in list(block.modules()):
            for name, child in list(parent.named_children()):
                if type(child) is nn.Linear:  # a subclass may read its weights in another way
                    setattr(parent, name, QuantizedLinear(child, kind))
                    count += 1
    if not count:
        raise UserError(
            f"model.quantize: {type(model).__name__} has no linear layers in its blocks to quantise (it may be "
            "quantised already, or have its layers under names of its own); remove model.quantize"
        )


def saved(model: nn.Module, kind: Quantize) -> int:
    """Bytes of memory that ``quantize`` would save of ``model``, which may have a LoRA, while its largest layer is
    dequantised."""
    layers = {id(layer): layer for block in blocks(model) for layer in block.modules() if type(layer) is nn.Linear}
    weights = [layer.weight for layer in layers.values() if not layer.weight.requires_grad]
    packed = [made for weight in weights for made in _sizes_of(weight.detach().to("meta"), kind)]
    before = [weight.nbytes for weight in weights]
    return sum(before) - sum(made.nbytes for made in packed) - max(before, default=0)


def quantized_layers(model: nn.Module) -> list[QuantizedLinear]:
    """The layers of ``model`` that are quantised."""
    return [module for module in model.modules() if isinstance(module, QuantizedLinear)]


class QuantizedLinear(nn.Linear):
    """Final class: ``layer``, frozen, with its weights as ``kind``. It computes in the dtype of its input.

    ``packed``: the weights, ``[N, K]`` in 8 bits, or two in a byte, ``[count / 2, 1]``, where their ``count`` is filled
    up to a multiple of 64. ``scale``: float32, ``[N, 1]`` of the rows, or of each 64 weights.
    """

    packed: Tensor
    scale: Tensor

    def __init__(self, layer: nn.Linear, kind: Quantize) -> None:
        nn.Module.__init__(self)  # nn.Linear would make a weight
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.kind, self.dtype = kind, layer.weight.dtype
        packed, scale = _packed(layer.weight.detach(), kind)
        self.register_buffer("packed", packed)
        self.register_buffer("scale", scale)
        self.bias = layer.bias
        self.train(layer.training)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weights ``[N, K]`` in the dtype that they had, dequantised for each who asks: a copy."""
        return self.dequantized(self.dtype)

    def dequantized(self, dtype: torch.dtype) -> Tensor:
        """The weights ``[N, K]``."""
        if self.kind != "nf4":
            return self.packed.to(dtype).mul_(self.scale)
        from bitsandbytes.functional import QuantState, dequantize_4bit  # type: ignore[import-not-found]

        shape = torch.Size((len(self.scale), BLOCK))
        state = QuantState(self.scale, shape, dtype=dtype, blocksize=BLOCK, quant_type="nf4")
        count = self.out_features * self.in_features
        return dequantize_4bit(self.packed, state).flatten()[:count].view(self.out_features, self.in_features)

    def forward(self, input: Tensor) -> Tensor:
        return _Product.apply(input, self)  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.kind}"


class _Product(torch.autograd.Function):
    """What a linear layer computes; the backward pass dequantises again, so that the graph keeps no weights."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, layer: QuantizedLinear) -> Tensor:
        ctx.layer = layer
        return linear(given, layer.dequantized(given.dtype), layer.bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None]:
        (gradient,) = gradients
        return (gradient @ ctx.layer.dequantized(gradient.dtype) if ctx.needs_input_grad[0] else None), None


def _packed(weight: Tensor, kind: Quantize) -> tuple[Tensor, Tensor]:
    """Weights ``[N, K]`` packed, and their scales."""
    if weight.is_meta:
        return _sizes_of(weight, kind)
    if kind == "nf4":
        from bitsandbytes.functional import quantize_4bit  # type: ignore[import-not-found]

        # in rows of 64: of other widths bitsandbytes' kernel for a CPU reads wrong scales, or compiles for each shape
        rows = pad(weight.flatten(), (0, -weight.numel() % BLOCK)).view(-1, BLOCK)
        packed, state = quantize_4bit(rows, blocksize=BLOCK, quant_type="nf4")
        return packed, state.absmax
    import torchao.quantization as library  # type: ignore[import-not-found]

    config = library.Int8WeightOnlyConfig if kind == "int8" else library.Float8WeightOnlyConfig
    holder = nn.Sequential(nn.Linear(1, 1, bias=False, device="meta"))
    holder[0].weight = nn.Parameter(weight, requires_grad=False)  # type: ignore[union-attr]
    library.quantize_(holder, config(set_inductor_config=False))  # its settings would be those of the whole process
    made: Any = holder[0].weight
    return made.qdata, made.scale


def _sizes_of(weight: Tensor, kind: Quantize) -> tuple[Tensor, Tensor]:
    """``_packed`` of weights without values."""
    if kind == "nf4":
        rows = math.ceil(weight.numel() / BLOCK)
        return (
            weight.new_empty(rows * BLOCK // 2, 1, dtype=torch.uint8),
            weight.new_empty(rows, dtype=torch.float32),
        )
    dtype = torch.int8 if kind == "int8" else torch.float8_e4m3fn
    return torch.empty_like(weight, dtype=dtype), weight.new_empty(len(weight), 1, dtype=torch.float32)

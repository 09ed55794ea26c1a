"""Keys and values of a fixed number of rows, each token at a fixed place. transformers' ``StaticCache`` is that for
rows that all have as many tokens; here they begin and end when they like.

Token ``n`` of a row is in column ``n`` of its slot. What is computed of a row has then the same shapes and places
whoever is beside it, and whenever it came: its bits depend on itself alone. Nothing is moved or made while tokens are
drawn, so that a step can be recorded once and replayed (CUDA graphs).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, pad, scaled_dot_product_attention, sigmoid, silu
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from mmrl.models.text.base_model import base_model

FAMILIES = (
    *("cohere", "gemma", "glm4", "granite", "llama", "mistral", "olmo2", "phi3", "qwen2", "qwen3", "qwen3_moe"),
    *("smollm3", "starcoder2", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "smolvlm", "idefics3"),
)
"""The types of models that a test compares with rows alone."""
_NAME, _SETTING = "mmrl_fixed", "_attn_implementation"
"""Of attention, and where transformers' models look for it."""


def refusal(policy: nn.Module) -> str:
    """Why rows of this model cannot be at fixed places; empty where they can."""
    model = base_model(policy)
    if model.config.model_type not in FAMILIES:
        return f"models of type {model.config.model_type} are not among those tested ({', '.join(FAMILIES)})"
    layers = DynamicCache(config=model.config.get_text_config(decoder=True)).layers
    if not layers or any(type(layer) is not DynamicLayer for layer in layers):
        return "its layers do not keep keys and values of all tokens: some have a window or a state"
    return ""


def can_be_recorded(policy: nn.Module) -> bool:
    """Whether a step of the model asks nothing of the host."""
    model = base_model(policy)
    rope = getattr(model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    return bool(getattr(model, "_can_compile_fullgraph", False)) and rope.get("rope_type") not in (
        "dynamic",
        "longrope",
    )


class _Layer(CacheLayerMixin):
    """Keys and values ``[slots, heads, length, size]`` of a layer."""

    is_compileable, is_sliding = True, False

    def __init__(self, cache: FixedCache, keys: Tensor, values: Tensor) -> None:
        super().__init__()
        self.of, self.keys, self.values, self.is_initialized = cache, keys, values, True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None: ...

    def update(self, key_states: Tensor, value_states: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Puts one token of each row in its place, and returns the columns that any row has."""
        assert self.keys is not None
        assert self.values is not None
        rows, width = self.of.rows, self.of.width
        at = self.of.slots[:rows], slice(None), self.of.places[:rows]
        self.keys[at] = key_states[:, :, 0].to(self.keys.dtype)
        self.values[at] = value_states[:, :, 0].to(self.values.dtype)
        return self.keys[:rows, :, :width], self.values[:rows, :, :width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.of.width, 0

    def get_seq_length(self) -> int:
        return self.of.width - 1

    def get_max_length(self) -> int:
        return self.of.width


class FixedCache(Cache):
    """Final class. ``places`` ``[slots]``: the column of each row's newest token; ``width``: the columns that are
    looked at; ``rows``: the slots that are, the first ones. ``like``: a cache of the same model, for the sizes of
    its layers; ``dtype``: None for theirs. Under autocast it is what attention computes in: the same numbers, and
    none is cast again for every token."""

    def __init__(self, like: Cache, slots: int, length: int, dtype: torch.dtype | None) -> None:
        layers = list[Any]()
        for of in like.layers:
            found: Sequence[Tensor] = [cast("Any", of).keys, cast("Any", of).values]
            made = [t.new_zeros(slots, t.shape[1], length, t.shape[3], dtype=dtype) for t in found]
            layers.append(_Layer(self, *made))
        super().__init__(layers=layers)
        device = cast("Any", like.layers[0]).keys.device
        self.slots = torch.arange(slots, device=device)
        self.places = torch.zeros(slots, dtype=torch.long, device=device)
        self.length, self.width, self.rows = length, length, slots

    def put(self, slots: Tensor, of: Cache, row: int, tokens: int) -> None:
        """Have ``slots`` begin with the last ``tokens`` of a ``row`` of another cache. What others left is taken out:
        a number that is none would come through where it is not looked at."""
        for mine, theirs in zip(self.layers, of.layers, strict=True):
            for name in ("keys", "values"):
                found = getattr(theirs, name)[row, :, -tokens:]
                kept = getattr(mine, name)
                kept[slots] = pad(found, (0, 0, 0, self.length - tokens)).to(kept.dtype)

    def grow(self, length: int) -> None:
        """Room for rows of ``length`` tokens."""
        for layer in self.layers:
            for name in ("keys", "values"):
                setattr(layer, name, pad(getattr(layer, name), (0, 0, 0, length - self.length)))
        self.length = length


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    """Attention of one token of each row; ``attention_mask``: ``[B, 1, 1, width]`` bool.

    Queries that share keys are computed together, as if they were tokens, and no key is copied for them: transformers
    repeats all keys and values beside a mask. On a CPU in float32 the products of several queries are summed in an
    order that depends on the width, and so on the neighbours; there each query is computed alone.
    """
    if any(given.get(name) is not None for name in ("s_aux", "softcap", "position_bias")):
        raise TypeError(f"{type(module).__name__} asks for more of attention than rows at fixed places have")
    rows, heads, _, size = query.shape
    own = key.shape[1]
    if key.dtype == torch.float32 and key.device.type == "cpu":
        found = scaled_dot_product_attention(
            query, key, value, attn_mask=attention_mask, scale=scaling, enable_gqa=heads != own
        )
    else:
        found = scaled_dot_product_attention(
            query.reshape(rows, own, heads // own, size), key, value, attn_mask=attention_mask, scale=scaling
        )
    return found.reshape(rows, 1, heads, -1), None


AttentionInterface.register(_NAME, _attend)

_ACTIVATIONS = frozenset({silu, gelu, sigmoid, torch.sigmoid, Tensor.sigmoid})
"""Those that torch computes on a CPU by another formula where fewer numbers are left than it takes at once."""


class _RowByRow(TorchFunctionMode):
    """Inside, activations of several rows are computed row by row. On a CPU torch computes the last numbers of a
    tensor, and of the part of each thread, by another formula; which rows have them would depend on their slots."""

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _ACTIVATIONS or not args or args[0].ndim < 2 or args[0].shape[:-1].numel() == 1:
            return func(*args, **kwargs)
        given, *others = args
        rows = given.reshape(-1, given.shape[-1])
        return torch.stack([func(row, *others, **kwargs) for row in rows]).view(given.shape)


@contextmanager
def attending(policy: nn.Module) -> Generator[None]:
    """Inside the block, ``policy`` reads one token of each row over a ``FixedCache``."""
    model = base_model(policy)
    config = model.config.get_text_config(decoder=True)
    before = getattr(config, _SETTING)
    setattr(config, _SETTING, _NAME)
    try:
        with _RowByRow() if model.device.type == "cpu" else nullcontext():
            yield
    finally:
        setattr(config, _SETTING, before)


def halves(policy: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights that autocast would cast for every product, cast once; norms and embeddings stay as they are."""
    products = [(name, module) for name, module in policy.named_modules() if type(module) is nn.Linear]
    found = [(f"{name}.{of}", p) for name, module in products for of, p in module.named_parameters(recurse=False)]
    return {name: p.detach().to(dtype) for name, p in found if p.dtype == torch.float32}

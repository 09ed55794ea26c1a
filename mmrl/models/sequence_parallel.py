"""Sequence parallelism: ranks that share a sample of a denoiser, each with a part of its tokens.

What diffusers says of the model's class (``_cp_plan``) is followed: which inputs are cut into ``N`` equal parts of
tokens, and behind which layer the parts are put together again. In attention the ranks exchange queries, keys and
values: there each has all tokens of an ``N``-th of the heads (DeepSpeed-Ulysses, arXiv 2309.14509), which diffusers
computes. Everything else but the layers before the cut is of this rank's tokens alone.

All ranks come to the same prediction and the same loss. The backward pass of what puts parts together takes a rank's
own part, so that the gradients of ranks add up to that of one rank with all tokens: they are summed, not averaged.

Departs from diffusers: ``enable_parallelism`` asks for an accelerator, so the parts of it are called here; a length
that the ranks do not divide is an error that names the edit.
"""

# diffusers' attention reads fields that its ``enable_parallelism`` sets, and asks for an accelerator first.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from mmrl.core.errors import UserError, refuse
from mmrl.models.context_parallel import Group, Imagined, Ranks, plain
from mmrl.models.weights import Around, Weights

CHECKED = (
    "WanTransformer3DModel",
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "QwenImageTransformer2DModel",
)
"""The classes of diffusers whose plan was compared with one rank: velocities and gradients."""
WRONG = {"LTX2VideoTransformer3DModel": "diffusers' plan for it cuts positions and text wrongly"}
_TEXT = ("encoder_hidden_states", "encoder_hidden_states_mask", "txt_ids", 1)
"""Inputs in plans that are of text, and the output of Qwen-Image's layer of positions that is."""
_REMOVE = "remove train.context_parallel"


class InSequence(Around):
    """Final class; see ``mmrl.models.weights.Weights``. ``weights``, as they lie on all ranks, of a denoiser ``module``
    of which ``size`` neighbours share each sample, in sampling too. All ranks construct it together.

    Raises ``UserError`` where ``module`` cannot be cut.
    """

    def __init__(self, module: nn.Module, weights: Weights, size: int) -> None:
        refuse(refusals(module, size))
        super().__init__(weights, size)
        self._cut = Cut(module, Group(size))

    def unsharded(self) -> AbstractContextManager[None]:
        return self._weights.unsharded()  # a sample takes all ranks that share it


class Cut:
    """Final class: until it is closed, a forward of the denoiser ``module`` is of this rank's tokens, and of all ranks
    that share a sample together. With ranks that are ``Imagined`` its attention is of this rank's tokens and all heads,
    which keeps as many bytes."""

    def __init__(self, module: nn.Module, ranks: Ranks) -> None:
        self.ranks, self.tokens = ranks, 0
        """``tokens``: of a sample, in the last forward."""
        base = plain(module)
        self._handles = [handle for path, how in _plan(base).items() for handle in self._hooks(base, path, how)]
        layers = [] if isinstance(ranks, Imagined) else [*_attention(base)]
        self._handles += [norm.register_forward_hook(_halved) for layer in layers for norm in _norms(layer)]
        self._processors = [layer.processor for layer in layers]
        config = _config(ranks) if isinstance(ranks, Group) else None
        for processor in self._processors:
            processor._parallel_config = config

    def close(self) -> None:
        """Compute all tokens again."""
        for handle in self._handles:
            handle.remove()
        for processor in self._processors:
            processor._parallel_config = None

    def _hooks(self, base: nn.Module, path: str, how: Any) -> Iterator[Any]:
        for module in _at(base, path.split(".") if path else []):
            if not isinstance(how, Mapping):
                yield module.register_forward_hook(partial(self._gathered, how))
                continue
            inputs = {name: one for name, one in how.items() if not one.split_output}
            outputs = {name: one for name, one in how.items() if one.split_output}
            if inputs:
                cut = partial(self._cut_inputs, inputs, inspect.signature(type(module).forward))
                yield module.register_forward_pre_hook(cut, with_kwargs=True)
            if outputs:
                yield module.register_forward_hook(partial(self._cut_outputs, outputs))

    def _cut_inputs(
        self,
        inputs: Mapping[str, Any],
        signature: inspect.Signature,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        bound = signature.bind(module, *args, **kwargs)
        for name, how in inputs.items():
            if (value := bound.arguments.get(name)) is not None:
                bound.arguments[name] = self._part(value, how, name)
        return bound.args[1:], bound.kwargs

    def _cut_outputs(self, outputs: Mapping[int, Any], _: nn.Module, args: Any, out: Any) -> Any:
        return tuple(self._part(one, outputs[n], n) if n in outputs else one for n, one in enumerate(out))

    def _gathered(self, how: Any, _: nn.Module, args: Any, out: Tensor) -> Tensor:
        whole: Tensor = _Whole.apply(out, how.gather_dim, self.ranks)  # type: ignore[assignment]
        self.tokens = whole.shape[how.gather_dim]
        return whole

    def _part(self, whole: Tensor, how: Any, name: str | int) -> Tensor:
        """This rank's part of the tokens of ``whole``. Raises ``UserError``."""
        if how.expected_dims is not None and whole.ndim != how.expected_dims:
            assert name == "timestep", f"{name} has the shape {tuple(whole.shape)}"  # one for all tokens
            return whole
        size, length = self.ranks.size, whole.shape[how.split_dim]
        if length % size:
            raise UserError(_uneven(length, size, text=name in _TEXT))
        return whole.chunk(size, how.split_dim)[self.ranks.rank]


class _Whole(torch.autograd.Function):
    """All tokens, of those that each rank has."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, dim: int, ranks: Ranks) -> Tensor:  # type: ignore[override]
        ctx.dim, ctx.ranks = dim, ranks
        return torch.cat([*ranks.gather(mine)], dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return grad.chunk(ctx.ranks.size, ctx.dim)[ctx.ranks.rank], None, None


def _uneven(length: int, size: int, *, text: bool) -> str:
    fits = gcd(length, size)
    fewer = f"set train.context_parallel to {fits}" if fits > 1 else _REMOVE
    if text:
        why, more = "tokens of a prompt", f"set sampling.max_sequence_length to {-(-length // size) * size}, or "
    else:
        why, more = "tokens of a picture or clip", ""
    return f"train.context_parallel: {size} devices do not divide {length:,} {why} into equal parts; {more}{fewer}"


def _config(ranks: Group) -> Any:
    """What diffusers' attention reads of a group of ranks."""
    from diffusers import ContextParallelConfig, ParallelConfig
    from torch.distributed.device_mesh import DeviceMesh

    device = "cuda" if "nccl" in str(torch.distributed.get_backend(ranks.group)) else "cpu"
    config = ContextParallelConfig(ulysses_degree=ranks.size)
    config._rank, config._world_size = ranks.rank, ranks.size
    config._ulysses_mesh = DeviceMesh.from_group(ranks.group, device)
    return ParallelConfig(context_parallel_config=config)


def _plan(base: nn.Module) -> Mapping[str, Any]:
    return getattr(base, "_cp_plan", None) or {}


def _at(module: nn.Module, path: Sequence[str]) -> Iterator[nn.Module]:
    """The modules at a path of names, of which ``*`` stands for all."""
    if not path:
        yield module
        return
    first, *rest = path
    for name, child in module.named_children():
        if first in (name, "*"):
            yield from _at(child, rest)


def _attention(base: nn.Module) -> Iterator[Any]:
    """The layers of attention that diffusers can divide."""
    return (module for module in base.modules() if hasattr(getattr(module, "processor", None), "_parallel_config"))


def _norms(layer: nn.Module) -> Iterator[nn.Module]:
    """Those of queries and keys."""
    names = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")
    return (norm for norm in (getattr(layer, name, None) for name in names) if isinstance(norm, nn.Module))


def _halved(_: nn.Module, args: Any, out: Tensor) -> Tensor:
    """What a norm returns, in the dtype of autocast: attention is computed again in the backward pass, where there is
    none, from queries, keys and values as they came."""
    kind = out.device.type
    return out.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else out


def refusals(module: nn.Module, size: int) -> Iterator[str]:
    """Why ``size`` ranks cannot share the samples of ``module``, with the edit that mends it."""
    if size == 1:
        return
    base = plain(module)
    name = next(c.__name__ for c in type(base).__mro__ if not c.__name__.startswith("FSDP"))  # FSDP2 derives a class
    if name in WRONG or not _plan(base) or name not in CHECKED:
        why = "diffusers has no context-parallel plan for it" if not _plan(base) else "its plan was not compared"
        yield (
            f"train.context_parallel: no samples of a {name} are divided among devices: {WRONG.get(name, why)}; "
            f"{_REMOVE}, or take another pipeline (diffusion/wan, diffusion/flux, diffusion/flux2_klein or "
            "diffusion/qwen_image)"
        )
        return
    heads = base.config["num_attention_heads"]
    if heads % size:
        fits = gcd(heads, size)
        yield (
            f"train.context_parallel: {size} devices do not divide the {heads} attention heads of this {name}, of "
            "which each takes as many (Ulysses; ring attention, which leaves them whole, is not supported); "
            + (f"set train.context_parallel to {fits}" if fits > 1 else _REMOVE)
        )
    if (other := _backend(base)) is not None:
        yield (
            f"train.context_parallel: attention by {other} was not checked on divided samples; unset the variable "
            f"DIFFUSERS_ATTN_BACKEND, or {_REMOVE}"
        )


def _backend(base: nn.Module) -> str | None:
    """The back end of diffusers' attention, if it is not ``native``."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    active = _AttentionBackendRegistry.get_active_backend()[0]
    named = {getattr(layer.processor, "_attention_backend", None) or active for layer in _attention(base)}
    return next((name for name in sorted(str(getattr(one, "value", one)) for one in named) if name != "native"), None)

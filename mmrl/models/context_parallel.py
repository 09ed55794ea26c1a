"""Context parallelism: ranks that share a row, each with a part of its tokens.

A row is cut into ``2 N`` pieces of equal length, and rank ``r`` of ``N`` has the pieces ``r`` and ``2 N - 1 - r``: then
causal attention is as much work for each (Llama 3, arXiv 2407.21783, section 3.3.2, as is the gathering of keys and
values). Everything but attention is of single tokens. Attention has the queries of this rank's tokens and the keys and
values of all, which are gathered for it, and again for its backward pass, so that what a layer keeps is this rank's.

What is cut is the forward of a Hugging Face decoder, through the attention that the library lets one name. Of a model
that sees it is the forward of the decoder inside: every rank reads all pictures of its rows, and cuts what they became.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad, scaled_dot_product_attention

from mmrl.core.errors import UserError, refuse
from mmrl.models.text.likelihood import token_log_probs
from mmrl.models.weights import Around, Weights, outermost, probe

_NAME = "mmrl_context"
"""Of the attention, where the library looks it up."""
_ROWS = 256
"""Queries that are computed at once: their mask is all there is of ``[S, S]``."""
_TOLERANCE, _IN_HALF = 1e-3, 0.3
"""By how much log-probs may differ from those of whole rows; float32 parts by 1e-6."""
_PATIENCE = timedelta(days=1)
"""As in ``mmrl.controller.peers``."""
SEEING = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "idefics3")
"""The types of models that see of which rows are cut: their decoders are causal over pictures too."""


class Group:
    """Final class: neighbours, ``size`` of them, as a group of ``torch.distributed``. All ranks construct it together,
    or name a ``group`` that there is."""

    def __init__(self, size: int, group: Any = None) -> None:
        self.size = size
        self.group: Any = group or dist.new_subgroups(size, timeout=_PATIENCE)[0]
        self.rank = dist.get_rank(self.group)

    def gather(self, mine: Tensor) -> Tensor:
        """``[size, ...]`` of what each has, ``[...]``."""
        out = mine.new_empty(self.size, *mine.shape)
        dist.all_gather(list(out), mine.contiguous(), group=self.group)
        return out

    def add(self, parts: Tensor) -> Tensor:
        """``[...]``: this rank's part of ``[size, ...]``, added over all."""
        out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        dist.reduce_scatter(out, list(parts.contiguous()), group=self.group)
        return out

    def sum(self, values: Tensor) -> Tensor:
        """``values``, added in place over all."""
        dist.all_reduce(values, group=self.group)
        return values


class Imagined:
    """Final class: the first of ``size`` ranks that are not there. What they have is as large as what it has, which is
    enough to count memory."""

    rank = 0

    def __init__(self, size: int) -> None:
        self.size = size

    def gather(self, mine: Tensor) -> Tensor:
        return mine.unsqueeze(0).repeat(self.size, *[1] * mine.ndim)

    def add(self, parts: Tensor) -> Tensor:
        return parts.sum(0)

    def sum(self, values: Tensor) -> Tensor:
        return values


Ranks = Group | Imagined
"""Those that share a row. All must call its methods together."""


# -- attention ---------------------------------------------------------------------------------------------------------


def columns(length: int, ranks: Ranks, device: torch.device) -> Tensor:
    """``[2 * piece]``: the columns of a row of ``length`` (a multiple of ``2 N``) that this rank has."""
    pieces = torch.arange(length, device=device).view(2 * ranks.size, -1)
    return torch.cat([pieces[ranks.rank], pieces[-1 - ranks.rank]])


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float | None, ranks: Ranks) -> Tensor:
    """Causal attention ``[B, heads, s, D]`` of this rank's ``query``, of that shape, to the tokens of all: ``key`` and
    ``value`` ``[B, groups, s, D]`` are those of this rank."""
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        query, key, value = (t.to(torch.get_autocast_dtype(kind)) for t in (query, key, value))
    return _Attention.apply(query, key, value, scale, ranks)  # type: ignore[no-any-return]


class _Attention(torch.autograd.Function):
    """Keeps what this rank has. The backward pass gathers again and computes attention a second time, block by block,
    with the graph that torch makes of its own kernel: so any device's will do. There is no second derivative."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, scale: float | None, ranks: Ranks
    ) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.scale, ctx.ranks = scale, ranks
        key, value = _in_order(torch.stack([key, value]), ranks)
        out = torch.empty_like(query)
        for a, b, own in _blocks(query.shape[2], ranks):
            out[:, :, a:b] = _block(query[:, :, a:b], key, value, scale, own)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        query, key, value = ctx.saved_tensors
        both = _in_order(torch.stack([key, value]), ctx.ranks)
        of_query, of_both = torch.empty_like(query), torch.zeros_like(both)
        for a, b, own in _blocks(query.shape[2], ctx.ranks):
            q = query[:, :, a:b].detach().requires_grad_()
            k, v = (t[:, :, : own[1]].detach().requires_grad_() for t in both)
            with torch.enable_grad():
                out = _block(q, k, v, ctx.scale, own)
            of_query[:, :, a:b], of_k, of_v = torch.autograd.grad(out, (q, k, v), grad[:, :, a:b])
            of_both[0, :, :, : own[1]] += of_k
            of_both[1, :, :, : own[1]] += of_v
        of_key, of_value = ctx.ranks.add(_by_rank(of_both, ctx.ranks))
        return of_query, of_key, of_value, None, None


def _in_order(mine: Tensor, ranks: Ranks) -> Tensor:
    """``[2, B, groups, S, D]`` of all tokens, of ``[2, B, groups, s, D]`` that each rank has."""
    first, second = ranks.gather(mine).movedim(0, 3).unflatten(4, (2, -1)).unbind(4)
    return torch.cat([first, second.flip(3)], 3).flatten(3, 4)


def _by_rank(whole: Tensor, ranks: Ranks) -> Tensor:
    """The way back: ``[N, 2, B, groups, s, D]``."""
    first, second = whole.unflatten(3, (2, ranks.size, -1)).unbind(3)
    return torch.cat([first, second.flip(3)], 4).movedim(3, 0)


def _blocks(length: int, ranks: Ranks) -> Iterator[tuple[int, int, tuple[int, int]]]:
    """Queries ``a`` to ``b`` of this rank's, and the columns that they are: from, and until. What takes most memory
    comes first, so that the rest finds room in what that gave back."""
    piece = length // 2
    for start, column in ((piece, (2 * ranks.size - 1 - ranks.rank) * piece), (0, ranks.rank * piece)):
        for a in reversed(range(0, piece, _ROWS)):
            b = min(a + _ROWS, piece)
            yield start + a, start + b, (column + a, column + b)
            if isinstance(ranks, Imagined):
                return  # memory is counted: none that follows takes more


def _block(query: Tensor, key: Tensor, value: Tensor, scale: float | None, own: tuple[int, int]) -> Tensor:
    """``[B, heads, n, D]`` of queries at the columns ``own``. Of those that share keys one at a time: their mask
    is one, and keys are not repeated."""
    first, until = own
    at = torch.arange(until, device=query.device)
    mask = at[first:, None] >= at
    key, value = key[:, :, :until], value[:, :, :until]
    shared = query.unflatten(1, (key.shape[1], -1)).unbind(2)
    found = [scaled_dot_product_attention(q, key, value, attn_mask=mask, scale=scale) for q in shared]
    return torch.stack(found, 2).flatten(1, 2)


# -- the model ---------------------------------------------------------------------------------------------------------


class SplitRows:
    """Final class: which tokens of the rows of the last forward this rank has, and which of the logits wanted."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.kept: Tensor | None = None
        """Of this rank's tokens, those that logits are wanted of, ``[B, m]``; None before the first forward."""

    def cut(
        self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: Tensor, by: int = 1
    ) -> tuple[Tensor, Tensor]:
        """This rank's tokens ``[B, s]`` and the columns ``[s]`` that they are; ``s`` is a multiple of ``by``. Logits
        are wanted behind the consecutive columns ``logits_to_keep`` ``[T]``. Rows are padded on the left; here on the
        right, where no token sees padding."""
        own, at = self.places(attention_mask, logits_to_keep, by)
        return self.picked(input_ids, at), own

    def places(self, attention_mask: Tensor, logits_to_keep: Tensor, by: int = 1) -> tuple[Tensor, Tensor]:
        """The columns ``[s]`` of this rank, and where in rows padded on the left they are, ``[B, s]``."""
        left, length = (attention_mask.cumsum(1) == 0).sum(1, keepdim=True), attention_mask.shape[1]
        self._padding = -length % (2 * self.ranks.size * by)
        own = columns(length + self._padding, self.ranks, attention_mask.device)
        self._width = len(logits_to_keep)
        index = own + left - logits_to_keep[0]
        there = (index >= 0) & (index < self._width)
        order = there.byte().argsort(dim=1, descending=True, stable=True)[:, : self._width]
        index, there = index.gather(1, order).clamp(0, self._width - 1), there.gather(1, order)
        self.kept, self._index, self._there = order, index, there
        return own, (own + left) % (length + self._padding)

    def picked(self, values: Tensor, at: Tensor) -> Tensor:
        """``[B, s, ...]``: what ``[B, L, ...]`` has at the places ``at``, 0 behind its end."""
        rest = values.shape[2:]
        wide = pad(values, (*[0, 0] * len(rest), 0, self._padding))
        return wide.gather(1, at.view(*at.shape, *[1] * len(rest)).expand(*at.shape, *rest))

    def own(self, tokens: Tensor) -> Tensor:
        """The part ``[B, m]`` of ``[B, T]`` that this rank had logits of in the last forward."""
        return tokens.gather(1, self._index)

    def whole(self, values: Tensor) -> Tensor:
        """``[B, T]`` of what each rank has of it, ``[B, m]``. All come to the same loss of it, so that each takes its
        own part of the gradient."""
        return _Whole.apply(values, self._index, self._there, self._width, self.ranks)  # type: ignore[no-any-return]


class Cut:
    """Final class: while it is on, a forward of the decoder ``module`` is of this rank's tokens, and of all ranks that
    share a row together. On from the beginning."""

    def __init__(self, module: Any, ranks: Ranks) -> None:
        from transformers import AttentionInterface

        self._module, self.rows, self._decoder = module, SplitRows(ranks), decoder_that_sees(module)
        self._whole_forward, self._attention = module.forward, _config(module)._attn_implementation
        self._whole_decoder: Any = None if self._decoder is None else self._decoder.forward
        AttentionInterface.register(_NAME, self._attend)  # type: ignore[arg-type]
        module.get_output_embeddings().register_forward_pre_hook(self._only_kept)
        self.turn(on=True)

    def turn(self, *, on: bool) -> None:
        """Cut rows from now on, or no longer."""
        if self._decoder is not None:
            self._decoder.forward = self._decoded if on else self._whole_decoder
        cut = self._forward if self._decoder is None else self._forward_that_sees
        self._module.forward = cut if on else self._whole_forward
        self._module.cut = self.rows if on else None
        _config(self._module)._attn_implementation = _NAME if on else self._attention
        self.rows.kept = None

    def close(self) -> None:
        """Cut no rows any more."""
        self.turn(on=False)

    def _forward(self, input_ids: Tensor, attention_mask: Tensor, logits_to_keep: Tensor, **_: Any) -> Any:
        """Logits ``[B, m, V]`` behind those of the columns ``logits_to_keep`` that this rank has."""
        rows, own = self.rows.cut(input_ids, attention_mask, logits_to_keep)
        positions = own.expand_as(rows)
        return self._whole_forward(input_ids=rows, attention_mask=None, position_ids=positions, use_cache=False)

    def _forward_that_sees(self, attention_mask: Tensor, logits_to_keep: Tensor, **given: Any) -> Any:
        """Logits ``[B, m, V]`` as of ``_forward``; pictures take their places in the rows before these are cut."""
        self._own, self._at = self.rows.places(attention_mask, logits_to_keep)
        return self._whole_forward(attention_mask=attention_mask, **{**given, "use_cache": False})

    def _decoded(self, inputs_embeds: Tensor, position_ids: Tensor | None = None, **given: Any) -> Any:
        """The decoder's hidden states ``[B, s, H]`` of this rank's columns. ``position_ids`` ``[B, L]``, or one such
        for each axis of multimodal RoPE, before which there may be one for packed rows."""
        at, picked = self._at, self.rows.picked
        if position_ids is None:
            position_ids = self._own.expand_as(at)
        elif position_ids.ndim == 2:
            position_ids = picked(position_ids, at)
        else:
            position_ids = torch.stack([picked(axis, at) for axis in position_ids[-3:]])
        seen: Tensor | None = given.pop("visual_pos_masks", None)
        if seen is not None:  # what some layers add to the hidden states of pictures (Qwen3-VL)
            mine, number = picked(seen, at), picked(seen.flatten().cumsum(0).view_as(seen) - 1, at)
            given["deepstack_visual_embeds"] = [layer[number[mine]] for layer in given["deepstack_visual_embeds"]]
            given["visual_pos_masks"] = mine
        embeds = picked(inputs_embeds, at)
        given |= {"inputs_embeds": embeds, "position_ids": position_ids, "attention_mask": None, "use_cache": False}
        return self._whole_decoder(**given)

    def _only_kept(self, layer: Any, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The hidden states that logits are wanted of."""
        if self.rows.kept is None:
            return None
        hidden, *rest = given
        index = self.rows.kept.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        return (hidden.gather(1, index), *rest)

    def _attend(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Any,
        scaling: float | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        settings = ("sliding_window", "softcap", "s_aux", "position_bias")
        unknown = [name for name in settings if given.get(name) is not None]
        assert mask is None, "refusals has said so"
        assert not unknown, unknown
        return attend(query, key, value, scaling, self.rows.ranks).transpose(1, 2), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, values: Tensor, index: Tensor, there: Tensor, width: int, ranks: Ranks
    ) -> Tensor:
        ctx.save_for_backward(index, there)
        out = values.new_zeros(len(values), width)
        return ranks.sum(out.scatter_add_(1, index, torch.where(there, values, 0.0)))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        index, there = ctx.saved_tensors
        return grad.gather(1, index) * there, None, None, None, None


def plain(module: Any) -> Any:
    """The model without its adapters."""
    return module.get_base_model() if hasattr(module, "get_base_model") else module


def _config(module: Any) -> Any:
    """The one that the layers of its decoder read, with LoRA or not."""
    return plain(module).config.get_text_config()


def decoder_that_sees(module: Any) -> Any:
    """The decoder inside a model that sees; None where ``module`` is one itself."""
    base = plain(module)
    if base.config.model_type not in SEEING:
        return None
    inside = base.model
    return inside.text_model if hasattr(inside, "text_model") else inside.language_model


class InContext(Around):
    """Final class; see ``mmrl.models.weights.Weights``. ``weights``, as they lie on all ranks, of a ``module`` of
    which ``size`` neighbours share each row. All ranks construct it together.

    Gradients of a rank are those of its tokens, so that their sum over all ranks is what it was. Raises ``UserError``
    where ``module`` cannot be cut, or comes to other log-probs then.
    """

    def __init__(self, module: Any, weights: Weights, size: int) -> None:
        refuse(refusals(module, size))
        super().__init__(weights, size)
        self._cut = Cut(module, Group(size))
        self._unsharded = False
        self._check(module)

    @outermost
    def unsharded(self) -> Generator[None]:
        with self._weights.unsharded():
            self._cut.turn(on=False)
            try:
                yield
            finally:
                self._cut.turn(on=True)

    @torch.no_grad()
    def _check(self, module: Any) -> None:
        """Compare with the whole forward, on a row with padding: a config may say what nobody here reads."""
        parameter = next(module.parameters())
        given, picked = probe(_config(module).vocab_size, 8 * self._cut.rows.ranks.size, parameter.device)
        own = token_log_probs(module(**given).logits, self._cut.rows.own(picked), 1.0)
        mine = self._cut.rows.whole(own)
        self._cut.turn(on=False)
        whole = token_log_probs(module(**given).logits, picked, 1.0)
        self._cut.turn(on=True)
        gap = (whole - mine).abs().max().item()
        if not gap <= (_TOLERANCE if parameter.dtype == torch.float32 else _IN_HALF):
            raise UserError(
                f"train.context_parallel: a {type(module).__name__} whose rows are cut comes to other log-probs (by "
                f"{gap:.2g}): its config.json has a setting that is not known here; remove train.context_parallel"
            )


def refusals(module: Any, size: int) -> Iterator[str]:
    """Why the rows of ``module`` cannot be cut for ``size`` ranks, with the edit that mends it."""
    base, config = plain(module), _config(module)
    if size == 1:
        return
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {*(getattr(config, "layer_types", None) or ())} - {"full_attention"}
    sliding = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    for what, is_it in {
        "that sees": (base.config is not config or hasattr(config, "vision_config"))
        and base.config.model_type not in SEEING,
        "whose attention cannot be named": not getattr(base, "_supports_attention_backend", False),
        f"with layers of {', '.join(sorted(kinds))}": bool(kinds),
        "with a sliding window": bool(sliding) and not kinds,
        "with soft-capped attention": getattr(config, "attn_logit_softcapping", None) is not None,
        "with compressed keys": getattr(config, "kv_lora_rank", None) is not None,
        f"with RoPE of type {rope.get('rope_type')}": rope.get("rope_type") in ("dynamic", "longrope"),
    }.items():
        if is_it:
            yield (
                f"train.context_parallel: no rows are cut of a {type(base).__name__}, {what}; remove "
                "train.context_parallel, or take another model.path (Qwen2, Qwen3, Llama)"
            )

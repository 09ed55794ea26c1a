"""Packed rows: all rows one after the other in one row, without padding (Megatron-Core's ``thd``; Krell et al. 2021,
arXiv 2107.02027, without their combination of rows to a fixed length).

Linear layers, norms, experts and the traffic between ranks then process no padding. Only attention separates rows.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor
from torch.nn.functional import pad


@dataclass(kw_only=True)
class Packed(PackedSeqParams):
    """Final class: where the tokens of rows ``[B, L]`` lie among ``total`` of them, one row behind the other.

    ``inside``: columns of ``[B * L]`` that are tokens, ``[N]``. ``places``: of each of the ``total``, its column in
    rows that are padded on the right, ``[segments * longest]``: what is more than ``N`` fills further rows, which
    nobody reads. ``ends``: of each column ``[B, L]``, the last token of its row up to it, among the ``total``.
    """

    inside: Tensor
    places: Tensor
    ends: Tensor
    segments: int
    total: int

    def pack(self, rows: Tensor) -> Tensor:
        """``[1, total, ...]`` of ``[B, L, ...]``."""
        tokens = rows.flatten(0, 1).index_select(0, self.inside)
        return pad(tokens, (*(0, 0) * (rows.ndim - 2), 0, self.total - len(tokens))).unsqueeze(0)

    def unpack(self, tokens: Tensor) -> Tensor:
        """``[B, L, ...]`` of ``[total, ...]``, with 0 where rows have padding."""
        shape, among = self.ends.shape, tokens[: len(self.inside)]
        rows = tokens.new_zeros(shape.numel(), *tokens.shape[1:]).index_copy(0, self.inside, among)
        return rows.unflatten(0, shape)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
        """Causal attention inside each row, by torch's own kernel. ``query`` ``[total, heads, D]``, ``key`` and
        ``value`` ``[total, groups, D]``; ``[total, heads * D]``."""
        q, k, v = (self._apart(t) for t in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return out.transpose(1, 2).flatten(0, 1).index_select(0, self.places).flatten(1)

    def _apart(self, tokens: Tensor) -> Tensor:
        """``[segments, heads, longest, D]`` of ``[total, heads, D]``, padded on the right, where no token sees it."""
        longest = self.max_seqlen_q
        rows = tokens.new_zeros(self.segments * longest, *tokens.shape[1:]).index_copy(0, self.places, tokens)
        return rows.view(self.segments, longest, *tokens.shape[1:]).transpose(1, 2)


def packed(attention_mask: Tensor, multiple: int = 1, least: int = 0) -> Packed:
    """Pack rows whose tokens are where ``attention_mask`` ``[B, L]`` is not 0. ``total`` is a multiple of ``multiple``,
    and ``least`` or more."""
    mask = attention_mask != 0
    lengths = mask.sum(1).tolist()
    longest, tokens = max(lengths), sum(lengths)
    total = max(tokens + -tokens % multiple, least)
    more = [longest] * ((total - tokens) // longest) + [(total - tokens) % longest]
    sizes = torch.tensor([*lengths, *(n for n in more if n)])
    behind = sizes.cumsum(0)
    row = torch.arange(len(sizes)).repeat_interleave(sizes)
    places = torch.arange(total) - (behind - sizes)[row] + row * longest
    starts = (behind - sizes)[: len(mask), None].to(mask.device)
    ends = pad(behind, (1, 0)).int()  # stays on the CPU, where it is read
    return Packed(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        inside=mask.flatten().nonzero().squeeze(1),
        places=places.to(mask.device),
        ends=starts + (mask.cumsum(1) - 1).clamp(min=0),
        segments=len(sizes),
        total=total,
    )

"""Layers of experts (Shazeer et al. 2017, arXiv 1701.06538) for Megatron-Core's own router and its exchange of tokens.

A token's experts and their weights are those of Hugging Face: no token is dropped, and no loss is added that balances
the experts.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from mmrl.config.schema import Train
from mmrl.engines.megatron.mapping import sparse, text_config
from mmrl.json_types import Json

# 0.16 asks whether it is None, and without Transformer Engine has none
vars(moe_utils).setdefault("te_general_gemm", None)


class Experts(nn.Module):
    """Final class: this rank's experts in two tensors, as Hugging Face has them. ``gate_up``: ``[experts, 2 I, H]``;
    ``down``: ``[experts, H, I]``."""

    def __init__(self, experts: int, config: TransformerConfig, pg_collection: object) -> None:
        super().__init__()
        hidden, inner, dtype = config.hidden_size, config.moe_ffn_hidden_size, config.params_dtype
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * inner, hidden, dtype=dtype))
        self.down = nn.Parameter(torch.empty(experts, hidden, inner, dtype=dtype))

    def forward(self, tokens: Tensor, counts: Tensor, weights: Tensor) -> tuple[Tensor, None]:
        """``tokens`` ``[N, H]`` in the order of experts, ``counts`` ``[experts]`` of each; ``weights`` ``[N]`` of
        the experts for their tokens. Returns ``[N, H]``, and no bias."""
        out = []
        for mine, gate_up, down in zip(tokens.split(counts.tolist()), self.gate_up, self.down, strict=True):
            gate, up = F.linear(mine, gate_up).chunk(2, dim=-1)
            out.append(F.linear(F.silu(gate) * up, down))
        return torch.cat(out) * weights.unsqueeze(-1), None


def settings(module: nn.Module, train: Train) -> dict[str, Json]:
    """Megatron-Core's settings for the experts of the decoder ``module``; empty without experts."""
    layers, config = sparse(module), text_config(module)
    if not layers:
        return {}
    return {
        "num_moe_experts": config.num_experts,
        "moe_ffn_hidden_size": config.moe_intermediate_size,
        "moe_layer_freq": [int(n in layers) for n in range(config.num_hidden_layers)],
        "moe_router_topk": config.num_experts_per_tok,
        # a softmax over the chosen experts is one over all, normalised again
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": train.expert_parallel,
        "expert_tensor_parallel_size": 1,
    }


def layer(dense: ModuleSpec, config: TransformerConfig, n: int) -> ModuleSpec:
    """The layer ``n``: ``dense``, or with experts in place of its feed-forward network."""
    if config.num_moe_experts is None or not config.moe_layer_freq[n]:
        return dense
    experts = MoESubmodules(experts=Experts)
    mlp = ModuleSpec(module=MoELayer, submodules=experts, metainfo={"fuse_pre_mlp_layernorm": False})
    return ModuleSpec(module=dense.module, submodules=replace(dense.submodules, mlp=mlp))

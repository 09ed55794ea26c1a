"""A Hugging Face decoder as Megatron-Core's ``GPTModel``, of which each tensor-parallel rank holds a part.

Layers of experts (Shazeer et al. 2017, arXiv 1701.06538) are for Megatron-Core's own router and its exchange of tokens.
A token's experts and their weights are those of Hugging Face: no token is dropped, and no loss is added that balances
the experts.
"""

# Megatron-Core is an extra, and annotates little.
# pyright: reportMissingImports=false

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from torch import Tensor, nn

from mmrl.config.schema import Train
from mmrl.core.json_types import Json
from mmrl.models.context_parallel import Group, Ranks, attend, columns
from mmrl.models.megatron import cpu
from mmrl.models.megatron.mapping import before, body, sparse, text_config, tower
from mmrl.models.megatron.rows import Packed
from mmrl.models.text.critic import Critic

_PATIENCE = 24 * 60
"""Minutes that a rank may wait for another, as in ``mmrl.controller.peers``."""
_SETTLED = (
    "full scope is deprecated",  # of a default of its own
    "Using a large number of experts",  # they are chosen in the type in which transformers chooses them
)
"""What Megatron-Core warns of, and no user can change."""
# 0.16 asks whether it is None, and without Transformer Engine has none
vars(moe_utils).setdefault("te_general_gemm", None)


class Groups(NamedTuple):
    """The groups of this rank: who computes its layers with it, who has the stages before and behind, both together,
    and who has the same weights, for other rows or other parts of these. ``rows``: who has other parts of its rows;
    None where they are whole. ``ends``: the first and the last stage, of one of them; else None. ``experts``: who has
    other experts and takes tokens for them; ``expert_copies``: who has the same."""

    layers: Any
    stages: Any
    model: Any
    copies: Any
    rows: Ranks | None
    ends: Any
    experts: Any
    expert_copies: Any


def arrange(train: Train, *, mixture: bool) -> Groups:
    """Divide the ranks of ``torch.distributed``, all together: neighbours share a model. ``mixture``: with experts."""
    cpu.install()
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=train.tensor_parallel,
        pipeline_model_parallel_size=train.pipeline_parallel,
        virtual_pipeline_model_parallel_size=train.pipeline_chunks if train.pipeline_chunks > 1 else None,
        context_parallel_size=train.context_parallel,
        # stages of experts must lie where those of the rest do; where there are none, so that they do
        expert_model_parallel_size=train.expert_parallel if mixture else train.context_parallel,
        expert_tensor_parallel_size=1 if mixture else None,  # no expert is cut
        order="tp-cp-ep-pp-dp",  # what shares a model lies side by side: in one controller
        distributed_timeout_minutes=_PATIENCE,
        create_gloo_process_groups=False,
    )
    with torch.random.fork_rng():  # its own generators, which nothing here draws from: there is no dropout
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    return Groups(
        parallel_state.get_tensor_model_parallel_group(),
        parallel_state.get_pipeline_model_parallel_group(),
        parallel_state.get_model_parallel_group(),
        parallel_state.get_data_parallel_group(with_context_parallel=True),
        _rows(),
        parallel_state.get_embedding_group() if parallel_state.is_rank_in_embedding_group() else None,
        parallel_state.get_expert_model_parallel_group(),
        parallel_state.get_expert_data_parallel_group(),
    )


def _rows() -> Ranks | None:
    size = parallel_state.get_context_parallel_world_size()
    return Group(size, parallel_state.get_context_parallel_group()) if size > 1 else None


class Norm(nn.RMSNorm):
    """Final class: RMSNorm as Megatron-Core constructs a norm. Its own, for want of Transformer Engine, knows of no
    tokens on other ranks; whoever reads this one's gradient adds theirs."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)


class Attention(nn.Module):
    """Final class: causal attention by torch's own kernel; Megatron-Core's for want of Transformer Engine holds
    ``[B, heads, S, S]``, and takes no rows that lie behind one another."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._scale, self._rows = softmax_scale, _rows()

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *_: Any, packed_seq_params: Packed | None = None, **__: Any
    ) -> Tensor:
        """Attend as ``Packed.attend`` does; or, of rows that ranks share, ``query`` ``[S, B, heads, D]``, ``key`` and
        ``value`` ``[S, B, groups, D]``: ``[S, B, heads * D]``."""
        if packed_seq_params is not None:
            return packed_seq_params.attend(query, key, value, self._scale)
        assert self._rows is not None
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        return attend(q, k, v, self._scale, self._rows).permute(2, 0, 1, 3).flatten(2)


def built(module: Any, vocabulary: int, train: Train, *, recompute: bool) -> list[GPTModel]:
    """This rank's parts of ``module``, in float32 with weights that nobody has set yet, on the CPU: one, or one for
    each of several stages that it has.

    ``vocabulary``: its rows with padding, which all ranks divide. ``train.sequence_parallel``: they also divide what
    lies between the parts of layers (Korthikanti et al. 2022, arXiv 2205.05198). ``recompute``: layers are computed
    again in the backward pass.
    """
    with warnings.catch_warnings():
        for settled in _SETTLED:
            warnings.filterwarnings("ignore", settled)
        transformer = configured(module, train, recompute=recompute)
        return [_part(module, transformer, vocabulary, n) for n in range(train.pipeline_chunks)]


class Part(GPTModel):
    """Final class: some or all of the layers."""

    def setup_embeddings_and_output_layer(self) -> None:
        """Nothing: tied weights are made equal, and their gradients added, by ``mmrl.models.megatron.weights``."""


def _part(module: Any, transformer: TransformerConfig, vocabulary: int, chunk: int) -> GPTModel:
    """The ``chunk``-th stage that this rank has."""
    config, several = text_config(module), transformer.virtual_pipeline_model_parallel_size is not None
    of, valued = chunk if several else None, isinstance(module, Critic)
    model = Part(
        transformer,
        _layers(transformer, of),
        vocab_size=vocabulary,
        max_sequence_length=config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=of),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=of),
        position_embedding_type="rope" if transformer.mrope_section is None else "mrope",
        rotary_base=(getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0),
        share_embeddings_and_output_weights=valued or module.config.tie_word_embeddings,
        scatter_embedding_sequence_parallel=tower(module) is None,  # else once pictures are in it
        vp_stage=of,
    )
    if (ranks := _rows()) is not None:
        rotary = model.rotary_pos_emb
        rotary.cp_group = None  # all columns, of which these are taken:
        rotary.register_forward_hook(lambda _, __, out: out[columns(len(out), ranks, out.device)])
    if model.pre_process and (token := body(module).get_input_embeddings().padding_idx) is not None:
        model.embedding.word_embeddings.register_forward_hook(partial(_unlearned, token))
    if valued:
        model.post_process = False  # its hidden states are what a critic's head takes
        del model.output_layer
    if model.post_process:
        head = model.output_layer  # is given all tokens
        head.sequence_parallel, head.allreduce_dgrad = False, transformer.tensor_model_parallel_size > 1
    cpu.install()  # of modules that were loaded meanwhile
    return model


def _unlearned(token: int, layer: Any, given: tuple[Tensor], out: Tensor) -> Tensor:
    """``out`` without the gradient of ``token``, where it was drawn: Hugging Face's ``nn.Embedding`` gives its padding
    none. ``out`` is ``[B, S, H]``, or this rank's ``[S / ranks, B, H]``."""
    there = given[0] == token
    if layer.reduce_scatter_embeddings:
        there = there.T.chunk(layer.tp_group.size())[layer.tp_group.rank()]
    return torch.where(there.unsqueeze(-1), out.detach(), out)


def named(chunks: Sequence[GPTModel]) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters of this rank's parts, with the numbers that their layers have in the whole model."""
    for chunk in chunks:
        numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]  # type: ignore[union-attr]
        for name, p in chunk.named_parameters():
            of_layer = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+)", name)
            yield (f"decoder.layers.{numbers[int(of_layer[1])]}.{of_layer[2]}" if of_layer else name), p


def all_tokens(hidden: Tensor) -> Tensor:
    """``[S, B, H]`` of the parts ``[S / ranks, B, H]`` that the ranks have."""
    return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)


def configured(module: Any, train: Train, *, recompute: bool) -> TransformerConfig:
    """Megatron-Core's settings for the decoder ``module``."""
    config, names = text_config(module), {name for name, _ in module.named_parameters()}
    first = f"{before(module)}layers.0.self_attn."
    heads = config.num_attention_heads
    again: dict[str, Any] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=heads,
        num_query_groups=config.num_key_value_heads,
        kv_channels=getattr(config, "head_dim", None) or config.hidden_size // heads,
        normalization="RMSNorm",
        layernorm_epsilon=config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=f"{first}q_proj.bias" in names,
        qk_layernorm=f"{first}q_norm.weight" in names,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        mrope_section=(getattr(config, "rope_parameters", None) or {}).get("mrope_section"),
        tensor_model_parallel_size=train.tensor_parallel,
        sequence_parallel=train.sequence_parallel,
        pipeline_model_parallel_size=train.pipeline_parallel,
        virtual_pipeline_model_parallel_size=train.pipeline_chunks if train.pipeline_chunks > 1 else None,
        context_parallel_size=train.context_parallel,
        pipeline_dtype=torch.float32,
        variable_seq_lengths=train.pipeline_chunks == 1,  # of slices
        moe_token_dispatcher_type="alltoall",  # checked with the former, experts or not
        batch_p2p_comm=False,
        batch_p2p_sync=False,
        calculate_per_token_loss=True,  # a loss has its denominator
        params_dtype=torch.float32,
        use_cpu_initialization=True,
        perform_initialization=False,
        # kernels that only CUDA has
        apply_rope_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        **(again if recompute else {}),
        **expert_settings(module, train),
    )


def _layers(config: TransformerConfig, chunk: int | None) -> Any:
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = Attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    norm: Any = Norm
    first = get_transformer_layer_offset(config, vp_stage=chunk)
    mine = range(first, first + get_num_layers_to_build(config, vp_stage=chunk))
    return TransformerBlockSubmodules(layer_specs=[expert_layer(spec, config, n) for n in mine], layer_norm=norm)


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


def expert_settings(module: nn.Module, train: Train) -> dict[str, Json]:
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


def expert_layer(dense: ModuleSpec, config: TransformerConfig, n: int) -> ModuleSpec:
    """The layer ``n``: ``dense``, or with experts in place of its feed-forward network."""
    if config.num_moe_experts is None or not config.moe_layer_freq[n]:
        return dense
    experts = MoESubmodules(experts=Experts)
    mlp = ModuleSpec(module=MoELayer, submodules=experts, metainfo={"fuse_pre_mlp_layernorm": False})
    return ModuleSpec(module=dense.module, submodules=replace(dense.submodules, mlp=mlp))

"""A Hugging Face decoder as Megatron-Core's ``GPTModel``, of which each tensor-parallel rank holds a part."""

# Megatron-Core is an extra, and annotates little.
# pyright: reportMissingImports=false

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

with warnings.catch_warnings():  # of each part of Apex and Transformer Engine that is not installed
    warnings.simplefilter("ignore")
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
    from megatron.core.transformer.transformer_config import TransformerConfig

from mmrl.engines.megatron import cpu

_PATIENCE = 24 * 60
"""Minutes that a rank may wait for another, as in ``mmrl.controller.peers``."""


def arrange(tensor_parallel_size: int) -> tuple[Any, Any]:
    """Divide the ranks of ``torch.distributed``, all together: neighbours share a model. Returns the group that shares
    it with this rank, and that of the ranks which have the same part of it."""
    cpu.install()
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # collectives and kernels in the order they were launched
    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=tensor_parallel_size,
        order="tp-cp-ep-pp-dp",  # what shares a model lies side by side: in one controller
        distributed_timeout_minutes=_PATIENCE,
        create_gloo_process_groups=False,
    )
    with torch.random.fork_rng():  # its own generators, which nothing here draws from: there is no dropout
        tensor_parallel.model_parallel_cuda_manual_seed(0)
    return parallel_state.get_tensor_model_parallel_group(), parallel_state.get_data_parallel_group()


class Norm(nn.RMSNorm):
    """Final class: RMSNorm as Megatron-Core constructs a norm. Its own, for want of Transformer Engine, knows of no
    tokens on other ranks; whoever reads this one's gradient adds theirs."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps)


class Attention(nn.Module):
    """Final class: causal attention by torch's own kernel; Megatron-Core's for want of Transformer Engine holds
    ``[B, heads, S, S]``."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self._scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """``query`` ``[S, B, heads, D]``, ``key`` and ``value`` ``[S, B, groups, D]``; ``[S, B, heads * D]``."""
        q, k, v = (t.permute(1, 2, 0, 3) for t in (query, key, value))
        grouped = q.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self._scale, enable_gqa=grouped)
        return out.permute(2, 0, 1, 3).flatten(2)


def built(module: Any, vocabulary: int, by_tokens: bool, recompute: bool) -> GPTModel:
    """This rank's part of ``module``, in float32 with weights that nobody has set yet, on the CPU.

    ``vocabulary``: its rows with padding, which all ranks divide. ``by_tokens``: they also divide what lies between the
    parts of layers (sequence parallelism, Korthikanti et al. 2022, arXiv 2205.05198). ``recompute``: layers are
    computed again in the backward pass.
    """
    with warnings.catch_warnings():  # that torch's own norms are taken, and of settings that others made
        warnings.simplefilter("ignore")
        transformer = configured(module, by_tokens, recompute)
        layers: Any = _layers(transformer)
    config = module.config
    model = GPTModel(
        transformer,
        layers,
        vocab_size=vocabulary,
        max_sequence_length=config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=(getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10_000.0),
        share_embeddings_and_output_weights=config.tie_word_embeddings,
    )
    head = model.output_layer  # is given all tokens
    head.sequence_parallel, head.allreduce_dgrad = False, transformer.tensor_model_parallel_size > 1
    cpu.install()  # of modules that were loaded meanwhile
    return model


def all_tokens(hidden: Tensor) -> Tensor:
    """``[S, B, H]`` of the parts ``[S / ranks, B, H]`` that the ranks have."""
    return tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)


def configured(module: Any, by_tokens: bool, recompute: bool) -> TransformerConfig:
    """Megatron-Core's settings for the decoder ``module``."""
    config, names = module.config, {name for name, _ in module.named_parameters()}
    first = "model.layers.0.self_attn."
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
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=by_tokens,
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
    )


def _layers(config: TransformerConfig) -> TransformerBlockSubmodules:
    spec = get_gpt_layer_local_spec(qk_layernorm=config.qk_layernorm, normalization=config.normalization)
    parts: Any = spec.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    attention = parts.self_attention.submodules
    attention.core_attention = Attention
    if config.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = Norm
    norm: Any = Norm
    return TransformerBlockSubmodules(layer_specs=[spec] * config.num_layers, layer_norm=norm)

"""Every kind of causal language model that transformers has, at a size that a test can build."""

from __future__ import annotations

from typing import Any

SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 32),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "d_ff"), 64),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("sliding_window", "attention_window_size", "attention_chunk_size"), 12),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "head_dim", "qk_head_dim"), 8),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("n_group", "topk_group", "n_groups", "mamba_n_groups", "n_shared_experts"), 1),
    **dict.fromkeys(("mamba_d_state", "state_size", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "num_heads"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "first_k_dense_replace": 1,
    "mamba_expand": 2,
    "num_nextn_predict_layers": 0,
    "num_kv_shared_layers": 0,
    "lru_width": 32,
}
"""Settings by the names that transformers' configurations give them."""
_LATENT = {"num_key_value_heads": 4}
OTHERWISE: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "glm_moe_dsa": _LATENT,
    "hunyuan_v1_dense": {"head_dim": 8},
    "mamba2": {"head_dim": 16},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "gemma4_text": {"global_head_dim": 16},
    "falcon_h1": {"mamba_d_ssm": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "lfm2": {"full_attn_idxs": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba", "attention"]},
}
"""What single kinds want otherwise."""


def _reads(config: Any, name: str) -> bool:
    """Whether a configuration has a value under this name, also under the name of another that it maps."""
    try:
        return getattr(config, name, None) is not None
    except RuntimeError:  # it differs from layer to layer
        return True


def small_config(kind: str, tokens: int, end: int, pad: int, **more: Any) -> Any:
    """The configuration of a small model of ``kind`` (transformers' ``model_type``) with a vocabulary of ``tokens``."""
    from transformers import AutoConfig

    usual = AutoConfig.for_model(kind).get_text_config()
    given = SMALL | {"vocab_size": tokens, "vocab_size_per_layer_input": tokens, "eos_token_id": end}
    given |= {"pad_token_id": pad, "bos_token_id": None}
    has = usual.to_dict()
    known = {name: value for name, value in given.items() if name in has or _reads(usual, name)}
    if not _reads(usual, "head_dim"):
        known.pop("head_dim", None)
    return type(usual)(**known | OTHERWISE.get(kind, {}) | more)


def small_model(kind: str, tokens: int, end: int, pad: int, **more: Any) -> Any:
    """Such a model with random weights, in evaluation mode."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(small_config(kind, tokens, end, pad, **more)).eval()

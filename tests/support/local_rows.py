"""Shared by the tests of local rows and others."""

import shutil
from pathlib import Path

import torch

from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision
SHIPPED = Path(__file__).parents[2] / "pipelines" / "llm" / "models" / "sums-qwen3"


def experts(folder, **more):
    import transformers

    sizes = {"num_hidden_layers": 2, "vocab_size": 335, "max_position_embeddings": 256, "num_key_value_heads": 2}
    sizes |= {"hidden_size": 32, "num_attention_heads": 4, "head_dim": 8, "moe_intermediate_size": 16}
    shutil.copytree(SHIPPED, folder, ignore=shutil.ignore_patterns("model*", "config.json"))
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(**sizes, num_experts_per_tok=2, eos_token_id=331, **more)
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    return folder

"""What forked processes of tests (``tests/support/ranks.py``) have imported: nothing here may start a thread, a group
or a seed of its own."""

# ruff: noqa: E402, F401
import importlib.util

import torch
import torch.distributed.checkpoint
import torch.distributed.fsdp
import torch.distributed.tensor

from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

import peft
import transformers.models.llama.modeling_llama
import transformers.models.qwen2.modeling_qwen2
import transformers.models.qwen2_5_vl.modeling_qwen2_5_vl
import transformers.models.qwen3.modeling_qwen3
import transformers.models.qwen3_moe.modeling_qwen3_moe
from diffusers import StableDiffusion3Pipeline

import mmrl.app.build
import mmrl.cli
import mmrl.families.text.pipeline
import mmrl.runtime.start

if importlib.util.find_spec("megatron") is not None:
    import mmrl.models.megatron.weights

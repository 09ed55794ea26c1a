"""A mixture of experts in the real vLLM, in a process of its own: one that has had a dense model loads none."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mmrl.core.rollout_engine import Settings
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.inference.vllm import VllmEngine
from tests.support.ranks import launched

allow_cpu_only()  # before anything imports torchvision
pytest.importorskip("vllm")
from tests.support.vllm import TEXT, ask, gap, tokenizer  # noqa: E402

pytestmark = pytest.mark.slow
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def mixture(folder, seed):
    """A model, and its tensors as a checkpoint names them: each expert's by its own name."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=32, tie_word_embeddings=False, **EXPERTS, **TEXT))
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return model.eval(), load_file(folder / "model.safetensors")


def serve(folder, out):
    """How far vLLM's log-probs are from each model's, as loaded and after each of two updates."""
    models, found = [mixture(folder / str(seed), seed) for seed in (0, 7)], []
    engine, request = VllmEngine(str(folder / "0"), max_model_len=256), ask()
    for seed in (None, 7, 0):
        if seed is not None:
            engine.update(iter(models[seed // 7][1].items()))
        (answer,) = engine.generate([request], Settings(16))
        found.append([gap(model, request, answer) for model, _ in models])
    engine.close()
    torch.save(torch.tensor(found), out)


def test_an_update_brings_the_weights_of_experts(tmp_path):
    (found,) = launched(__file__, [tmp_path / "gaps.pt"], lambda _rank, _port, out: [tmp_path, out])
    first, new, again = found
    for near, far in (first, new.flip(0), again):
        assert near < 1e-4
        assert far > 0.5


if __name__ == "__main__":
    serve(*map(Path, sys.argv[1:]))

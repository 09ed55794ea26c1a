"""Mixtures of experts on Megatron-Core come to what one process of Hugging Face does."""

import pytest

from mmrl._torchvision import allow_cpu_only
from tests.test_megatron import equal, made, rows_of, tiny, together, updates

allow_cpu_only()  # before transformers imports torchvision

EP = ["train.backend=megatron", "train.expert_parallel=2", "devices_per_controller=2"]
SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def mixture(folder, **more):
    return tiny(folder, "Qwen3Moe", **{**SIZES, "norm_topk_prob": True, **more})


@pytest.mark.parametrize("layout", [EP])
def test_divided_experts_have_the_gradients_and_log_probs_of_the_whole(layout, tmp_path):
    pytest.importorskip("megatron.core")
    path = mixture(tmp_path / "model")
    run = made(path)
    whole = updates(run, rows_of(run, 0, 1))
    equal(together(tmp_path, 2, "serve", path, *layout), whole, 1)

"""Shared by the tests of megatron experts and others."""

import pytest
import torch
from safetensors.torch import load_file

from mmrl.config.loader import load_recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support.megatron import equal, made, rows_of, tiny, together, updates

allow_cpu_only()  # before transformers imports torchvision
EP = ["train.backend=megatron", "train.expert_parallel=2", "devices_per_controller=2"]
TP = [
    "train.backend=megatron",
    "train.tensor_parallel=2",
    "train.sequence_parallel=true",
    "devices_per_controller=2",
]
PP = ["train.backend=megatron", "train.pipeline_parallel=2", "devices_per_controller=2"]
ODD = {"norm_topk_prob": False, "num_hidden_layers": 4, "mlp_only_layers": [1], "tie_word_embeddings": True}
BOTH = ["train.expert_parallel=2"]
FOUR = ["devices_per_controller=4", "model.gradient_checkpointing=true"]
WIDE = ["train.expert_parallel=4", "devices_per_controller=4"]
SIZES = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def mixture(folder, **more):
    return tiny(folder, "Qwen3Moe", **{**SIZES, "norm_topk_prob": True, **more})


@pytest.fixture(scope="module")
def of_one(tmp_path_factory):
    """Models, and what one process of Hugging Face makes of them."""
    found = {}

    def of(**more):
        key = str(more)
        if key not in found:
            path = mixture(tmp_path_factory.mktemp("experts") / "model", **more)
            one = made(path)
            found[key] = path, updates(one, rows_of(one, 0, 1))
        return found[key]

    return of


@pytest.mark.parametrize(
    ("ranks", "layout", "more"),
    [
        (2, EP, {}),
        (2, TP, {}),
        (2, [*TP, *BOTH], {}),
        (2, PP, ODD),
        (4, [*TP, *WIDE], ODD),
        (4, [*TP, *PP, *BOTH, *FOUR], {}),
        (4, [*EP, "controllers=2"], {}),
    ],
)
def test_divided_experts_have_the_gradients_and_log_probs_of_the_whole(ranks, layout, more, of_one, tmp_path):
    pytest.importorskip("megatron.core")
    path, whole = of_one(**more)
    equal(together(tmp_path, ranks, "serve", path, *layout), whole, load_recipe(["sums"], layout).recipe.train.width)
    given, written = (load_file(folder / "model.safetensors") for folder in (path, tmp_path / f"0-of-{ranks}"))
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in given
    assert written.keys() == given.keys()
    assert all(torch.equal(written[name], given[name]) for name in given), "written before the first update"

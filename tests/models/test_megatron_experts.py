"""Mixtures of experts on Megatron-Core come to what one process of Hugging Face does."""

from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.families.text.engine_sampling import streamed
from mmrl.models.megatron.mapping import refusals, shares
from mmrl.planner.plan import plan
from tests.support.megatron import SHIPPED, made
from tests.support.megatron_experts import (  # noqa: F401
    EP,
    PP,
    SIZES,
    TP,
    mixture,
    of_one,
    test_divided_experts_have_the_gradients_and_log_probs_of_the_whole,
)
from tests.support.runs import alike, rows, run

allow_cpu_only()  # before transformers imports torchvision

LONG = """
import mmrl

@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [float(len(sample.text or "") % 5) for sample in samples]
"""
SMALL = ["train.group_size=4", "train.micro_batch_size=4", "sampling.batch_size=4", "model.dtype=float32"]
SMALL += ["train.prompts_per_step=4", "optim.schedule=constant", "eval.every=null", "checkpoint.every=1"]
SMALL += ["sampling.max_new_tokens=16", "algorithm.kl_coef=0.01"]


def test_experts_compute_what_hugging_face_has_them_compute():
    pytest.importorskip("megatron.core")
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig, Qwen3MoeExperts

    from mmrl.models.megatron.model import Experts

    theirs = Qwen3MoeExperts(Qwen3MoeConfig(**SIZES, hidden_size=64, experts_implementation="eager"))
    for p in theirs.parameters():
        torch.nn.init.normal_(p, 0.0, 0.05)
    config = SimpleNamespace(hidden_size=64, moe_ffn_hidden_size=32, params_dtype=torch.float32)
    ours = Experts(4, config, None)
    ours.gate_up.data, ours.down.data = theirs.gate_up_proj.data, theirs.down_proj.data
    counts = torch.tensor([3, 0, 1, 2])  # one of them has nothing to do
    tokens, weights = torch.randn(6, 64), torch.rand(6)
    chosen = torch.arange(4).repeat_interleave(counts)
    found, bias = ours(tokens, counts, weights)
    expected = theirs(tokens, chosen.unsqueeze(1), weights.unsqueeze(1))
    assert bias is None
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    found.square().sum().backward()
    expected.square().sum().backward()
    for mine, other in ((ours.gate_up, theirs.gate_up_proj), (ours.down, theirs.down_proj)):
        assert mine.grad[1].eq(0).all()
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_an_engine_is_given_each_expert_by_its_name_in_a_checkpoint(tmp_path):
    path = mixture(tmp_path / "model")
    sent, saved = dict(streamed(made(path).policy)), load_file(path / "model.safetensors")
    assert sent.keys() == saved.keys()
    assert all(torch.equal(sent[name], saved[name]) for name in saved)


@pytest.mark.long
def test_a_run_goes_on_in_shards_and_over_other_devices(tmp_path):
    pytest.importorskip("megatron.core")
    path, reward = mixture(tmp_path / "model"), tmp_path / "long.py"
    reward.write_text(LONG)
    words = [f"model.path={path}", f'rewards=[{{name: "{reward}:score"}}]', *SMALL]
    run("sums", tmp_path / "whole", "train.steps=3", *words)
    run("sums", tmp_path / "cut", "train.steps=1", *words, *EP)
    run("sums", tmp_path / "cut", "train.steps=2", *words, "train.backend=fsdp", "devices_per_controller=2", "--resume")
    run("sums", tmp_path / "cut", "train.steps=3", *words, *TP, "train.expert_parallel=2", "--resume")
    alike(tmp_path / "whole", tmp_path / "cut")
    assert min(row["optim/grad_norm"] for row in rows(tmp_path / "cut")) > 1e-3, "nothing was learned, nor compared"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["train.expert_parallel=2"], "train.expert_parallel: replicated does not split layers"),
        ([*EP, "devices_per_controller=3"], "2 devices that share experts .* 3 train there; .* to a multiple of 2"),
        ([*TP, "train.expert_parallel=4", "devices_per_controller=6"], "share experts .* to a multiple of 4"),
    ],
)
def test_devices_that_do_not_divide_experts_are_refused(overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe(["sums"], overrides)


def test_a_plan_names_the_edit_that_divides_experts(tmp_path):
    path = mixture(tmp_path / "model")
    found = plan(load_recipe(["sums"], [f"model.path={path}", *EP]))
    assert not found.problems
    assert found.measured is not None, "experts have shapes in float32 too"
    module, dense = made(path).pipeline.policy, made(SHIPPED).pipeline.policy
    for policy, words, message in (
        (
            module,
            ["train.expert_parallel=3", "devices_per_controller=3"],
            "train.expert_parallel: 3 does not divide the model's 4 experts; set it to 1, 2 or 4",
        ),
        (
            module,
            ["train.tensor_parallel=2"],
            "train.sequence_parallel: devices that share a layer of experts divide its tokens; set it to true",
        ),
        (
            module,
            ["train.pipeline_parallel=2"],
            "train.expert_parallel: the 1 device of a stage divides its experts; set it to 1",
        ),
        (dense, [], "train.expert_parallel: Qwen3ForCausalLM has no experts to divide; remove it"),
    ):
        assert list(refusals(policy, load_recipe(["sums"], [*EP, *words]).recipe.train)) == [message]
    for tokens, normed, problems in ((1, True, 1), (1, False, 0)):
        module.config.num_experts_per_tok, module.config.norm_topk_prob = tokens, normed
        found = list(refusals(module, load_recipe(["sums"], EP).recipe.train))
        assert [problem.rpartition("; ")[2] for problem in found] == ["set train.backend to fsdp"] * problems


def test_a_plan_counts_the_experts_of_a_device(tmp_path):
    path = mixture(tmp_path / "model")
    module = made(path).pipeline.policy
    experts = sum(p.numel() for name, p in module.named_parameters() if ".experts." in name)
    rest = sum(p.numel() for p in module.parameters()) - experts
    for layout, share in ((EP, rest + experts / 2), (TP, rest / 2 + experts), (PP, (rest + experts) / 2)):
        assert shares(module, load_recipe(["sums"], layout).recipe.train) == (rest + experts) / Fraction(share)

"""Vision-language models with their base in 8 or 4 bits: near the plain ones, one arithmetic, every adapter learns."""

import pytest
import torch
from torch import nn

import mmrl
from mmrl.config.schema import Recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.models.policy import Policy
from mmrl.models.text.base_model import base_model
from tests.support import tiny
from tests.support.rows import distance
from tests.support.vlm import picture

allow_cpu_only()
pytest.importorskip("torchvision")

chat = mmrl.load("pipelines", "vlm/chat")
CASES = [("qwen2_5_vl", "int8"), ("qwen3_vl", "nf4"), ("smolvlm", "fp8")]
PACKAGES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}


def _built(path, kind, dtype):
    values = {
        "name": "tiny",
        "pipeline": "vlm/chat",
        "model": {"path": str(path), "lora": {"rank": 4, "alpha": 8}, "quantize": kind, "dtype": dtype},
        "data": {"name": "scenes"},
        "sampling": {"max_new_tokens": 10},
        "rewards": [{"name": "answer:exact"}],
        "algorithm": {"type": "grpo", "kl_coef": 0.0},
        "train": {"steps": 1, "prompts_per_step": 2, "group_size": 2, "micro_batch_size": 4},
    }
    return chat.build(Recipe.model_validate(values), str(path), torch.device("cpu"))


def _replayed(made, drawn):
    return made.replay(drawn, [0], frozenset({"log_probs"}), None)["log_probs"]


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "kind"), CASES)
def test_sampling_and_training_have_the_same_log_probs_and_every_adapter_learns(tmp_path, family, kind, dtype):
    pytest.importorskip(PACKAGES[kind])
    if family == "smolvlm":
        pytest.importorskip("num2words")
    path = tiny.vision_model(tmp_path, family)
    made, plain = _built(path, kind, dtype), _built(path, None, dtype)
    policy = Policy(made.policy, made.recipe.optim, total_updates=2)
    with torch.no_grad():
        for parameter in policy.trainable.values():
            parameter.add_(0.05 * torch.randn_like(parameter))
    prompts = [Prompt("one", "What is <image>?", media=(picture(40, 40, 1),)), Prompt("none", "No picture.")]
    slots = [Slot(0, i, 0, prompt) for i, prompt in enumerate(prompts)]
    for pipeline in (made, plain):
        pipeline.encode(slots)
    rows = [(slot, SampleId(0, slot.index, 0, k)) for slot in slots for k in range(2)]
    drawn = made.sample([s for s, _ in rows], [i for _, i in rows], [], 3)
    new = _replayed(made, drawn)
    assert distance(new, drawn) < (1e-5 if dtype == "float32" else 0.1)
    with torch.no_grad():
        assert torch.equal(new, _replayed(made, drawn)), "the first ratio of an update is not 1"
        assert distance(_replayed(plain, drawn), drawn) > 1e-3, "the base is not quantised"
    before = {name: p.detach().clone() for name, p in policy.trainable.items()}
    policy.backward((new * torch.randn_like(new)).sum())
    policy.apply()
    assert not [name for name, p in policy.trainable.items() if torch.equal(p, before[name])]


@pytest.mark.parametrize("family", [family for family, _ in CASES])
def test_the_decoder_and_the_tower_of_pictures_are_quantised(tmp_path, family):
    pytest.importorskip("torchao")
    if family == "smolvlm":
        pytest.importorskip("num2words")
    model = base_model(_built(tiny.vision_model(tmp_path, family), "int8", "float32").policy)
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "lora_" not in n}
    plain = {name for name, layer in linear.items() if type(layer) is nn.Linear}
    assert not [name for name in plain if "text_model" in name or "language_model" in name]
    tower = {name for name in linear if "attn" in name and ("visual" in name or "vision_model" in name)}
    assert tower, "the tower has no attention by these names"
    assert not tower & plain
    assert "lm_head" in plain

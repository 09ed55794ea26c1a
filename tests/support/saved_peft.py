"""Shared by the tests of saved peft and others."""

import torch

from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from mmrl.app.build import build  # noqa: E402
from mmrl.config.loader import load_recipe  # noqa: E402

IDS = torch.arange(24).view(2, 12)


def base(folder):
    return AutoModelForCausalLM.from_pretrained(folder / "model")


def saved(folder, out, seed=0, **config):
    """An adapter that peft made and saved, with weights that matter."""
    torch.manual_seed(seed)
    policy = get_peft_model(
        base(folder), LoraConfig(**{"task_type": "CAUSAL_LM", "target_modules": ["q_proj"]} | config)
    )
    for p in policy.parameters():
        if p.requires_grad:
            p.data = torch.randn_like(p) * 0.2
    policy.save_pretrained(str(out))
    return out


@torch.no_grad()
def logits(model):
    return model.eval()(IDS).logits


def made(folder, path, *changes):
    loaded = load_recipe([folder / "recipe.yaml"], [f"model.lora={{path: {path}}}", *changes])
    return build(loaded.recipe)


@torch.no_grad()
def by_mmrl(folder, path):
    """Logits of the policy that a run begins with, in the mode in which it samples and trains; twice the same."""
    policy = made(folder, path).policy.module
    first, second = policy(IDS).logits, policy(IDS).logits
    assert torch.equal(first, second)
    assert not any(module.training for module in policy.modules())
    return first

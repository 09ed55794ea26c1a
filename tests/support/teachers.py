"""Teachers with random weights: shared by the tests of text and pictures."""

import torch


def adapter(model, folder, rank=4, alpha=6.0, targets=("q_proj", "down_proj"), seed=1, **settings):
    """Save a LoRA of ``model`` that changes it, as peft writes it."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(targets), **settings)
    made = get_peft_model(model, config)
    for name, p in made.named_parameters():
        if "lora_" in name:
            p.data.normal_(0, 0.3)
    made.save_pretrained(folder)
    return folder

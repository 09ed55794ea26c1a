"""Teachers with random weights: shared by the tests of text and pictures."""

import json

import torch

from tests.support import tiny


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


def write_letters(folder):
    """Write into ``folder`` two teachers' models, of which ``foreign`` has another vocabulary, and a task for them."""
    tiny.language_model(folder / "large", seed=3, hidden_size=48)
    tiny.language_model(folder / "foreign", words=("hello",))
    rows = [{"id": str(i), "prompt": f"Say {i} letters."} for i in range(24)]
    (folder / "data.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    (folder / "reward.py").write_text(
        "import mmrl\n\n@mmrl.reward(inputs=('text',))\ndef score(samples, *, context):\n"
        "    return [float(s.text.count('e')) for s in samples]\n"
    )

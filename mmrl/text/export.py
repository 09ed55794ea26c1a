"""What others load of a trained language or vision-language model: a Hugging Face directory, or a LoRA for peft."""

from __future__ import annotations

import copy as copying
import json
from pathlib import Path
from typing import Any

import torch

from mmrl.config.schema import Recipe
from mmrl.engines.merging import merged_weights
from mmrl.pipelines.protocol import Usage, What
from mmrl.report.card import public


def write(policy: Any, saved: Any, recipe: Recipe, out: Path, what: What) -> None:
    """Write the model (adapters merged in float32, then cast to ``model.dtype``) or the adapter alone, with the
    tokenizer or processor ``saved``. The policy in memory stays as it is."""
    if what == "lora":
        policy.peft_config["default"].base_model_name_or_path = public(recipe.model.path)
        policy.save_pretrained(out)
        (out / "README.md").unlink(missing_ok=True)  # peft's empty template
    else:
        plain(policy, getattr(torch, recipe.model.dtype)).save_pretrained(out)
    saved.save_pretrained(out)


def plain(policy: Any, dtype: torch.dtype) -> Any:
    """A model of the policy's plain class with merged weights in ``dtype``; shares tensors where nothing is cast."""
    model = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    state = {k.removeprefix("base_model.model."): v for k, v in merged_weights(policy).items()}
    with torch.device("meta"):
        made = type(model)(copying.deepcopy(model.config))
    cast = {k: v.detach().to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    made.load_state_dict(cast, assign=True, strict=False)
    made.tie_weights()
    made.generation_config = model.exported_generation_config
    made.config._name_or_path = ""
    made.config.dtype = dtype
    return made.eval()


def usage(policy: Any, saved: Any, recipe: Recipe, what: What, folder: str, prompt: str) -> Usage:
    """Code that answers ``prompt`` with what was written to ``folder``, greedily."""
    model = policy.get_base_model() if hasattr(policy, "get_base_model") else policy
    kind = type(model).__name__
    sees = hasattr(saved, "image_processor")
    source = folder if what == "merged" else public(recipe.model.path)
    loads = [f"model = {kind}.from_pretrained({json.dumps(source)})"]
    if what == "lora":
        loads.append(f"model = PeftModel.from_pretrained(model, {json.dumps(folder)})")
    imports = f"from transformers import {'AutoProcessor' if sees else 'AutoTokenizer'}, {kind}\n"
    imports += "from peft import PeftModel\n" if what == "lora" else ""
    content = json.dumps([{"type": "text", "text": prompt}]) if sees else json.dumps(prompt)
    code = (
        f"{imports}\n"
        + "\n".join(loads)
        + f"\ntokenizer = {'AutoProcessor' if sees else 'AutoTokenizer'}.from_pretrained({json.dumps(folder)})\n"
        f'messages = [{{"role": "user", "content": {content}}}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"\n)\n'
        f"tokens = model.generate(**inputs, max_new_tokens={recipe.decoding.max_new_tokens}, do_sample=False)\n"
        'text = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)\n'
    )
    task = "image-text-to-text" if sees else "text-generation"
    return Usage(
        "peft" if what == "lora" else "transformers", task, [kind, *(["lora"] * (what == "lora"))], {"Use": code}
    )

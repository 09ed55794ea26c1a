"""How to draw with an exported model that writes pictures as tokens."""

from __future__ import annotations

from mmrl.config.schema import Recipe
from mmrl.core.trajectory import Prompt
from mmrl.logging.card import Usage, What, public, quoted
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.written_pictures import Frame


def usage(frame: Frame, conditioner: Conditioner, recipe: Recipe, what: What, folder: str, prompt: Prompt) -> Usage:
    """Code that draws ``prompt`` with what was written to ``folder``, by transformers' ``generate``."""
    kind, sampling = "Emu3ForConditionalGeneration", recipe.decoding
    source = folder if what == "merged" else public(recipe.model.path)
    asked = {"asked": conditioner.encode(prompt)}
    if frame.guided:
        asked["negative"] = conditioner.negative(prompt)
    texts = {name: conditioner.tokenizer.decode(of["input_ids"].tolist()) for name, of in asked.items()}
    lines = [
        "import torch",
        *(["from peft import PeftModel"] if what == "lora" else []),
        f"from transformers import AutoProcessor, {kind}",
        "",
        f"model = {kind}.from_pretrained({quoted(source)}, dtype=torch.{recipe.model.dtype})",
        *([f"model = PeftModel.from_pretrained(model, {quoted(folder)}).merge_and_unload()"] if what == "lora" else []),
        'model.to("cuda" if torch.cuda.is_available() else "cpu")',
        f"processor = AutoProcessor.from_pretrained({quoted(folder)})",
        "",
        "def tokens_of(text):",
        "    made = processor.tokenizer(text, add_special_tokens=False, return_tensors='pt')",
        "    return made.input_ids.to(model.device)",
        "",
        *(f"{name} = tokens_of({quoted(text)})" for name, text in texts.items()),
        f"height, width, ends = {frame.height}, {frame.width}, {list(frame.ends)}",
        "codes, end_of_row = model.vocabulary_mapping.image_tokens, model.vocabulary_mapping.eol_token_id",
        "",
        "def allowed(_, tokens):",
        "    row, column = divmod(len(tokens) - asked.shape[1], width + 1)",
        "    if row == height:",
        "        return [ends[column]]",
        "    return codes if column < width else [end_of_row]",
        "",
        "tokens = model.generate(",
        "    inputs=asked,",
        "    do_sample=True,",
        f"    temperature={sampling.temperature:g},",
        f"    top_k={sampling.top_k or 0},",
        f"    top_p={sampling.top_p:g},",
        *([f"    guidance_scale={frame.scale:g},", "    negative_prompt_ids=negative,"] if frame.guided else []),
        f"    max_new_tokens={frame.tokens},",
        "    prefix_allowed_tokens_fn=allowed,",
        ")",
        "pixels = model.decode_image_tokens(image_tokens=tokens[:, asked.shape[1] :], height=height, width=width)",
        'picture = processor.postprocess(list(pixels.float()), return_tensors="PIL.Image.Image")["pixel_values"][0]',
    ]
    library, tags = ("peft", [kind, "lora"]) if what == "lora" else ("transformers", [kind])
    return Usage(library, "text-to-image", tags, {f"With {library}": "\n".join(lines) + "\n"})

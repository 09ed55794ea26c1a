"""Export a trained language or vision-language model: a Hugging Face directory, or a LoRA for peft."""

# A private attribute of transformers below has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy as copying
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from mmrl.config.schema import Recipe
from mmrl.core.trajectory import Prompt
from mmrl.logging.card import Usage, What, public, quoted
from mmrl.models.lora import save_adapter
from mmrl.models.merging import merged_weights
from mmrl.models.text.base_model import base_model, peft_model
from mmrl.models.text.chat import Conditioner
from mmrl.models.text.conditioner import Processor, Tokenizer, tokenizer_of
from mmrl.models.text.conversation import PLACEHOLDER
from mmrl.models.text.loading import exported_config, stop_tokens

if TYPE_CHECKING:  # slow to import
    from transformers import PreTrainedModel

_PICTURE = 'picture = Image.new("RGB", (224, 224), "white")  # yours instead: Image.open("picture.jpg")'
_MEDIUM = {
    "image": '{"type": "image", "image": picture}',
    "video": '{"type": "video", "video": [picture, picture]}',
}


def write(
    policy: nn.Module,
    saved: Tokenizer | Processor,
    recipe: Recipe,
    out: Path,
    what: What,
    forbidden: Sequence[int] = (),
) -> None:
    """Write the model (adapters merged in float32, then cast to ``model.dtype``) or the adapter alone, with the
    tokenizer or processor ``saved``. The policy in memory stays as it is.

    ``generate`` will not sample the ``forbidden`` tokens, which stand for media; training did not sample them either.
    """
    if what == "lora":
        save_adapter(peft_model(policy), public(recipe.model.path), out)
    else:
        made = plain(policy, getattr(torch, recipe.model.dtype))
        made.generation_config = copying.deepcopy(exported_config(base_model(policy)))
        made.generation_config.eos_token_id = _ends(policy, saved)
        suppressed = {*(made.generation_config.suppress_tokens or ()), *forbidden}
        made.generation_config.suppress_tokens = sorted(suppressed) or None
        made.save_pretrained(out)
    saved.save_pretrained(out)


def plain(policy: nn.Module, dtype: torch.dtype) -> PreTrainedModel:
    """A model of the policy's class without adapters, with merged weights in ``dtype``; a weight that already has this
    dtype is not copied."""
    model = base_model(policy)
    state = {k.removeprefix("base_model.model."): v for k, v in merged_weights(policy).items()}
    config = copying.deepcopy(model.config)
    if _ties_broken(model, state):
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    with torch.device("meta"):
        made = type(model)(config)
    cast = {k: v.detach().to(dtype) if v.is_floating_point() else v for k, v in state.items()}
    made.load_state_dict(cast, assign=True, strict=False)
    made.tie_weights()
    made.config._name_or_path = ""
    made.config.dtype = dtype
    return made.eval()


def _ties_broken(model: PreTrainedModel, state: Mapping[str, Tensor]) -> bool:
    """Whether the embedding and the head, which are one weight in the model, differ once adapters are merged."""
    tied: dict[str, str] = getattr(model, "all_tied_weights_keys", None) or {}
    pairs = [(state[a], state[b]) for a, b in tied.items() if a in state and b in state]
    return any(a is not b and a.data_ptr() != b.data_ptr() and not torch.equal(a, b) for a, b in pairs)


def usage(
    policy: nn.Module, conditioner: Conditioner, recipe: Recipe, what: What, folder: str, prompt: Prompt
) -> Usage:
    """Code that answers ``prompt`` with what was written to ``folder``, greedily.

    Its pictures and clips are plain ones that stand where its placeholders stand, or before the text; where the model
    sees and the prompt has none, one picture does.
    """
    saved = conditioner.saved
    kind = type(base_model(policy)).__name__
    sees = hasattr(saved, "image_processor")
    auto, loaded = ("AutoProcessor", "processor") if sees else ("AutoTokenizer", "tokenizer")
    source = folder if what == "merged" else public(recipe.model.path)
    messages = _messages(prompt, sees)
    lines = [
        "import torch",
        *(["from peft import PeftModel"] if what == "lora" else []),
        *(["from PIL import Image"] if sees else []),
        f"from transformers import {auto}, {kind}",
        "",
        f"model = {kind}.from_pretrained({quoted(source)}, dtype=torch.{recipe.model.dtype})",
        *([f"model = PeftModel.from_pretrained(model, {quoted(folder)})"] if what == "lora" else []),
        'model.to("cuda" if torch.cuda.is_available() else "cpu")',
        f"{loaded} = {auto}.from_pretrained({quoted(folder)})",
        *([_PICTURE] if sees else []),
        f"messages = [{messages}]",
        f"inputs = {loaded}.apply_chat_template(",
        "    messages,",
        "    add_generation_prompt=True,",
        "    tokenize=True,",
        "    return_dict=True,",
        '    return_tensors="pt",',
        *(['    processor_kwargs={"do_sample_frames": False},'] if sees and '"video"' in messages else []),
        *(f"    {name}={value!r}," for name, value in recipe.decoding.chat_template_kwargs.items()),
        ").to(model.device)",
        f"tokens = model.generate(**inputs, {', '.join(_generation(policy, conditioner, recipe, what))})",
        f'text = {loaded}.decode(tokens[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)',
    ]
    library, tags = ("peft", [kind, "lora"]) if what == "lora" else ("transformers", [kind])
    task = "image-text-to-text" if sees else "text-generation"
    return Usage(library, task, tags, {f"With {library}": "\n".join(lines) + "\n"})


def _messages(prompt: Prompt, sees: bool) -> str:
    """The messages of a prompt as Python source: a picture for every placeholder, a clip of two pictures."""
    said: list[tuple[str, str]] = [("system", prompt.system)] if prompt.system else []
    said += [*((role, text) for role, text, _ in prompt.turns), ("user", prompt.text)]
    placed = any(role == "user" and PLACEHOLDER.search(text) for role, text in said)
    before: list[str] = [] if placed else [m.kind for m in prompt.media] or ["image"]
    written = []
    for role, text in said:
        content = quoted(text) if not sees else f'[{{"type": "text", "text": {quoted(text)}}}]'
        if sees and role == "user":
            content, before = _content(text, before), []
        written.append(f'{{"role": "{role}", "content": {content}}}')
    return ", ".join(written)


def _content(text: str, before: Sequence[str]) -> str:
    """The parts of a user's message, which media of the kinds ``before`` begin."""
    pieces = PLACEHOLDER.split(text)  # text, kind, text, kind, ..., text
    pieces = [part for kind in before for part in ("", kind)] + pieces
    parts = [
        _MEDIUM[piece] if i % 2 else f'{{"type": "text", "text": {quoted(piece)}}}'
        for i, piece in enumerate(pieces)
        if piece
    ]
    return "[\n" + "".join(f"    {part},\n" for part in parts) + "]"


def _generation(policy: nn.Module, conditioner: Conditioner, recipe: Recipe, what: What) -> list[str]:
    """Arguments of ``generate``; an adapter's base model may end at fewer tokens than responses in training did, and
    take tokens that training never sampled."""
    ends = _ends(policy, conditioner.saved)
    given = exported_config(base_model(policy)).eos_token_id
    known = what == "merged" or ends == (given if isinstance(given, list) else [given])
    limit = f"max_new_tokens={recipe.decoding.max_new_tokens}"
    without = [f"suppress_tokens={conditioner.forbidden}"] if what == "lora" and conditioner.forbidden else []
    return [limit, "do_sample=False", *([] if known else [f"eos_token_id={ends}"]), *without]


def _ends(policy: nn.Module, saved: Tokenizer | Processor) -> list[int]:
    """The tokens at which responses ended in training."""
    return stop_tokens(base_model(policy), tokenizer_of(saved))

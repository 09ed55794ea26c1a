"""Chat templates of other people's models, those of the package trl, with a tokenizer that has their control tokens."""

import re
from pathlib import Path

import pytest

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

from transformers import AddedToken, AutoTokenizer  # noqa: E402

trl = pytest.importorskip("trl")
TEMPLATES = sorted(
    file for file in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja") if "_training" not in file.name
)
WORDS = [
    "apple",
    "two words",
    "17",
    "a\nb",
    "x = {1: 'y'}",
    "  led",
    "end  ",
    "é日本",
    '{"error": "no"}',
    "<b>bold</b>",
]
"""Contents of what is told; some have white space at their ends, which some templates trim."""


def tokenizer_of(template):
    """A tokenizer whose control tokens are those that the template writes."""
    made = AutoTokenizer.from_pretrained(Path(mmrl.__file__).parents[1] / "pipelines/llm/models/sums-qwen3")
    made.chat_template = template
    made.bos_token = "<|endoftext|>"
    spelled = {*re.findall(r"<\|[\w/ ]+\|>|<[a-z_/]+>|\[/?[A-Z_]+\]", template)}
    added = [text for text in sorted(spelled) if text not in made.get_vocab()]
    made.add_tokens([AddedToken(text, special=text.startswith("<|"), normalized=False) for text in added])
    return made


def whole(saved, messages, answer):
    """The conversation as the template writes it, with contents as text or as lists, whichever shows ``answer``."""
    shown = saved.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    if answer in shown:
        return shown
    parts = [{**one, "content": [{"type": "text", "text": one["content"]}]} for one in messages]
    return saved.apply_chat_template(parts, tokenize=False, add_generation_prompt=True)


def squeezed(text):
    return "".join(text.split())

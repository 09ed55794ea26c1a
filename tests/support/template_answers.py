"""Shared by the tests of template answers and others."""

import mmrl
from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()


def chat_of(tokenizer, template, **variables):
    tokenizer.chat_template = template
    return mmrl.load("pipelines", "llm/chat").Chat(tokenizer, [tokenizer.eos_token_id], variables)

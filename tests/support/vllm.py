"""Shared by the tests of vllm and others."""

import pytest
import torch

from mmrl.core.rollout_engine import Request
from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before anything imports torchvision
pytest.importorskip("vllm")
SPECIAL = ("<|endoftext|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PAD, END, VISION, VISION_END, IMAGE, VIDEO = range(256, 262)
TEXT = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": END,
    "pad_token_id": PAD,
}
PROMPT = list(range(5, 150))


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=made,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
    )


def log_probs(model, prompt, tokens, temperature=1.0, **inputs):
    ids = torch.tensor([[*prompt, *tokens]])
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0].float()
    rows = torch.log_softmax(logits / temperature, -1)[len(prompt) - 1 : -1]
    return rows.gather(-1, torch.tensor(tokens).unsqueeze(-1)).squeeze(-1)


def gap(model, request, answer, temperature=1.0, **inputs):
    prompt = [*request.prompt_ids, *request.partial]
    expected = log_probs(model, prompt, answer.token_ids, temperature, **inputs)
    return (expected - torch.tensor(answer.log_probs)).abs().max().item()


def ask(seed=0, prompt=PROMPT, **extra):
    return Request(prompt, "", seed=seed, **extra)

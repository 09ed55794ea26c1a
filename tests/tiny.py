"""Tiny real language models with random weights, made in memory: no download, no file of ours."""

from pathlib import Path

import torch

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def byte_characters():
    """The 256 printable stand-ins of byte-level tokenizers."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in kept]
    return [chr(c) for c in (*kept, *(256 + n for n in range(len(others))))]


def tokenizer():
    from transformers import Qwen2Tokenizer

    vocab = {c: i for i, c in enumerate(byte_characters())}
    made = Qwen2Tokenizer(vocab=vocab, merges=[], eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_tokens(SPECIAL, special_tokens=True)
    made.chat_template = CHATML
    return made


def language_model(folder: Path, kind: str = "qwen3", sharp: float = 0.3, seed: int = 0) -> Path:
    """Save a model of ``kind`` with its tokenizer into ``folder``; ``sharp`` weights make its choices matter."""
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    config, model = {"qwen3": (Qwen3Config, Qwen3ForCausalLM), "llama": (LlamaConfig, LlamaForCausalLM)}[kind]
    tok = tokenizer()
    torch.manual_seed(seed)
    made = model(
        config(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            vocab_size=len(tok),
            max_position_embeddings=256,
            initializer_range=sharp,
            tie_word_embeddings=True,
            eos_token_id=tok.eos_token_id,
            pad_token_id=tok.pad_token_id,
            bos_token_id=None,
        )
    )
    made.save_pretrained(folder)
    tok.save_pretrained(folder)
    return folder

"""A small tokenizer trained on a few texts, for models that are made here and not downloaded."""

# transformers annotates this constructor more narrowly than it is documented.
# pyright: reportArgumentType=false

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mmrl.core.torchvision_on_cpu import allow_cpu_only

if TYPE_CHECKING:
    from transformers import Qwen2Tokenizer


def learned(
    texts: Sequence[str], size: int, special: Sequence[str], template: str, context: int, **named: str
) -> Qwen2Tokenizer:
    """Byte-level BPE of at most ``size`` pieces, lossless on any text: the words of ``texts`` become a token each.

    ``special`` tokens come on top; those a processor asks for by name are ``named`` (``image_token``). ``<|im_end|>``
    ends a turn, ``<|endoftext|>`` pads, ``template`` is the chat's and ``context`` the longest text in tokens.
    """
    allow_cpu_only()  # transformers imports torchvision wherever it is installed
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers
    from transformers import Qwen2Tokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    learner.train_from_iterator(texts, trainer)
    merges = [tuple(pair) for pair in json.loads(learner.to_str())["model"]["merges"]]
    pieces = dict.fromkeys([*alphabet, *("".join(pair) for pair in merges)])
    tokenizer = Qwen2Tokenizer(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=merges,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=context,
        extra_special_tokens=named,
    )
    tokenizer.add_tokens([s for s in special if s not in tokenizer.get_vocab()], special_tokens=True)
    tokenizer.chat_template = template
    return tokenizer

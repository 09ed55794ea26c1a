"""Does an exported language model answer alike in plain transformers and in vLLM?

    mmrl export RUN --out FOLDER
    python benchmarks/exported_answers.py FOLDER "Write about the sea. Use at most 8 words." ...

Both load the folder as any other model, without code of mmrl, and answer greedily in float32 with the folder's
chat template. vLLM has to be installed (docs/engines.md). Prints the answers, and exits with 1 where the tokens differ.
Where the two best tokens are nearly equal, rounding may choose another one: the gap of the logits is printed then.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.inference.vllm_api import environment, mend, require_vllm

PROMPTS = (
    "Write a sentence about bread. Use at most 8 words.",
    'Write about music. Answer with JSON only, with the keys "weight" and "age".',
    'Write a sentence about stones. Use the words "together" and "never".',
    'Write a sentence about planes. Use the words "colour", "clean" and "light" in this order.',
)


def of_transformers(path: str, chats: Sequence[list[dict[str, str]]], most: int) -> tuple[list[list[int]], list[float]]:
    """Of each chat the tokens, and the smallest gap between the best two logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    answers: list[list[int]] = []
    gaps: list[float] = []
    for chat in chats:
        given = tokenizer.apply_chat_template([chat], add_generation_prompt=True, return_tensors="pt", return_dict=True)
        made = model.generate(
            **given, max_new_tokens=most, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        answers.append(made.sequences[0, given["input_ids"].shape[1] :].tolist())
        best = torch.stack(made.logits)[:, 0].topk(2).values
        gaps.append((best[:, 0] - best[:, 1]).min().item())
    return answers, gaps


def of_vllm(path: str, chats: Sequence[list[dict[str, str]]], most: int) -> list[tuple[list[int], str]]:
    """Of each chat the tokens and the text."""
    for name, value in {**environment(), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}.items():
        os.environ.setdefault(name, value)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    mend()
    from transformers import AutoConfig
    from vllm import LLM, SamplingParams

    longest = min(1024, AutoConfig.from_pretrained(path).max_position_embeddings)
    engine = LLM(path, dtype="float32", max_model_len=longest, enforce_eager=True, disable_log_stats=True)
    outputs = engine.chat(list(chats), SamplingParams(temperature=0, max_tokens=most), use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.outputs[0].text) for output in outputs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="what mmrl export wrote")
    parser.add_argument("prompts", nargs="*", default=list(PROMPTS))
    parser.add_argument("--tokens", type=int, default=48, help="most tokens of an answer")
    given = parser.parse_args()
    require_vllm()
    chats = [[{"role": "user", "content": prompt}] for prompt in given.prompts]
    allow_cpu_only()
    ours, gaps = of_transformers(given.folder, chats, given.tokens)
    theirs = of_vllm(given.folder, chats, given.tokens)
    for prompt, tokens, gap, (other, text) in zip(given.prompts, ours, gaps, theirs, strict=True):
        said = (
            "the same tokens" if tokens == other else f"OTHER TOKENS (smallest gap of the best two logits: {gap:.4f})"
        )
        print(f"{prompt}\n  {text!r}: {said}")
    same = sum(tokens == other for tokens, (other, _) in zip(ours, theirs, strict=True))
    print(f"{same} of {len(chats)} answers have the same tokens in transformers and in vLLM")
    sys.exit(same != len(chats))


if __name__ == "__main__":
    main()

"""Make the small language model of ``sums-tool``: a real Qwen3 model that may call a calculator, and seldom does.

    python -m tools.make_models.products --out pipelines/llm/models/products-qwen3

It learns products of three digits by next-token prediction: its own answer in most examples, which a model of this
size cannot compute, and in some a call of the tool ``calculate`` and then the answer that the tool told. So it can copy
numbers into a call and out of a result, and nothing has told it to prefer that. ``log.jsonl`` beside the weights is the
log of the run that made them.
"""

# The model libraries annotate these calls more narrowly than they are documented.
# pyright: reportArgumentType=false

from __future__ import annotations

import argparse
import json
import random
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmrl
from mmrl.core.trajectory import Prompt
from mmrl.episodes.tools import schemas_of
from tools.make_models.learned_tokenizer import learned
from tools.make_models.sums import SPECIALS, Example, build, fit, replies_to

TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
CHAT = (
    "{% if tools %}<|im_start|>system\nTools:{% for tool in tools %} {{ tool['function']['name'] }}"
    "({{ tool['function']['parameters']['properties'] | join(', ') }}){% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message['role'] == 'tool' %}<|im_start|>user\n<tool_response>"
    "{{ message['content'] }}</tool_response><|im_end|>\n{% else %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML, with the tools by their names in front and a result as a message of the user, as Qwen's has it."""


def make_tokenizer(words: Sequence[str]) -> Any:
    """The words become a token each, digits stay single. The marks of calls are added tokens and not special, as in
    Qwen's, so that they are text of a response."""
    tokenizer = learned(words, 512, SPECIALS, CHAT, 256)
    tokenizer.add_tokens([token for token in TOOL_TOKENS if token not in tokenizer.get_vocab()])
    return tokenizer


def call_of(prompt: Prompt) -> str:
    """The call of the calculator that answers ``prompt``."""
    expression = prompt.text.removeprefix("What is ").removesuffix("?")
    inside = json.dumps({"name": "calculate", "arguments": {"expression": expression}})
    return f"<tool_call>{inside}</tool_call>"


class Writer:
    """The examples of products in the chat format of ``tokenizer``."""

    def __init__(self, tokenizer: Any) -> None:
        from mmrl.models.text.told import Told, behind_an_answer

        self.tokenizer = tokenizer
        self.tools = schemas_of([mmrl.load("environments", "calculator:calculate")])
        self.end = tokenizer.eos_token_id

        def told(result: str, written: list[int]) -> list[int]:
            text = behind_an_answer(tokenizer, {"tools": self.tools}, [{"role": "tool", "content": result}])
            ids = tokenizer(text).input_ids
            return Told(ids, ids).behind(written, [self.end]).tokens

        self._told = told

    def asked(self, prompt: Prompt, *, tools: bool) -> list[int]:
        chat = [{"role": "user", "content": prompt.text}]
        given = {"tools": self.tools} if tools else {}
        shown = self.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True, **given)
        return self.tokenizer(shown).input_ids

    def direct(self, prompt: Prompt, *, tools: bool) -> Example:
        given = self.asked(prompt, tools=tools)
        return [*given, *self.tokenizer(f"answer: {prompt.meta['answer']}").input_ids, self.end], len(given)

    def by_tool(self, prompt: Prompt) -> tuple[Example, Example]:
        """Its call, and its answer behind the result."""
        given = self.asked(prompt, tools=True)
        called = [*given, *self.tokenizer(call_of(prompt)).input_ids, self.end]
        told = [*called, *self._told(str(prompt.meta["answer"]), called)]
        answer = self.tokenizer(f"answer: {prompt.meta['answer']}").input_ids
        return (called, len(given)), ([*told, *answer, self.end], len(told))


def measured(model: Any, writer: Writer, held_out: Sequence[Prompt]) -> dict[str, float]:
    """The shares of ``held_out`` that are answered right alone, where the tool is shown and behind its result, and of
    the calls among what is written."""
    found: dict[str, float] = {}
    for name, tools in (("alone", False), ("shown", True)):
        said = replies_to(model, writer.tokenizer, [writer.asked(p, tools=tools) for p in held_out], 1.0)
        right = [text == f"answer: {p.meta['answer']}" for text, p in zip(said, held_out, strict=True)]
        found[name] = sum(right) / len(right)
        found[f"{name}_calls"] = sum("<tool_call>" in text for text in said) / len(said)
        found[f"{name}_right_calls"] = sum(t == call_of(p) for t, p in zip(said, held_out, strict=True)) / len(said)
    both = [writer.by_tool(p)[1] for p in held_out]
    said = replies_to(model, writer.tokenizer, [ids[:given] for ids, given in both], 1.0)
    found["told"] = sum(t == f"answer: {p.meta['answer']}" for t, p in zip(said, held_out, strict=True)) / len(said)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--examples", type=int, default=40_000)
    parser.add_argument("--calls", type=float, default=0.2, help="share of calls where the tool is shown")
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--every", type=int, default=100, help="steps between two measurements")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(1)
    products = mmrl.load("datasets", "products")
    train = products.prompts("all", count=arguments.examples, seed=arguments.seed)
    held_out = products.prompts("heldout", count=300, seed=arguments.seed + 1)
    words = [
        "What is 1 * 2?",
        "answer: 1",
        call_of(train[0]),
        "user",
        "system",
        "assistant",
        "Tools: calculate(expression)",
    ]
    tokenizer = make_tokenizer(words)
    model, writer, rng = build(tokenizer), Writer(tokenizer), random.Random(arguments.seed)
    examples: list[Example] = []
    for prompt in train:
        shown = rng.random() < 0.7
        if shown and rng.random() < arguments.calls:
            examples += writer.by_tool(prompt)
        else:
            examples.append(writer.direct(prompt, tools=shown))

    def measure() -> dict[str, float]:
        return measured(model, writer, held_out)

    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "log.jsonl").open("w") as lines:

        def log(**row: Any) -> None:
            print(json.dumps(row), file=lines, flush=True)
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

        log(command=shlex.join(["python", "-m", "tools.make_models.products", *sys.argv[1:]]))
        how: dict[str, Any] = {
            "log": log,
            "measure": measure,
            "seed": arguments.seed,
            "every": arguments.every,
            "half": False,
        }
        fit(model, examples, arguments.steps, arguments.lr, **how)
        model.to(torch.bfloat16).to(torch.float32)  # what is written is what is measured
        log(**measure())
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()

"""Make the small language models that mmrl ships: real Qwen3 models with a real tokenizer, trained from scratch.

    python -m tools.make_models.sums solver --out pipelines/llm/models/sums-qwen3

is the model that RL starts from. It learns right responses to prompts of the ``sums`` data set (all chains, so that
RL's held-out ones are unseen by RL only, not by the base model) by next-token prediction on the response. First they do
one operation a step, as exercises do; then, as texts do, they differ in how much they do at once: after each operation
a step may end or not. A model of this size can do one operation far better than two or three in its head, and nothing
has told it yet to prefer that. Training also stops early, so that its arithmetic slips.

    python -m tools.make_models.sums critic --solver pipelines/llm/models/sums-qwen3 --out ...

is a generative judge of steps. From the solver's weights it learns to read a prompt with the numbered steps of a
response (``rubric.txt`` beside its weights) and to write which are wrong, as JSON: ``{"wrong": [2]}``. Its examples are
responses that the solver sampled, labelled by ``wrong_steps`` of the data set, mixed with more solving.

``log.jsonl`` beside the weights is the log of the run that made them.
"""

# The model libraries annotate these calls more narrowly than they are documented.
# pyright: reportArgumentType=false

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging.rubric import Rubric
from tools.make_models.learned_tokenizer import learned

allow_cpu_only()  # transformers imports torchvision wherever it is installed
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen2Tokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{{ part['text'] }}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""ChatML: each message between two special tokens, its content a string or a list of text parts."""
RUBRIC = """{{ prompt }}

{% for step in steps %}
Step {{ loop.index }}: {{ step }}
{% endfor %}

Which steps are wrong?"""
"""What the critic reads: a rubric of ``mmrl.rewards.judging`` in its mode ``steps``."""
MOST_TOKENS = 48
"""Of a response when the models are measured: a right one has 39 at most."""

Example = tuple[list[int], int]
"""Token ids, and how many of them are given rather than learned."""
Log = Callable[..., None]


def make_tokenizer(texts: Sequence[str]) -> Qwen2Tokenizer:
    """The words of ``texts`` become a token each, digits stay single."""
    return learned(texts, 512, SPECIALS, CHAT, 256)


def build(tokenizer: Any) -> Qwen3ForCausalLM:
    """A random Qwen3ForCausalLM of 0.8 M parameters."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=256,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def asked(tokenizer: Any, text: str) -> list[int]:
    """The tokens of the user's message ``text``, up to where the model's begins."""
    chat = [{"role": "user", "content": text}]
    return tokenizer(tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)).input_ids


def example(tokenizer: Any, text: str, reply: str) -> Example:
    """The message ``text`` and the ``reply`` to learn."""
    given = asked(tokenizer, text)
    return given + tokenizer(reply).input_ids + [tokenizer.eos_token_id], len(given)


def fit(
    model: Any,
    examples: Sequence[Example],
    steps: int,
    lr: float,
    log: Log,
    measure: Callable[[], dict[str, float]],
    *,
    seed: int = 0,
    every: int = 100,
    fall: float = 0.9,
    batch: int = 64,
    half: bool = True,
) -> None:
    """Next-token prediction on the replies, ``batch`` of them a step.

    ``half``: in bfloat16, which is slow on a CPU without instructions for it. The rate warms up over 100 steps and
    loses the share ``fall`` of itself in a line by the end. ``measure()`` gives what is logged beside the loss after
    each ``every`` steps.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
    generator, pad = torch.Generator().manual_seed(seed), model.config.pad_token_id
    cpu, losses = 0.0, []
    for step in range(1, steps + 1):
        started = time.process_time()
        optimizer.param_groups[0]["lr"] = lr * min(1.0, step / 100) * (1 - fall * step / steps)
        rows = [examples[i] for i in torch.randint(len(examples), (batch,), generator=generator).tolist()]
        longest = max(len(ids) for ids, _ in rows)
        tokens = torch.full((batch, longest), pad)
        labels = torch.full((batch, longest), -100)
        for i, (ids, given) in enumerate(rows):
            tokens[i, : len(ids)] = torch.tensor(ids)
            labels[i, given : len(ids)] = torch.tensor(ids[given:])
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            logits = model(input_ids=tokens).logits[:, :-1]
        loss = F.cross_entropy(logits.float().flatten(0, 1), labels[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        cpu += time.process_time() - started
        if step % every == 0 or step == steps:
            log(step=step, cpu_seconds=round(cpu, 1), loss=sum(losses) / len(losses), **measure())
            losses.clear()


def replies(model: Any, tokenizer: Any, texts: Sequence[str], temperature: float, most: int = MOST_TOKENS) -> list[str]:
    """What the model answers to each of ``texts``, greedily at ``temperature`` 0; draws from the global generator."""
    return replies_to(model, tokenizer, [asked(tokenizer, text) for text in texts], temperature, most)


def replies_to(
    model: Any, tokenizer: Any, prompts: Sequence[list[int]], temperature: float, most: int = MOST_TOKENS
) -> list[str]:
    """``replies`` to prompts that are tokens."""
    found = []
    for start in range(0, len(prompts), 512):
        rows = prompts[start : start + 512]
        longest = max(map(len, rows))
        ids = torch.tensor([[tokenizer.pad_token_id] * (longest - len(r)) + r for r in rows])
        mask = torch.tensor([[0] * (longest - len(r)) + [1] * len(r) for r in rows])
        how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
        with torch.no_grad():
            out = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=most, **how)
        found += tokenizer.batch_decode(out[:, longest:], skip_special_tokens=True)
    return found


def accuracy(model: Any, tokenizer: Any, prompts: Sequence[Prompt]) -> dict[str, float]:
    """The share of ``prompts`` answered right by the verifier ``answer:number``, greedily and sampled at temperature 1,
    and the share of sampled responses that do one operation a step."""
    verifier = mmrl.load("rewards", "answer:number")(after=mmrl.load("datasets", "sums").ANSWER)
    found: dict[str, float] = {"prompts": len(prompts)}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        texts = replies(model, tokenizer, [p.text for p in prompts], temperature)
        samples = [Sample(p, SampleId(0, i, 0, 0), text=t) for i, (p, t) in enumerate(zip(prompts, texts, strict=True))]
        found[name] = sum(verifier.score(samples, context=Context())["correct"]) / len(samples)
        found["one_a_step"] = sum(t.count("=") == len(p.meta["steps"]) for p, t in zip(prompts, texts, strict=True))
    return {**found, "one_a_step": found["one_a_step"] / len(prompts)}


def make_solver(arguments: argparse.Namespace, log: Log) -> tuple[Any, Any]:
    """The base model of RL, and its tokenizer."""
    sums = mmrl.load("datasets", "sums")
    words = [sums.PREFIX, sums.ANSWER, sums.BREAK, "user", "system", "assistant", RUBRIC, '{"wrong": []}']
    tokenizer = make_tokenizer(words)
    model = build(tokenizer)
    prompts = sums.prompts("all", count=arguments.examples)
    held_out = sums.prompts("heldout", count=2000)
    log(parameters=sum(p.numel() for p in model.parameters()), vocabulary=len(tokenizer))

    def measure(n: int = 200) -> dict[str, float]:
        return accuracy(model, tokenizer, held_out[:n])

    how: dict[str, Any] = {"log": log, "measure": measure, "seed": arguments.seed, "every": arguments.every}
    fit(model, solved(tokenizer, prompts, arguments.seed), arguments.exercises, arguments.lr, fall=0.0, **how)
    fit(model, solved(tokenizer, prompts, arguments.seed, arguments.ends), arguments.steps, arguments.lr, **how)
    model.to(torch.bfloat16).to(torch.float32)  # what is written is what is measured
    log(**measure(2000))
    return model, tokenizer


def make_critic(arguments: argparse.Namespace, log: Log) -> tuple[Any, Any]:
    """The judge of steps, and its tokenizer."""
    sums = mmrl.load("datasets", "sums")
    tokenizer = AutoTokenizer.from_pretrained(arguments.solver)
    model = AutoModelForCausalLM.from_pretrained(arguments.solver, dtype=torch.float32).eval()
    prompts = sums.prompts("all", count=arguments.examples, seed=1)
    held_out = sums.prompts("heldout", count=2000, seed=1)
    drawn = replies(model, tokenizer, [p.text for p in [*prompts, *held_out]], 1.0)
    log(sampled=len(drawn), wrong=sum(bool(sums.wrong_steps(p, d)) for p, d in zip(prompts, drawn, strict=False)))
    critiques = [example(tokenizer, *critique(p, d)) for p, d in zip(prompts, drawn, strict=False)]
    more = solved(tokenizer, sums.prompts("all", count=arguments.examples), arguments.seed)
    truths = [critique(p, d) for p, d in zip(held_out, drawn[len(prompts) :], strict=True)]

    def measure(n: int = 400) -> dict[str, float]:
        return agreement(truths[:n], replies(model, tokenizer, [text for text, _ in truths[:n]], 0.0, 16))

    rng = random.Random(arguments.seed)
    mixed = rng.sample(critiques + more, len(critiques) + len(more))
    fit(model, mixed, arguments.steps, arguments.lr, log, measure, seed=arguments.seed, every=arguments.every)
    model.to(torch.bfloat16).to(torch.float32)
    log(**measure(2000))
    (arguments.out / "rubric.txt").write_text(RUBRIC)
    return model, tokenizer


def solved(tokenizer: Any, prompts: Sequence[Prompt], seed: int, ends: float = 1.0) -> list[Example]:
    """Right responses to ``prompts``, cut into steps at random: one ends after an operation with chance ``ends``."""
    sums, rng = mmrl.load("datasets", "sums"), random.Random(seed)
    found = []
    for prompt in prompts:
        sizes = [1]
        for _ in prompt.meta["steps"][1:]:
            if rng.random() < ends:
                sizes.append(1)
            else:
                sizes[-1] += 1
        found.append(example(tokenizer, prompt.text, sums.response(prompt, sizes)))
    return found


def critique(prompt: Prompt, response: str) -> tuple[str, str]:
    """What the critic is asked about ``response``, and what it should write."""
    sums = mmrl.load("datasets", "sums")
    sample = Sample(prompt, SampleId(0, 0, 0, 0), text=response)
    text = "".join(str(part) for part in Rubric(RUBRIC, "steps").render([sample]))
    return text, json.dumps({"wrong": sums.wrong_steps(prompt, response)})


def agreement(truths: Sequence[tuple[str, str]], written: Sequence[str]) -> dict[str, float]:
    """How the critiques ``written`` compare with the truth: the share that is equal as a whole, and that is JSON; over
    single steps the share judged alike, and precision and recall of wrong ones."""
    same = alike = steps = hits = named = there = readable = 0
    for (text, truth), found in zip(truths, written, strict=True):
        numbers = set(range(1, text.count("\nStep ") + 1))
        wanted = set(json.loads(truth)["wrong"])
        try:
            said = {n for n in json.loads(found)["wrong"] if n in numbers}
            readable += 1
        except (ValueError, TypeError, KeyError):
            said = set()
        same += found == truth
        alike += len(numbers) - len(said ^ wanted)
        steps, hits, named, there = (
            steps + len(numbers),
            hits + len(said & wanted),
            named + len(said),
            there + len(wanted),
        )
    return {
        "responses": len(truths),
        "same": same / len(truths),
        "json": readable / len(truths),
        "steps_alike": alike / steps,
        "precision": hits / max(named, 1),
        "recall": hits / max(there, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["solver", "critic"])
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--solver", type=Path, help="the model whose responses the critic learns to judge")
    parser.add_argument("--examples", type=int, default=60_000)
    parser.add_argument("--exercises", type=int, default=700, help="steps of a solver on one operation a step")
    parser.add_argument("--steps", type=int, default=300, help="steps on responses of every cut, or of a critic")
    parser.add_argument("--ends", type=float, default=0.5, help="chance that a step ends after an operation")
    parser.add_argument("--every", type=int, default=100, help="steps between two measurements")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    if arguments.kind == "critic" and not arguments.solver:
        parser.error("a critic learns from a solver's responses: add --solver DIRECTORY")
    torch.manual_seed(arguments.seed)
    torch.set_num_threads(arguments.threads)
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "log.jsonl").open("w") as lines:

        def log(**row: Any) -> None:
            print(json.dumps(row), file=lines, flush=True)
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

        log(command=shlex.join(["python", "-m", "tools.make_models.sums", *sys.argv[1:]]))
        model, tokenizer = (make_solver if arguments.kind == "solver" else make_critic)(arguments, log)
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()

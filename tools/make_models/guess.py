"""Make the small language model of ``guess-number``: a real Qwen3 model that plays TextArena's GuessTheNumber, badly.

    python -m tools.make_models.guess --out pipelines/llm/models/guess-qwen3

It learns moves of games in two stages: first of players who guess only numbers that agree with what the game has told,
so that it reads the answers; then of two sorts, most of whom guess any number, so that it plays as badly as they do. On
both sorts from the start it learns to read much later.
``log.jsonl`` beside the weights is the log of the run that made them.
"""

# The model libraries annotate these calls more narrowly than they are documented.
# pyright: reportArgumentType=false

from __future__ import annotations

import argparse
import json
import random
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import mmrl
from mmrl.core.episode import Action
from mmrl.core.trajectory import Prompt
from tools.make_models.learned_tokenizer import learned
from tools.make_models.sums import CHAT, SPECIALS, Example, fit, replies_to

GAME = "GuessTheNumber-v0"
TEXT = "Play this game."
MOST = 7
"""The largest secret number."""
CONTEXT = 512
_MOVE = re.compile(r"\[(\d+)\]")

Messages = list[dict[str, str]]


def build(tokenizer: Any) -> Any:
    """A random Qwen3ForCausalLM of 0.2 M parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def walk(rng: random.Random, moves: int, *, careful: bool) -> Messages:
    """A game up to its last move, which is the message of the assistant at the end; at most ``moves`` of them. A
    ``careful`` player draws among the numbers that may still be the secret."""
    game: Any = getattr(mmrl.load("environments", "textarena"), GAME)(make={"max_number": MOST})
    told, least, most = game.reset(Prompt("p", TEXT), rng.randrange(2**31)), 1, MOST
    said: Messages = [{"role": "user", "content": f"{TEXT}\n\n{told}"}]
    while True:
        guess = rng.randint(least, most) if careful else rng.randint(1, MOST)
        said.append({"role": "assistant", "content": f"[{guess}]"})
        shown = game.step(Action(f"[{guess}]"))
        if shown.done or len(said) >= 2 * moves:
            return said
        said.append({"role": "user", "content": shown.content})
        least = max(least, guess + 1) if "is higher" in shown.content else least
        most = min(most, guess - 1) if "is lower" in shown.content else most


def walks(count: int, careful: float, seed: int, most: int = 3) -> list[Messages]:
    """``count`` games of at most ``most`` moves, a share ``careful`` of them by careful players."""
    rng = random.Random(seed)
    return [walk(rng, rng.randint(1, most), careful=rng.random() < careful) for _ in range(count)]


def example(tokenizer: Any, said: Messages, begins: int = 1) -> Example:
    """All behind the first ``begins`` messages is learned: moves, and between them what the game answers."""
    given, whole = (
        tokenizer(tokenizer.apply_chat_template(said[:n], tokenize=False, add_generation_prompt=True)).input_ids
        for n in (begins, len(said) - 1)
    )
    return [*whole, *tokenizer(said[-1]["content"]).input_ids, tokenizer.eos_token_id], len(given)


def measured(model: Any, tokenizer: Any, held: Sequence[Messages]) -> dict[str, float]:
    """The share of moves, in games of careful players, that are written right, and that agree with what was told."""
    given = [example(tokenizer, said, len(said) - 1) for said in held]
    said = replies_to(model, tokenizer, [ids[:n] for ids, n in given], 1.0, 8)
    agree = [_agrees(text, one) for text, one in zip(said, held, strict=True)]
    return {"moves": sum(one is not None for one in agree) / len(held), "agree": sum(map(bool, agree)) / len(held)}


def _agrees(text: str, said: Messages) -> bool | None:
    """None for a text that is no move."""
    if (move := _MOVE.fullmatch(text)) is None:
        return None
    least, most = 1, MOST
    for asked, told in zip(said[1:-1:2], said[2:-1:2], strict=True):
        guess = int(asked["content"].strip("[]"))
        least, most = (max(least, guess + 1), most) if "is higher" in told["content"] else (least, min(most, guess - 1))
    return least <= int(move[1]) <= most


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory to write the model to")
    parser.add_argument("--examples", type=int, default=8000)
    parser.add_argument(
        "--careful", type=float, default=0.4, help="share of games by careful players, in the second stage"
    )
    parser.add_argument("--steps", type=int, default=300, help="of the second stage")
    parser.add_argument("--first", type=int, default=1100, help="steps of the first stage, on games of careful players")
    parser.add_argument("--every", type=int, default=150, help="steps between two measurements")
    parser.add_argument("--lr", type=float, default=1.2e-3)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    games = walks(arguments.examples, arguments.careful, 0)
    words = ["user", "system", "assistant", *{message["content"] for said in games[:500] for message in said}]
    tokenizer = learned(words, 1024, SPECIALS, CHAT, CONTEXT)
    model = build(tokenizer)
    held = walks(200, 1.0, 1)
    stages = [
        (walks(arguments.examples, 1.0, 2), arguments.first, arguments.lr),
        (games, arguments.steps, arguments.lr / 2),
    ]
    arguments.out.mkdir(parents=True, exist_ok=True)
    with (arguments.out / "log.jsonl").open("w") as lines:

        def log(**row: Any) -> None:
            print(json.dumps(row), file=lines, flush=True)
            print("  ".join(f"{k} {v:.4g}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)

        log(command=shlex.join(["python", "-m", "tools.make_models.guess", *sys.argv[1:]]))
        log(parameters=sum(p.numel() for p in model.parameters()), vocabulary=len(tokenizer))
        for played, steps, rate in stages:
            taught = [example(tokenizer, said) for said in played]
            log(longest=max(len(ids) for ids, _ in taught), mean=sum(len(ids) for ids, _ in taught) / len(taught))
            fit(
                model,
                taught,
                steps,
                rate,
                log,
                lambda: measured(model, tokenizer, held),
                every=arguments.every,
                batch=16,
                half=False,
            )
        model.to(torch.bfloat16).to(torch.float32)  # what is written is what is measured
        log(**measured(model, tokenizer, held))
    model.to(torch.bfloat16).save_pretrained(arguments.out)
    tokenizer.save_pretrained(arguments.out)


if __name__ == "__main__":
    main()

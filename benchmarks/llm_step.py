"""Seconds and memory of one GRPO step on text, compared with its bare model calls and TRL's ``GRPOTrainer``.

    OMP_NUM_THREADS=1 python benchmarks/llm_step.py --json out.json [--peer]

``--peer`` needs TRL: ``pip install -c constraints.txt trl`` (1.16 was tried). Arms, in turn A B C A B C on one thread,
each on a copy of the same model (random weights), with prompts, groups, lengths, reward and loss alike:

- bare   the model calls of our step (prefill, decoding over a cache, the forward passes of the update), backward passes
         and optimizer step
- mmrl   our step
- trl    a step of GRPOTrainer's own loop (with --peer)

Ratios are taken within a repeat and then summarised. Memory is the peak resident size over that of the built run, each
arm in a process of its own (Linux only). Before any timing, the calls of all arms are checked to be equal in number,
shape and length of the cache, and TRL's gradient on a micro-batch to be ours.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import llm_arms as arms
import peer_trl
import stepping
import torch
from stepping import CPU, Arm, say

from mmrl.core.clock import Clock
from mmrl.step.step_context import StepContext

RATIOS = {
    ("mmrl", "bare"): "our time over the bare calls' (goal: 1.15 or less)",
    ("trl", "mmrl"): "GRPOTrainer's time over ours (goal: 1.5 or more)",
    ("trl", "bare"): "GRPOTrainer's time over the bare calls'",
}


def warm_up(
    names: Sequence[str], context: StepContext, peer: peer_trl.Peer | None
) -> tuple[dict[str, Arm], dict[str, Any], list[arms.Call]]:
    """Every arm after one untimed step, what each asks of the model, and the calls of ours.

    Raises ``ValueError`` where the arms do unequal work.
    """
    made: dict[str, Arm] = {}
    seen: dict[str, list[arms.Call]] = {}
    for name in sorted(names, key=lambda n: n != "mmrl"):  # ours first: bare replays its calls
        made[name] = make_arm(name, context, peer, seen.get("mmrl", ()))
        model = peer.model if peer is not None and name == "trl" else context.pipeline.policy
        with arms.recording(model) as seen[name]:
            made[name](0, Clock(CPU))
    return {name: made[name] for name in names}, arms.same_work(seen), seen["mmrl"]


def make_arm(
    name: str, context: StepContext | None, peer: peer_trl.Peer | None, calls: Sequence[arms.Call] = ()
) -> Arm:
    """The arm of that name; ``bare`` needs the ``calls`` of one of our steps."""
    if name == "trl":
        assert peer is not None
        return peer.step
    assert context is not None
    return arms.bare(context, calls) if name == "bare" else arms.ours(context)


def one_arena() -> None:
    """Let all threads take memory from one heap: a thread's own would give memory back in other ways (glibc)."""
    try:
        ctypes.CDLL("libc.so.6").mallopt(-8, 1)  # M_ARENA_MAX
    except (OSError, AttributeError):
        say("no glibc here: TRL's thread may take its memory from another heap")


def memory_here(arguments: argparse.Namespace) -> dict[str, float]:
    """Resident MiB of an arm in this process."""
    size, name = arms.SIZES[arguments.sizes[0]], arguments.child
    with ExitStack() as stack:
        run = arms.make_run(size, arguments.model) if name != "trl" else None
        peer = stack.enter_context(opened(size, arguments.model)) if name == "trl" else None
        return stepping.memory_here(make_arm(name, run, peer, arms.load_calls(arguments.calls)))


def opened(size: arms.Size, model: Path) -> closing[peer_trl.Peer]:
    """TRL's trainer, its thread ended on leaving. Its output directory stays empty."""
    return closing(peer_trl.Peer(size, model, model / "trl"))


def table(name: str, result: dict[str, Any]) -> str:
    """Markdown: a row per arm, then the ratios, the work and the parity."""
    s = result["settings"]
    title = (
        f"{name}: a Qwen3 of {s['parameters'] / 1e6:.2f} M parameters (all train), vocabulary {s['vocabulary']}, "
        f"{s['prompts']} prompts of {s['prompt_tokens']} tokens x {s['group']} samples of {s['new_tokens']} tokens, "
        f"micro-batches of {s['micro_batch']}"
    )
    lines = stepping.table(title, result, arms.PHASES, RATIOS, "tokens")
    for what, value in result["parity"].items():
        lines.append(f"- relative difference between trl and mmrl, {what}: {value:.1e}")
    return "\n".join(lines)


def benchmark(name: str, arguments: argparse.Namespace, scratch: Path) -> tuple[dict[str, Any], str]:
    """Everything that is measured at one size, and its table."""
    size, model, calls = arms.SIZES[name], scratch / name, scratch / f"{name}-calls.pt"
    arms.write_model(size, model)
    names = ["bare", "mmrl", *(["trl"] if arguments.peer else [])]
    with ExitStack() as stack:
        run = arms.make_run(size, model)
        peer = stack.enter_context(opened(size, model)) if arguments.peer else None
        say(f"{name}: one untimed step of {', '.join(names)}")
        made, work, recorded = warm_up(names, run, peer)
        arms.save_calls(recorded, calls)
        parity = peer_trl.parity(peer, run) if peer else {}
        rows = stepping.measure(made, arguments.repeats)
    memory: dict[str, list[dict[str, float]]] = {arm: [] for arm in names}
    for repeat in range(arguments.memory_repeats):
        for arm in names:
            memory[arm].append(stepping.memory_of(__file__, arm, name, model, calls))
        say(f"memory: {repeat + 1} of {arguments.memory_repeats}")
    counted = {
        "parameters": sum(p.numel() for p in run.policy.trainable.values()),
        "prompt_tokens": recorded[0].kwargs["input_ids"].shape[1],
    }
    result = {
        "settings": counted | vars(size),
        "work": work,
        "parity": parity,
        "arms": {arm: {"seconds": rows[arm], "memory_mib": memory[arm]} for arm in names},
        "ratios": stepping.ratios(rows, RATIOS, "total"),
        "cpu_ratios": stepping.ratios(rows, RATIOS, "cpu"),
    }
    return result, table(name, result)


def profiled(name: str, scratch: Path) -> Arm:
    """Our arm, on a model of its own."""
    arms.write_model(arms.SIZES[name], scratch / name)
    return arms.ours(arms.make_run(arms.SIZES[name], scratch / name))


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = stepping.parser(__doc__, list(arms.SIZES))
    parser.add_argument("--peer", action="store_true", help="compare with TRL, which must be installed")
    arguments = stepping.parsed(parser, given)
    if arguments.peer and peer_trl.version() is None:
        parser.error("--peer: TRL is not installed here; pip install -c constraints.txt trl")
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch.set_num_threads(1)
    one_arena()
    if arguments.child:
        print(json.dumps(memory_here(arguments)))
        return
    stepping.run(
        __file__,
        sys.argv[1:] if given is None else given,
        arguments,
        ("trl", peer_trl.version() if arguments.peer else None),
        profiled,
        lambda name, scratch: benchmark(name, arguments, scratch),
    )


if __name__ == "__main__":
    main()

"""Seconds and memory of one GRPO iteration, beside the bare model calls inside it and, where given, beside flow_grpo.

    python benchmarks/diffusion_step.py --json out.json [--peer PATH_TO_FLOW_GRPO]

Arms, in turn A B C A B C on one thread, on the same models (random weights), prompts, steps, window and JPEG reward:

- bare             the transformer (UNet), VAE and text encoder calls of our iteration, backward passes, optimizer step
- mmrl             our iteration, its prompts new each time; a prompt is encoded once
- mmrl-per-sample  the same, but a prompt is encoded for every sample, as the peer does (with --peer)
- flow_grpo        the peer's own sampling and log-prob functions under the same loss and optimizer (with --peer)

Ratios are taken within a repeat and then summarised. Memory is the peak resident size over that of the built run, each
arm in a process of its own (Linux only). Before any timing, the transformer and VAE calls of all arms are checked to be
equal in number and shape, and the peer's numbers to be ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import diffusion_arms as arms
import peer_flow_grpo
import stepping
from stepping import CPU, Arm, say

from mmrl.batch import Run
from mmrl.report.clock import Clock

RATIOS = {
    ("mmrl", "bare"): "our time over the bare calls' (goal: 1.15 or less)",
    ("flow_grpo", "mmrl-per-sample"): "flow_grpo's time over ours for the same work (goal: 1.5 small, 1.0 large)",
    ("mmrl-per-sample", "mmrl"): "what encoding a prompt once, not for every sample, gives (algorithmic saving)",
    ("flow_grpo", "mmrl"): "flow_grpo's time over ours, that saving included",
}


def make_arm(name: str, run: Run, peer: Path | None, calls: Sequence[arms.Call] = ()) -> Arm:
    """The arm of that name on the models of ``run``; ``bare`` needs the ``calls`` of one of our iterations."""
    if name == "bare":
        return arms.bare(run, calls)
    if name == "flow_grpo":
        assert peer is not None
        return peer_flow_grpo.arm(peer_flow_grpo.load(peer), run)
    return {"mmrl": arms.ours, "mmrl-per-sample": arms.ours_per_sample}[name](run)


def warm_up(
    names: Sequence[str], run: Run, peer: Path | None
) -> tuple[dict[str, Arm], dict[str, Any], list[arms.Call]]:
    """Every arm after one untimed iteration, how often each calls each model, and the calls of ours.

    Raises ``ValueError`` where the arms do unequal work.
    """
    made: dict[str, Arm] = {}
    seen: dict[str, list[arms.Call]] = {}
    for name in sorted(names, key=lambda n: n != "mmrl"):  # ours first: bare replays its calls
        made[name] = make_arm(name, run, peer, seen.get("mmrl", ()))
        with arms.recording(run) as seen[name]:
            made[name](0, Clock(CPU))
    return {name: made[name] for name in names}, arms.same_work(seen), seen["mmrl"]


def table(name: str, result: dict[str, Any]) -> str:
    """Markdown: a row per arm, then the ratios, the work and the parity."""
    s = result["settings"]
    clip = f" x {s['frames']} frames" if s["frames"] else ""
    trained = f"LoRA of rank {s['lora']}" if s["lora"] else "all weights"
    title = (
        f"{name}: {s['family']}, a model of {s['parameters'] / 1e6:.2f} M parameters ({trained}: "
        f"{s['trainable'] / 1e6:.2f} M train), {s['pixels']} px{clip}, {s['prompts']} prompts x {s['group']} samples "
        f"in micro-batches of {s['micro_batch']}, {s['steps']} steps of which {s['window']} train"
    )
    lines = stepping.table(title, result, arms.PHASES, RATIOS, "rows")
    if result["parity"]:
        found = ", ".join(f"{what} {value:.1e}" for what, value in result["parity"].items())
        lines.append(f"- largest differences between flow_grpo and mmrl: {found}")
    return "\n".join(lines)


def benchmark(name: str, arguments: argparse.Namespace, scratch: Path) -> tuple[dict[str, Any], str]:
    """Everything that is measured at one size, and its table."""
    size, model, calls = arms.SIZES[name], scratch / name, scratch / f"{name}-calls.pt"
    arms.write_model(size, model)
    run = arms.make_run(size, model, arguments.lora)
    names = ["bare", "mmrl", *(["mmrl-per-sample", "flow_grpo"] if arguments.peer else [])]
    say(f"{name}: one untimed iteration of {', '.join(names)}")
    made, work, recorded = warm_up(names, run, arguments.peer)
    arms.save_calls(recorded, calls)
    parity = peer_flow_grpo.parity(peer_flow_grpo.load(arguments.peer), run) if arguments.peer else {}
    rows = stepping.measure(made, arguments.repeats)
    for row in rows.get("flow_grpo", ()):
        row["sample"] -= row["decode"]  # its pipeline decodes before it returns
    memory: dict[str, list[dict[str, float]]] = {arm: [] for arm in names}
    options = ["--lora", str(arguments.lora), *(["--peer", str(arguments.peer)] if arguments.peer else [])]
    for repeat in range(arguments.memory_repeats):
        for arm in names:
            memory[arm].append(stepping.memory_of(__file__, arm, name, model, calls, *options))
        say(f"memory: {repeat + 1} of {arguments.memory_repeats}")
    counted = {
        "parameters": sum(p.numel() for n, p in run.pipeline.policy.named_parameters() if "lora_" not in n),
        "trainable": sum(p.numel() for p in run.policy.trainable.values()),
        "lora": arguments.lora,
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


def profiled(name: str, arguments: argparse.Namespace, scratch: Path) -> Arm:
    """Our arm, on a model of its own."""
    arms.write_model(arms.SIZES[name], scratch / name)
    return arms.ours(arms.make_run(arms.SIZES[name], scratch / name, arguments.lora))


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = stepping.parser(__doc__, list(arms.SIZES))
    parser.add_argument("--lora", type=int, default=16, help="rank for all arms; 0 trains all weights in all arms")
    parser.add_argument("--peer", type=Path, help="a checkout of flow_grpo that has its fast scripts")
    arguments = stepping.parsed(parser, given)
    others = [name for name in arguments.sizes if arms.SIZES[name].family != "sd3"]
    if arguments.peer and others:
        parser.error(
            f"--peer: flow_grpo is compared on Stable Diffusion 3 alone; take {', '.join(others)} out of --sizes"
        )
    if arguments.peer:
        try:
            arguments.peer = peer_flow_grpo.find(arguments.peer)
        except FileNotFoundError as error:
            parser.error(str(error))
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    if arguments.child:
        run = arms.make_run(arms.SIZES[arguments.sizes[0]], arguments.model, arguments.lora)
        arm = make_arm(arguments.child, run, arguments.peer, arms.load_calls(arguments.calls))
        print(json.dumps(stepping.memory_here(arm)))
        return
    stepping.run(
        __file__,
        sys.argv[1:] if given is None else given,
        arguments,
        ("flow_grpo: sha256 of the files used", peer_flow_grpo.version(arguments.peer) if arguments.peer else None),
        lambda name, scratch: profiled(name, arguments, scratch),
        lambda name, scratch: benchmark(name, arguments, scratch),
    )


if __name__ == "__main__":
    main()

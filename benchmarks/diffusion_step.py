"""Seconds and memory of one GRPO iteration, compared with its bare model calls and, optionally, with peers.

    python benchmarks/diffusion_step.py --json out.json [--peer flow_grpo=PATH] [--peer flow_factory=PATH]

Arms, in turn A B C A B C on one thread, on the same models (random weights), prompts, steps, window and JPEG reward:

- bare             the transformer (UNet), VAE and text encoder calls of our iteration, backward passes, optimizer step
- mmrl             our iteration, its prompts new each time; a prompt is encoded once
- mmrl-per-sample  the same, but a prompt is encoded for every sample, as flow_grpo does (with it)
- flow_grpo        the peer's own sampling and log-prob functions under the same loss and optimizer
- flow_factory     the peer's own GRPO trainer: its sampling, rewards, advantages and update

Ratios are taken within a repeat and then summarised. Memory is the peak resident size over that of the built run, each
arm in a process of its own (Linux only). Before any timing, the transformer and VAE calls of all arms are checked to be
equal in number and shape, and the peers' numbers to be ours.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusion_arms as arms
import peer_flow_factory
import peer_flow_grpo
import stepping
from stepping import CPU, Arm, say

from mmrl.core.clock import Clock
from mmrl.step.step_context import StepContext

PEERS: dict[str, Any] = {"flow_grpo": peer_flow_grpo, "flow_factory": peer_flow_factory}
"""Modules that load a peer from a path, make its arm and compare its numbers with ours."""
RATIOS = {
    ("mmrl", "bare"): "our time over the bare calls' (goal: 1.15 or less)",
    ("flow_grpo", "mmrl-per-sample"): "flow_grpo's time over ours for the same work (goal: 1.5 small, 1.0 large)",
    ("mmrl-per-sample", "mmrl"): "what encoding a prompt once, not for every sample, gives (algorithmic saving)",
    ("flow_grpo", "mmrl"): "flow_grpo's time over ours, that saving included",
    ("flow_factory", "mmrl"): "Flow-Factory's time over ours for the same work",
}


def make_arm(name: str, context: StepContext, peers: Mapping[str, Path], calls: Sequence[arms.Call] = ()) -> Arm:
    """The arm of that name on the models of ``context``; ``bare`` needs the ``calls`` of one of our iterations."""
    if name == "bare":
        return arms.bare(context, calls)
    if name in PEERS:
        return PEERS[name].arm(PEERS[name].load(peers[name]), context)
    return {"mmrl": arms.ours, "mmrl-per-sample": arms.ours_per_sample}[name](context)


def warm_up(
    names: Sequence[str], context: StepContext, peers: Mapping[str, Path]
) -> tuple[dict[str, Arm], dict[str, Any], list[arms.Call]]:
    """Every arm after one untimed iteration, how often each calls each model, and the calls of ours.

    Raises ``ValueError`` where the arms do unequal work.
    """
    made: dict[str, Arm] = {}
    seen: dict[str, list[arms.Call]] = {}
    for name in sorted(names, key=lambda n: n != "mmrl"):  # ours first: bare replays its calls
        made[name] = make_arm(name, context, peers, seen.get("mmrl", ()))
        with arms.recording(context) as seen[name]:
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
    for peer, parity in result["parity"].items():
        found = ", ".join(f"{what} {value:.1e}" for what, value in parity.items())
        lines.append(f"- largest differences between {peer} and mmrl: {found}")
    return "\n".join(lines)


def benchmark(name: str, arguments: argparse.Namespace, scratch: Path) -> tuple[dict[str, Any], str]:
    """Everything that is measured at one size, and its table."""
    size, model, calls = arms.SIZES[name], scratch / name, scratch / f"{name}-calls.pt"
    arms.write_model(size, model)
    run = arms.make_run(size, model, arguments.lora)
    peers: dict[str, Path] = arguments.peers
    names = ["bare", "mmrl", *(["mmrl-per-sample"] if "flow_grpo" in peers else []), *peers]
    say(f"{name}: one untimed iteration of {', '.join(names)}")
    made, work, recorded = warm_up(names, run, peers)
    arms.save_calls(recorded, calls)
    parity = {peer: PEERS[peer].parity(PEERS[peer].load(path), run) for peer, path in peers.items()}
    rows = stepping.measure(made, arguments.repeats)
    for row in (row for peer in peers for row in rows[peer]):
        row["sample"] -= row["decode"]  # its pipeline decodes before it returns
    memory: dict[str, list[dict[str, float]]] = {arm: [] for arm in names}
    options = ["--lora", str(arguments.lora), *(f"--peer={peer}={path}" for peer, path in peers.items())]
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
    parser.add_argument(
        "--peer", action="append", default=[], metavar="NAME=PATH", help=f"a checkout of {' or '.join(PEERS)}"
    )
    arguments = stepping.parsed(parser, given)
    others = [name for name in arguments.sizes if arms.SIZES[name].family != "sd3"]
    if arguments.peer and others:
        parser.error(f"--peer: peers are compared on Stable Diffusion 3 alone; take {', '.join(others)} out of --sizes")
    arguments.peers = {}
    for word in arguments.peer:
        name, _, path = word.rpartition("=")
        name = name or "flow_grpo"
        if name not in PEERS:
            parser.error(f"--peer {word}: give flow_grpo=PATH or flow_factory=PATH")
        try:
            arguments.peers[name] = PEERS[name].find(Path(path))
        except FileNotFoundError as error:
            parser.error(str(error))
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    if arguments.child:
        run = arms.make_run(arms.SIZES[arguments.sizes[0]], arguments.model, arguments.lora)
        arm = make_arm(arguments.child, run, arguments.peers, arms.load_calls(arguments.calls))
        print(json.dumps(stepping.memory_here(arm)))
        return
    versions = ", ".join(f"{peer} {PEERS[peer].version(path)}" for peer, path in arguments.peers.items())
    stepping.run(
        __file__,
        sys.argv[1:] if given is None else given,
        arguments,
        ("sha256 of the files used:", versions or None),
        lambda name, scratch: profiled(name, arguments, scratch),
        lambda name, scratch: benchmark(name, arguments, scratch),
    )


if __name__ == "__main__":
    main()

"""Seconds and memory of one GRPO iteration, beside the bare model calls inside it and, where given, beside flow_grpo.

    python benchmarks/diffusion_step.py --json out.json [--peer PATH_TO_FLOW_GRPO]

Arms, in turn A B C A B C on one thread, on the same models (random weights), prompts, steps, window and JPEG reward:

- bare             the transformer, VAE and text encoder calls of our iteration, backward passes and optimizer step
- mmrl             our iteration, its prompts new each time; a prompt is encoded once
- mmrl-per-sample  the same, but a prompt is encoded for every sample, as the peer does (with --peer)
- flow_grpo        the peer's own sampling and log-prob functions under the same loss and optimizer (with --peer)

Ratios are taken within a repeat and then summarised. Memory is the peak resident size over that of the built run, each
arm in a process of its own (Linux only). Before any timing, the transformer and VAE calls of all arms are checked to be
equal in number and shape, and the peer's numbers to be ours.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import diffusion_arms as arms
import peer_flow_grpo
import torch

from mmrl.batch import Run
from mmrl.report.clock import Clock
from mmrl.report.environment import environment

Row = dict[str, float]
"""Seconds by phase, and ``total``: the whole iteration, with what lies between its phases."""

CPU = torch.device("cpu")
RATIOS = {
    ("mmrl", "bare"): "our time over the bare calls' (goal: 1.15 or less)",
    ("flow_grpo", "mmrl-per-sample"): "flow_grpo's time over ours for the same work (goal: 1.5 small, 1.0 large)",
    ("mmrl-per-sample", "mmrl"): "what encoding a prompt once, not for every sample, gives (algorithmic saving)",
    ("flow_grpo", "mmrl"): "flow_grpo's time over ours, that saving included",
}


def make_arm(name: str, run: Run, peer: Path | None, calls: Sequence[arms.Call] = ()) -> arms.Arm:
    """The arm of that name on the models of ``run``; ``bare`` needs the ``calls`` of one of our iterations."""
    if name == "bare":
        return arms.bare(run, calls)
    if name == "flow_grpo":
        assert peer is not None
        return peer_flow_grpo.arm(peer_flow_grpo.load(peer), run)
    return {"mmrl": arms.ours, "mmrl-per-sample": arms.ours_per_sample}[name](run)


def warm_up(
    names: Sequence[str], run: Run, peer: Path | None
) -> tuple[dict[str, arms.Arm], dict[str, Any], list[arms.Call]]:
    """Every arm after one untimed iteration, how often each calls each model, and the calls of ours.

    Raises ``ValueError`` where the arms do unequal work.
    """
    made: dict[str, arms.Arm] = {}
    seen: dict[str, list[arms.Call]] = {}
    for name in sorted(names, key=lambda n: n != "mmrl"):  # ours first: bare replays its calls
        made[name] = make_arm(name, run, peer, seen.get("mmrl", ()))
        with arms.recording(run) as seen[name]:
            made[name](0, Clock(CPU))
    return {name: made[name] for name in names}, arms.same_work(seen), seen["mmrl"]


def measure(made: Mapping[str, arms.Arm], repeats: int) -> dict[str, list[Row]]:
    """Times of every arm's iterations, one of each in turn; repeat ``i`` is step ``i`` of the run for all."""
    rows: dict[str, list[Row]] = {name: [] for name in made}
    for repeat in range(repeats):
        for name, arm in made.items():
            gc.collect()
            clock = Clock(CPU)
            started = time.perf_counter()
            arm(repeat, clock)
            total = time.perf_counter() - started
            row = {key.removeprefix("time/"): seconds for key, seconds in clock.row().items()}
            if name == "flow_grpo":
                row["sample"] -= row["decode"]  # its pipeline decodes before it returns
            rows[name].append(row | {"total": total})
        say(f"repeat {repeat + 1} of {repeats}: " + "  ".join(f"{n} {r[-1]['total']:.2f} s" for n, r in rows.items()))
    return rows


def ratios(rows: Mapping[str, list[Row]]) -> dict[str, dict[str, float]]:
    """The paired ratios of ``RATIOS`` between the arms that ran."""
    return {
        f"{a} / {b}": quartiles([x["total"] / y["total"] for x, y in zip(rows[a], rows[b], strict=True)])
        for a, b in RATIOS
        if a in rows and b in rows
    }


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_of(name: str, size: str, arguments: argparse.Namespace, model: Path, calls: Path) -> dict[str, float]:
    """Resident MiB of an arm in a process of its own: with the run ``built``, and at the ``peak`` of two iterations."""
    command = [sys.executable, __file__, "--child", name, "--sizes", size, "--lora", str(arguments.lora)]
    command += ["--model", str(model), "--calls", str(calls)]
    command += ["--peer", str(arguments.peer)] if arguments.peer else []
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the process that measures the memory of {name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory_here(arguments: argparse.Namespace) -> dict[str, float]:
    """The work of ``memory_of``, in this process."""
    run = arms.make_run(arms.SIZES[arguments.sizes[0]], arguments.model, arguments.lora)
    arm = make_arm(arguments.child, run, arguments.peer, arms.load_calls(arguments.calls))
    give_back()
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    built = resident("VmRSS")
    for step in range(2):  # the second with the optimizer's state in place
        arm(step, Clock(CPU))
    return {"built": built, "peak": resident("VmHWM")}


def give_back() -> None:
    """Return freed memory to the system, so that what loading left behind hides nothing of the peak."""
    gc.collect()
    try:
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    except (OSError, AttributeError):
        say("no glibc here: memory that loading freed may hide some of the peak")


def resident(kind: str) -> float:
    """``VmRSS`` (now) or ``VmHWM`` (peak) of this process in MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(kind)).split()[1]) / 1024


# -- results -----------------------------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and the quartiles; of one value, that value."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"median": middle, "q1": low, "q3": high}


def spread(values: Sequence[float], digits: int = 3) -> str:
    """``median [quartile, quartile]``."""
    found = quartiles(values)
    return f"{found['median']:.{digits}f} [{found['q1']:.{digits}f}, {found['q3']:.{digits}f}]"


def table(name: str, result: Mapping[str, Any]) -> str:
    """Markdown: a row per arm, then the ratios, the work and the parity."""
    s = result["settings"]
    trained = f"LoRA of rank {s['lora']}" if s["lora"] else "all weights"
    lines = [
        f"### {name}: a transformer of {s['parameters'] / 1e6:.2f} M parameters ({trained}: "
        f"{s['trainable'] / 1e6:.2f} M train), {s['pixels']} px, {s['prompts']} prompts x {s['group']} samples in "
        f"micro-batches of {s['micro_batch']}, {s['steps']} steps of which {s['window']} train",
        "",
        f"| seconds: median [quartiles] | {' | '.join(arms.PHASES)} | iteration | peak MiB over the built run |",
        "|---|" + "---|" * (len(arms.PHASES) + 2),
    ]
    for arm, found in result["arms"].items():
        rows, peaks = found["seconds"], [m["peak"] - m["built"] for m in found["memory_mib"]]
        cells = [spread([row[p] for row in rows]) if p in rows[0] else "" for p in (*arms.PHASES, "total")]
        lines.append(f"| {arm} | {' | '.join(cells)} | {spread(peaks, 1) if peaks else ''} |")
    lines.append("")
    for (a, b), meaning in RATIOS.items():
        if found := result["ratios"].get(f"{a} / {b}"):
            lines.append(f"- {a} / {b}: **{found['median']:.3f}** [{found['q1']:.3f}, {found['q3']:.3f}], {meaning}")
    for arm, work in result["work"].items():
        counts = ", ".join(f"{call} {n['calls']} ({n['rows']} rows)" for call, n in work.items())
        lines.append(f"- calls of {arm}: {counts}")
    if result["parity"]:
        found = ", ".join(f"{what} {value:.1e}" for what, value in result["parity"].items())
        lines.append(f"- largest differences between flow_grpo and mmrl: {found}")
    return "\n".join(lines)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- commands ----------------------------------------------------------------------------------------------------------


def benchmark(name: str, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Everything that is measured at one size."""
    size, model, calls = arms.SIZES[name], scratch / name, scratch / f"{name}-calls.pt"
    arms.write_model(size, model)
    run = arms.make_run(size, model, arguments.lora)
    names = ["bare", "mmrl", *(["mmrl-per-sample", "flow_grpo"] if arguments.peer else [])]
    say(f"{name}: one untimed iteration of {', '.join(names)}")
    made, work, recorded = warm_up(names, run, arguments.peer)
    arms.save_calls(recorded, calls)
    parity = peer_flow_grpo.parity(peer_flow_grpo.load(arguments.peer), run) if arguments.peer else {}
    rows = measure(made, arguments.repeats)
    memory: dict[str, list[dict[str, float]]] = {arm: [] for arm in names}
    for repeat in range(arguments.memory_repeats):
        for arm in names:
            memory[arm].append(memory_of(arm, name, arguments, model, calls))
        say(f"memory: {repeat + 1} of {arguments.memory_repeats}")
    counted = {
        "parameters": sum(p.numel() for n, p in run.pipeline.policy.named_parameters() if "lora_" not in n),
        "trainable": sum(p.numel() for p in run.policy.trainable.values()),
        "lora": arguments.lora,
    }
    return {
        "settings": counted | vars(size),
        "work": work,
        "parity": parity,
        "arms": {arm: {"seconds": rows[arm], "memory_mib": memory[arm]} for arm in names},
        "ratios": ratios(rows),
    }


def profile(name: str, arguments: argparse.Namespace, scratch: Path) -> None:
    """Print where one of our iterations spends its time: in Python's functions, and in torch's operators."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    arms.write_model(arms.SIZES[name], scratch / name)
    arm = arms.ours(arms.make_run(arms.SIZES[name], scratch / name, arguments.lora))
    arm(0, Clock(CPU))
    functions = cProfile.Profile()
    functions.runcall(arm, 1, Clock(CPU))
    print(f"### {name}: Python functions, by time of their own", flush=True)
    pstats.Stats(functions).strip_dirs().sort_stats("tottime").print_stats(25)
    with trace(activities=[ProfilerActivity.CPU]) as operators:
        arm(2, Clock(CPU))
    print(f"### {name}: torch operators, by time of their own")
    print(operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=25, max_name_column_width=40))


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(arms.SIZES), default=["small", "large"])
    parser.add_argument("--repeats", type=int, default=9, help="timed iterations of every arm")
    parser.add_argument("--memory-repeats", type=int, default=3, help="processes per arm that measure memory; 0: none")
    parser.add_argument("--lora", type=int, default=16, help="rank for all arms; 0 trains all weights in all arms")
    parser.add_argument("--peer", type=Path, help="a checkout of flow_grpo that has its fast scripts")
    parser.add_argument("--json", type=Path, help="write every single figure here")
    parser.add_argument("--profile", action="store_true", help="show where our iteration spends its time, and stop")
    for internal in ("child", "model", "calls"):  # the arguments of a process that measures memory
        parser.add_argument(f"--{internal}", type=str if internal == "child" else Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.repeats < 1:
        parser.error("--repeats: at least 1, and 7 for figures to quote")
    if arguments.memory_repeats and not Path("/proc/self/clear_refs").exists():
        say("this system has no /proc/self/clear_refs: memory is not measured")
        arguments.memory_repeats = 0
    if arguments.peer:
        try:
            arguments.peer = peer_flow_grpo.find(arguments.peer)
        except FileNotFoundError as error:
            parser.error(str(error))
    return arguments


def main(given: Sequence[str] | None = None) -> None:
    arguments = parse(given)
    if arguments.child:
        print(json.dumps(memory_here(arguments)))
        return
    words = sys.argv[1:] if given is None else given
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/diffusion_step.py", *words]),
        "environment": environment(),
        "peer": peer_flow_grpo.version(arguments.peer) if arguments.peer else None,
        "sizes": {},
    }
    cpu, versions = result["environment"]["cpu"], result["environment"]["versions"]
    print(f"{result['date']}, `{result['command']}`, one thread of {cpu['name']} ({cpu['usable']} usable cores)")
    print(", ".join(f"{package} {version}" for package, version in versions.items()))
    if arguments.peer:
        print(f"flow_grpo: sha256 of the files used {result['peer']}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.sizes:
            if arguments.profile:
                profile(name, arguments, Path(scratch))
                continue
            result["sizes"][name] = benchmark(name, arguments, Path(scratch))
            print(f"\n{table(name, result['sizes'][name])}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

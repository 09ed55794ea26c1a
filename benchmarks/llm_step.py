"""Seconds and memory of one GRPO step on text, beside the bare model calls inside it and TRL's ``GRPOTrainer``.

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
import gc
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import llm_arms as arms
import peer_trl
import torch
from diffusion_step import Row, give_back, quartiles, resident, say, spread

from mmrl.batch import Run
from mmrl.report.clock import Clock
from mmrl.report.environment import environment

CPU = torch.device("cpu")
RATIOS = {
    ("mmrl", "bare"): "our time over the bare calls' (goal: 1.15 or less)",
    ("trl", "mmrl"): "GRPOTrainer's time over ours (goal: 1.5 or more)",
    ("trl", "bare"): "GRPOTrainer's time over the bare calls'",
}


def warm_up(
    names: Sequence[str], run: Run, peer: peer_trl.Peer | None
) -> tuple[dict[str, arms.Arm], dict[str, Any], list[arms.Call]]:
    """Every arm after one untimed step, what each asks of the model, and the calls of ours.

    Raises ``ValueError`` where the arms do unequal work.
    """
    made: dict[str, arms.Arm] = {}
    seen: dict[str, list[arms.Call]] = {}
    for name in sorted(names, key=lambda n: n != "mmrl"):  # ours first: bare replays its calls
        made[name] = make_arm(name, run, peer, seen.get("mmrl", ()))
        model = peer.model if peer is not None and name == "trl" else run.pipeline.policy
        with arms.recording(model) as seen[name]:
            made[name](0, Clock(CPU))
    return {name: made[name] for name in names}, arms.same_work(seen), seen["mmrl"]


def make_arm(name: str, run: Run | None, peer: peer_trl.Peer | None, calls: Sequence[arms.Call] = ()) -> arms.Arm:
    """The arm of that name; ``bare`` needs the ``calls`` of one of our steps."""
    if name == "trl":
        assert peer is not None
        return peer.step
    assert run is not None
    return arms.bare(run, calls) if name == "bare" else arms.ours(run)


def measure(made: Mapping[str, arms.Arm], repeats: int) -> dict[str, list[Row]]:
    """Times of every arm's steps, one of each in turn: seconds by phase, in ``total``, and of the processor (``cpu``).

    An arm that does not time its update has all that is not another phase in ``train``.
    """
    rows: dict[str, list[Row]] = {name: [] for name in made}
    for repeat in range(repeats):
        for name, arm in made.items():
            gc.collect()
            clock = Clock(CPU)
            started, cpu = time.perf_counter(), time.process_time()
            arm(repeat, clock)
            total, cpu = time.perf_counter() - started, time.process_time() - cpu
            row = {key.removeprefix("time/"): seconds for key, seconds in clock.row().items()}
            row.setdefault("train", total - sum(row.values()))
            rows[name].append(row | {"total": total, "cpu": cpu})
        say(f"repeat {repeat + 1} of {repeats}: " + "  ".join(f"{n} {r[-1]['total']:.2f} s" for n, r in rows.items()))
    return rows


def ratios(rows: Mapping[str, list[Row]], of: str) -> dict[str, dict[str, float]]:
    """The paired ratios of ``RATIOS`` between the arms that ran, of the times called ``of``."""
    return {
        f"{a} / {b}": quartiles([x[of] / y[of] for x, y in zip(rows[a], rows[b], strict=True)])
        for a, b in RATIOS
        if a in rows and b in rows
    }


def one_arena() -> None:
    """Let all threads take memory from one heap: a thread's own would give memory back in other ways (glibc)."""
    try:
        ctypes.CDLL("libc.so.6").mallopt(-8, 1)  # M_ARENA_MAX
    except (OSError, AttributeError):
        say("no glibc here: TRL's thread may take its memory from another heap")


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_of(name: str, size: str, model: Path, calls: Path) -> dict[str, float]:
    """Resident MiB of an arm in a process of its own: with the run ``built``, and at the ``peak`` of two steps."""
    command = [sys.executable, __file__, "--child", name, "--sizes", size, "--model", str(model), "--calls", str(calls)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the process that measures the memory of {name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory_here(arguments: argparse.Namespace) -> dict[str, float]:
    """The work of ``memory_of``, in this process."""
    size, name = arms.SIZES[arguments.sizes[0]], arguments.child
    with ExitStack() as stack:
        run = arms.make_run(size, arguments.model) if name != "trl" else None
        peer = stack.enter_context(opened(size, arguments.model)) if name == "trl" else None
        arm = make_arm(name, run, peer, arms.load_calls(arguments.calls))
        give_back()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        built = resident("VmRSS")
        for step in range(2):  # the second with the optimizer's state in place
            arm(step, Clock(CPU))
        return {"built": built, "peak": resident("VmHWM")}


def opened(size: arms.Size, model: Path) -> closing[peer_trl.Peer]:
    """TRL's trainer, its thread ended on leaving. Its output directory stays empty."""
    return closing(peer_trl.Peer(size, model, model / "trl"))


# -- results -----------------------------------------------------------------------------------------------------------


def table(name: str, result: Mapping[str, Any]) -> str:
    """Markdown: a row per arm, then the ratios, the work and the parity."""
    s = result["settings"]
    lines = [
        f"### {name}: a Qwen3 of {s['parameters'] / 1e6:.2f} M parameters (all train), vocabulary {s['vocabulary']}, "
        f"{s['prompts']} prompts of {s['prompt_tokens']} tokens x {s['group']} samples of {s['new_tokens']} tokens, "
        f"micro-batches of {s['micro_batch']}",
        "",
        f"| seconds: median [quartiles] | {' | '.join(arms.PHASES)} | step | peak MiB over the built run |",
        "|---|" + "---|" * (len(arms.PHASES) + 2),
    ]
    for arm, found in result["arms"].items():
        rows, peaks = found["seconds"], [m["peak"] - m["built"] for m in found["memory_mib"]]
        cells = [spread([row[p] for row in rows]) if p in rows[0] else "" for p in (*arms.PHASES, "total")]
        lines.append(f"| {arm} | {' | '.join(cells)} | {spread(peaks, 1) if peaks else ''} |")
    lines.append("")
    for (a, b), meaning in RATIOS.items():
        if found := result["ratios"].get(f"{a} / {b}"):
            cpu = result["cpu_ratios"][f"{a} / {b}"]["median"]
            middle = f"**{found['median']:.3f}** [{found['q1']:.3f}, {found['q3']:.3f}]"
            lines.append(f"- {a} / {b}: {middle} (of processor time {cpu:.3f}), {meaning}")
    for arm, work in result["work"].items():
        counts = ", ".join(f"{phase} {n['calls']} ({n['tokens']} tokens)" for phase, n in work.items())
        lines.append(f"- calls of {arm}: {counts}")
    for what, value in result["parity"].items():
        lines.append(f"- relative difference between trl and mmrl, {what}: {value:.1e}")
    return "\n".join(lines)


# -- commands ----------------------------------------------------------------------------------------------------------


def benchmark(name: str, arguments: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    """Everything that is measured at one size."""
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
        rows = measure(made, arguments.repeats)
    memory: dict[str, list[dict[str, float]]] = {arm: [] for arm in names}
    for repeat in range(arguments.memory_repeats):
        for arm in names:
            memory[arm].append(memory_of(arm, name, model, calls))
        say(f"memory: {repeat + 1} of {arguments.memory_repeats}")
    counted = {
        "parameters": sum(p.numel() for p in run.policy.trainable.values()),
        "prompt_tokens": recorded[0].kwargs["input_ids"].shape[1],
    }
    return {
        "settings": counted | vars(size),
        "work": work,
        "parity": parity,
        "arms": {arm: {"seconds": rows[arm], "memory_mib": memory[arm]} for arm in names},
        "ratios": ratios(rows, "total"),
        "cpu_ratios": ratios(rows, "cpu"),
    }


def profile(name: str, scratch: Path) -> None:
    """Print where one of our steps spends its time: in Python's functions, and in torch's operators."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    arms.write_model(arms.SIZES[name], scratch / name)
    arm = arms.ours(arms.make_run(arms.SIZES[name], scratch / name))
    arm(0, Clock(CPU))
    functions = cProfile.Profile()
    functions.runcall(arm, 1, Clock(CPU))
    print(f"### {name}: Python functions, by time of their own", flush=True)
    pstats.Stats(functions).strip_dirs().sort_stats("tottime").print_stats(30)
    with trace(activities=[ProfilerActivity.CPU]) as operators:
        arm(2, Clock(CPU))
    print(f"### {name}: torch operators, by time of their own")
    print(operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=40))


def parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(arms.SIZES), default=["small", "large"])
    parser.add_argument("--repeats", type=int, default=9, help="timed steps of every arm")
    parser.add_argument("--memory-repeats", type=int, default=3, help="processes per arm that measure memory; 0: none")
    parser.add_argument("--peer", action="store_true", help="compare with TRL, which must be installed")
    parser.add_argument("--json", type=Path, help="write every single figure here")
    parser.add_argument("--profile", action="store_true", help="show where our step spends its time, and stop")
    for internal in ("child", "model", "calls"):  # the arguments of a process that measures memory
        parser.add_argument(f"--{internal}", type=str if internal == "child" else Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args(given)
    if arguments.repeats < 1:
        parser.error("--repeats: at least 1, and 7 for figures to quote")
    if arguments.memory_repeats and not Path("/proc/self/clear_refs").exists():
        say("this system has no /proc/self/clear_refs: memory is not measured")
        arguments.memory_repeats = 0
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
    words = sys.argv[1:] if given is None else given
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", "benchmarks/llm_step.py", *words]),
        "environment": environment(),
        "peer": peer_trl.version() if arguments.peer else None,
        "sizes": {},
    }
    cpu, versions = result["environment"]["cpu"], result["environment"]["versions"]
    print(f"{result['date']}, `{result['command']}`, one thread of {cpu['name']} ({cpu['usable']} usable cores)")
    print(", ".join(f"{package} {version}" for package, version in versions.items()))
    if arguments.peer:
        print(f"trl {result['peer']}")
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.sizes:
            if arguments.profile:
                profile(name, Path(scratch))
                continue
            result["sizes"][name] = benchmark(name, arguments, Path(scratch))
            print(f"\n{table(name, result['sizes'][name])}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()

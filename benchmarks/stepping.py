"""Shared code of the benchmarks of a step: paired times, memory in separate processes, the table, the command line."""

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
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from mmrl.core.clock import Clock
from mmrl.logging.environment import environment

Row = dict[str, float]
"""Seconds by phase, and ``total``: the whole step, with what lies between its phases."""
Arm = Callable[[int, Clock], None]
"""Makes one step: its number, and what times its phases."""
Ratios = Mapping[tuple[str, str], str]
"""What the time of one arm over another's means."""
CPU = torch.device("cpu")
JPEG = 'rewards=[{name: "jpeg:compressibility"}]'
"""The override of a reward that takes no time."""


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


# -- figures -----------------------------------------------------------------------------------------------------------


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median and the quartiles; of one value, that value."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [*values] * 3
    return {"median": middle, "q1": low, "q3": high}


def spread(values: Sequence[float], digits: int = 3) -> str:
    """``median [quartile, quartile]``."""
    found = quartiles(values)
    return f"{found['median']:.{digits}f} [{found['q1']:.{digits}f}, {found['q3']:.{digits}f}]"


def measure(made: Mapping[str, Arm], repeats: int) -> dict[str, list[Row]]:
    """Times of every arm's steps, one of each in turn: seconds by phase, in ``total``, and of the processor (``cpu``).

    Repeat ``i`` is step ``i`` for all. An arm that does not time its update has all that is not another phase in
    ``train``.
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


def ratios(rows: Mapping[str, list[Row]], pairs: Ratios, of: str) -> dict[str, dict[str, float]]:
    """The paired ratios between the arms that ran, of the times called ``of``."""
    return {
        f"{a} / {b}": quartiles([x[of] / y[of] for x, y in zip(rows[a], rows[b], strict=True)])
        for a, b in pairs
        if a in rows and b in rows
    }


def must_be_equal(asked: Mapping[str, Counter[Any]]) -> None:
    """Raises ``ValueError`` where the arms do not ask the same of the models."""
    first, *others = asked
    for other in others:
        if asked[other] != asked[first]:
            raise ValueError(
                f"the arms {first} and {other} do not do the same work; only in {first}: "
                f"{dict(asked[first] - asked[other])}; only in {other}: {dict(asked[other] - asked[first])}"
            )


# -- memory ------------------------------------------------------------------------------------------------------------


def memory_of(script: str, name: str, size: str, model: Path, calls: Path, *options: str) -> dict[str, float]:
    """Resident MiB of an arm in a process of its own: with the run ``built``, and at the ``peak`` of two steps."""
    command = [sys.executable, script, "--child", name, "--sizes", size, "--model", str(model), "--calls", str(calls)]
    done = subprocess.run([*command, *options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the process that measures the memory of {name} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def memory_here(arm: Arm) -> dict[str, float]:
    """The work of ``memory_of``, in this process."""
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


def table(title: str, result: Mapping[str, Any], phases: Sequence[str], pairs: Ratios, unit: str) -> list[str]:
    """Lines of Markdown: a row per arm, the ratios, and the calls of each arm, counted in calls and in ``unit``."""
    lines = [
        f"### {title}",
        "",
        f"| seconds: median [quartiles] | {' | '.join(phases)} | step | peak MiB over the built run |",
        "|---|" + "---|" * (len(phases) + 2),
    ]
    for arm, found in result["arms"].items():
        rows, peaks = found["seconds"], [m["peak"] - m["built"] for m in found["memory_mib"]]
        cells = [spread([row[p] for row in rows]) if p in rows[0] else "" for p in (*phases, "total")]
        lines.append(f"| {arm} | {' | '.join(cells)} | {spread(peaks, 1) if peaks else ''} |")
    lines.append("")
    for (a, b), meaning in pairs.items():
        if found := result["ratios"].get(f"{a} / {b}"):
            cpu = result["cpu_ratios"][f"{a} / {b}"]["median"]
            middle = f"**{found['median']:.3f}** [{found['q1']:.3f}, {found['q3']:.3f}]"
            lines.append(f"- {a} / {b}: {middle} (of processor time {cpu:.3f}), {meaning}")
    for arm, work in result["work"].items():
        counts = ", ".join(f"{call} {n['calls']} ({n[unit]} {unit})" for call, n in work.items())
        lines.append(f"- calls of {arm}: {counts}")
    return lines


def profile(name: str, arm: Arm) -> None:
    """Print where a step spends its time, after one to warm up: in Python's functions, and in torch's operators."""
    import cProfile
    import pstats

    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as trace

    arm(0, Clock(CPU))
    functions = cProfile.Profile()
    functions.runcall(arm, 1, Clock(CPU))
    print(f"### {name}: Python functions, by time of their own", flush=True)
    pstats.Stats(functions).strip_dirs().sort_stats("tottime").print_stats(30)
    with trace(activities=[ProfilerActivity.CPU]) as operators:
        arm(2, Clock(CPU))
    print(f"### {name}: torch operators, by time of their own")
    print(operators.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=40))


# -- commands ----------------------------------------------------------------------------------------------------------


def parser(about: str | None, sizes: Sequence[str]) -> argparse.ArgumentParser:
    """The options that the benchmarks share."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--sizes", nargs="+", choices=list(sizes), default=["small", "large"])
    made.add_argument("--repeats", type=int, default=9, help="timed steps of every arm")
    made.add_argument("--memory-repeats", type=int, default=3, help="processes per arm that measure memory; 0: none")
    made.add_argument("--json", type=Path, help="write every single figure here")
    made.add_argument("--profile", action="store_true", help="show where our step spends its time, and stop")
    for internal in ("child", "model", "calls"):  # the arguments of a process that measures memory
        made.add_argument(f"--{internal}", type=str if internal == "child" else Path, help=argparse.SUPPRESS)
    return made


def parsed(made: argparse.ArgumentParser, given: Sequence[str] | None) -> argparse.Namespace:
    """The arguments ``given``, or the command line's, of a ``parser``; memory is left out where it cannot be had."""
    arguments = made.parse_args(given)
    if arguments.repeats < 1:
        made.error("--repeats: at least 1, and 7 for figures to quote")
    if arguments.memory_repeats and not Path("/proc/self/clear_refs").exists():
        say("this system has no /proc/self/clear_refs: memory is not measured")
        arguments.memory_repeats = 0
    return arguments


def run(
    script: str,
    words: Sequence[str],
    arguments: argparse.Namespace,
    peer: tuple[str, str | None],
    profiled: Callable[[str, Path], Arm],
    benchmark: Callable[[str, Path], tuple[dict[str, Any], str]],
) -> None:
    """Every size in turn, in a folder that is removed afterwards: printed, and kept as JSON where it is asked for.

    ``peer``: its name and version, none without it. ``profiled`` makes the arm to profile, ``benchmark`` gives the
    result and its table.
    """
    result: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", f"benchmarks/{Path(script).name}", *words]),
        "environment": environment(),
        "peer": peer[1],
        "sizes": {},
    }
    cpu, versions = result["environment"]["cpu"], result["environment"]["versions"]
    print(f"{result['date']}, `{result['command']}`, one thread of {cpu['name']} ({cpu['usable']} usable cores)")
    print(", ".join(f"{package} {version}" for package, version in versions.items()))
    if peer[1]:
        print(" ".join(map(str, peer)))
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.sizes:
            if arguments.profile:
                profile(name, profiled(name, Path(scratch)))
                continue
            result["sizes"][name], shown = benchmark(name, Path(scratch))
            print(f"\n{shown}", flush=True)
            if arguments.json:
                arguments.json.write_text(json.dumps(result, indent=1))

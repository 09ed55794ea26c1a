"""What runs the checks of ``gpu_smoke.py`` and ``gpu_limits.py``: one after another, each in its own process, with a
limit of seconds; table and JSON file are written after each."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shlex
import sys
import tempfile
import textwrap
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smoke_place import MissedError, Place, SkippedError

RESULTS = Path(__file__).resolve().parent / "results" / "gpu"
LIBRARIES = ["torch", "transformers", "diffusers", "peft"]
LINES = 25
"""Of what a check that went wrong has printed."""
SLOWER = 4
"""Limits of seconds are so many times as long at small sizes, which are tried on any machine."""
Predicted = tuple[float, float]
"""What was written down before the check first ran: the lowest and the highest."""
Work = Callable[[Place], dict[str, Any]]
"""Returns figures. Raises ``SkippedError``, ``MissedError`` or any other error."""


@dataclass(frozen=True)
class Check:
    """``most``: its seconds. ``predicted``: by the name of a figure, for true sizes on an H100."""

    name: str
    work: Work
    most: float
    predicted: Mapping[str, Predicted] = field(default_factory=dict)


@dataclass(frozen=True)
class Suite:
    """Checks in their order; the first is number 1. ``beside``: figures that each check's process takes first."""

    name: str
    script: str
    checks: Callable[[], Sequence[Check]]
    beside: Work | None = None


@dataclass
class Outcome:
    """``status``: ok, missed, failed, skipped or timeout. ``compared``: of a figure that was predicted, the prediction
    and the figure over its middle."""

    number: int
    name: str
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    why: str = ""
    compared: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def bad(self) -> bool:
        return self.status in ("missed", "failed", "timeout")


def compared(figures: Mapping[str, Any], predicted: Mapping[str, Predicted], small: bool) -> dict[str, dict[str, Any]]:
    """Each prediction with its figure's ratio to the middle of it; no ratio of ``small`` sizes, or of no number."""
    found: dict[str, dict[str, Any]] = {}
    for name, (low, high) in predicted.items():
        value = figures.get(name)
        number = isinstance(value, int | float) and not small
        found[name] = {"predicted": [low, high]} | ({"ratio": round(2 * value / (low + high), 3)} if number else {})
    return found


def attempt(suite: Suite, index: int, place: Place, said: Path) -> None:
    """Run a check in this process and write its outcome as JSON into ``said``."""
    from mmrl.core.torchvision_on_cpu import allow_cpu_only

    allow_cpu_only()  # before transformers is imported
    check = suite.checks()[index]
    outcome, began = Outcome(index + 1, check.name, "ok"), time.perf_counter()
    try:
        beside = {} if suite.beside is None else suite.beside(place)
        place.keep(beside)
        outcome.figures = beside | check.work(place)
    except SkippedError as skipped:
        outcome.status, outcome.why = "skipped", str(skipped)
    except MissedError as missed:
        outcome.status, outcome.why, outcome.figures = "missed", str(missed), missed.figures
    except Exception as error:
        outcome.status, outcome.why = "failed", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    outcome.seconds = round(time.perf_counter() - began, 2)
    said.write_text(json.dumps(asdict(outcome)))


def run(suite: Suite, index: int, place: Place, together: bool) -> Outcome:
    """The outcome of a check in a process of its own, or in this one (``together``)."""
    check = suite.checks()[index]
    most = check.most * (SLOWER if place.small else 1)
    folder = place.folder / str(index + 1)
    folder.mkdir()
    place = replace(place, folder=folder)
    said = folder / "outcome.json"
    late = False
    process: Any = None
    began = time.perf_counter()
    if together:
        attempt(suite, index, place, said)
    else:
        process = _processes(place).Process(target=alone, args=(suite, index, place, said, folder / "log.txt"))
        process.start()
        process.join(most)
        late = process.is_alive()
        if late:
            process.kill()
            process.join()
    if said.exists():
        outcome = Outcome(**json.loads(said.read_text()))
    else:
        why = f"it ran longer than {most:.0f} s" if late else f"its process ended with {process.exitcode}"
        seconds = round(time.perf_counter() - began, 2)
        outcome = Outcome(index + 1, check.name, "timeout" if late else "failed", seconds, why=why)
    outcome.figures = place.kept() | outcome.figures
    if outcome.status != "skipped":
        outcome.compared = compared(outcome.figures, check.predicted, place.small)
    if outcome.bad and process is not None:
        lines = (folder / "log.txt").read_text(errors="replace").splitlines()
        print("\n".join(lines[-LINES:]), file=sys.stderr)
    return outcome


def alone(suite: Suite, index: int, place: Place, said: Path, log: Path) -> None:
    """``attempt``, with what it prints in ``log``."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    attempt(suite, index, place, said)


def _processes(place: Place) -> Any:
    """On a GPU new processes: where a library counts the GPUs as it is imported, a fork of its process cannot use them.

    Elsewhere processes are forked from one that has imported the libraries. A torchvision that was built for another
    torch (vLLM's, beside a torch without CUDA) is mended by mmrl before the others import it, so there each process
    imports them itself.
    """
    import torch

    if place.gpu:
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    mended = torch.version.cuda is None and find_spec("torchvision") is not None
    context.set_forkserver_preload(LIBRARIES[:1] if mended else LIBRARIES)
    return context


def table(outcomes: Sequence[Outcome]) -> str:
    """In 80 columns; a figure that was predicted has a line of its own."""
    lines = [f"{'':>3} {'check':<48} {'status':<8} {'s':>6}"]
    for one in outcomes:
        lines.append(f"{one.number:>3} {one.name:<48} {one.status:<8} {one.seconds:>6.1f}")
        lines += _compared_lines(one)
        told = ", ".join(f"{key} {value}" for key, value in one.figures.items() if key not in one.compared)
        for text in filter(None, (told, one.why)):
            lines += textwrap.wrap(text, 76, initial_indent="      ", subsequent_indent="      ", max_lines=8)
    return "\n".join(lines)


def _compared_lines(one: Outcome) -> Iterator[str]:
    for name, found in one.compared.items():
        low, high = found["predicted"]
        said = f"{low:g}" if low == high else f"{low:g} to {high:g}"
        ratio = f", ratio {found['ratio']:.2f}" if "ratio" in found else ""
        yield f"      {name:<38} {one.figures.get(name, 'none')!s:>8}  ({said}{ratio})"


def parser(about: str | None) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", default="cuda", help="where the checks compute (default: cuda)")
    made.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    made.add_argument("--only", metavar="N", type=int, nargs="+", help="these checks, by number")
    made.add_argument("--together", action="store_true", help="run all checks in this process")
    made.add_argument("--out", metavar="FOLDER", type=Path, help="where the results go")
    return made


def main(suite: Suite, options: argparse.Namespace, words: Sequence[str], peer: Path | None = None) -> int:
    """Run the checks that ``options`` name; ``words``: the command's. Returns the exit code."""
    from mmrl.core.quiet import be_quiet

    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # before the libraries are imported
    be_quiet()
    import torch

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("error: torch sees no GPU here; give --device cpu --small for a trial run", file=sys.stderr)
        return 2
    every = suite.checks()
    chosen = [n - 1 for n in options.only] if options.only else list(range(len(every)))
    if wrong := [n + 1 for n in chosen if not 0 <= n < len(every)]:
        print(f"error: --only: there is no check {wrong[0]}; they are 1 to {len(every)}", file=sys.stderr)
        return 2
    out = options.out or (None if options.device == "cpu" else RESULTS)
    began, outcomes, now = time.perf_counter(), list[Outcome](), datetime.now(UTC)
    written: Path | None = None
    with tempfile.TemporaryDirectory(prefix=f"mmrl-{suite.name}-") as folder:
        for index in chosen:
            print(f"{index + 1} of {len(every)}: {every[index].name}", file=sys.stderr, flush=True)
            place = Place(options.device, options.small, Path(folder), peer)
            outcomes.append(run(suite, index, place, options.together))
            print("\n".join(table(outcomes[-1:]).splitlines()[1:]), file=sys.stderr, flush=True)
            if out is not None:  # after each: a run that is stopped keeps what it has found
                written = write(suite, out, options.device, outcomes, words, now)
    print(table(outcomes))
    print(f"{time.perf_counter() - began:.0f} s on {device_name(options.device)}")
    if written is not None:
        print(written)
    return int(any(one.bad for one in outcomes))


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device.startswith("cuda") else "the CPU"


def write(
    suite: Suite, folder: Path, device: str, outcomes: Sequence[Outcome], words: Sequence[str], now: datetime
) -> Path:
    """The table and the JSON file; returns where the second is. ``words``: the command's; ``now``: when it began."""
    from mmrl.logging.environment import environment

    folder.mkdir(parents=True, exist_ok=True)
    name = f"{suite.name}_{now:%Y-%m-%d_%H%M}_{device.partition(':')[0]}"
    command = shlex.join(["python", f"benchmarks/{suite.script}", *words])
    made = {"date": f"{now:%Y-%m-%d %H:%M} UTC", "device": device_name(device), "command": command}
    found = made | {"environment": environment(), "checks": [asdict(one) for one in outcomes]}
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [*(f"{key}: {value}" for key, value in made.items()), "", table(outcomes)]
    (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder / f"{name}.json"

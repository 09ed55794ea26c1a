"""Checks for a GPU, in ten minutes: one after another, each in its own process.

    python benchmarks/gpu_smoke.py                          # a GPU, true sizes
    python benchmarks/gpu_smoke.py --device cpu --small     # the same checks at small sizes, where there is none
    python benchmarks/gpu_smoke.py --only 2 9 12

It needs torch, transformers, diffusers and peft; a check whose package is missing is skipped, and says which. A table
and a JSON file are written into ``benchmarks/results/gpu/``, with the date, the device and the command; on the CPU only
where ``--out`` names a folder. The exit code is 1 where a check failed.
"""

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
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smoke_place import MissedError, Place, SkippedError

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "gpu"
LIBRARIES = ["torch", "transformers", "diffusers", "peft"]
LINES = 25
"""Of what a check that went wrong has printed."""


Check = Callable[[Place], dict[str, Any]]
"""Returns figures. Raises ``SkippedError``, ``MissedError`` or any other error."""


@dataclass
class Outcome:
    """``status``: ok, missed, failed, skipped or timeout."""

    number: int
    name: str
    status: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)
    why: str = ""

    @property
    def bad(self) -> bool:
        return self.status in ("missed", "failed", "timeout")


def checks() -> list[tuple[str, Check, float]]:
    """Name, function and most seconds of each check, in their order; the first is number 1."""
    import smoke_models as models
    import smoke_parts as parts
    import smoke_recipes as recipes
    import smoke_waits as waiting
    import smoke_weights as weights

    return [
        ("mmrl doctor", recipes.doctor, 60),
        ("shapes-lora: float32 as on the CPU", recipes.as_on_the_cpu, 120),
        ("bfloat16, guidance, checkpointing: first ratio", recipes.first_ratio, 90),
        ("the same, two steps a forward", recipes.two_steps_a_forward, 90),
        ("the same, all weights", recipes.all_weights, 90),
        ("NFT, DRaFT, DPO", recipes.other_objectives, 120),
        ("sums: full, LoRA, PPO", recipes.text, 120),
        ("scenes, scenes-judge: nothing dropped", recipes.vision_language, 120),
        ("kill -9 and resume", recipes.killed_and_resumed, 180),
        ("family contract", recipes.family_contract, 90),
        ("FSDP2 on one rank, asynchronous save", recipes.fsdp, 120),
        ("language model of 1.5B width", models.language_model, 180),
        ("SD3.5-M slice: eager, TF32, autocast, compiled", models.sd35_slice, 240),
        ("Qwen-Image slice and offload", models.qwen_image_slice, 180),
        ("waits of the host against the budgets", waiting.waits, 120),
        ("vLLM: new weights in each step, asleep between", models.engine, 180),
        ("the same with an adapter", models.engine_with_adapter, 180),
        ("weights to another process, without a file", weights.weights_to_another_process, 90),
        ("FSDP2 on one rank: rows, bfloat16 gathering", parts.shards, 120),
        ("groups pruned midway, DGPO", parts.midway, 90),
    ]


def attempt(index: int, place: Place, said: Path) -> None:
    """Run a check in this process and write its outcome as JSON into ``said``."""
    name, check, _ = checks()[index]
    outcome, began = Outcome(index + 1, name, "ok"), time.perf_counter()
    try:
        outcome.figures = check(place)
    except SkippedError as skipped:
        outcome.status, outcome.why = "skipped", str(skipped)
    except MissedError as missed:
        outcome.status, outcome.why, outcome.figures = "missed", str(missed), missed.figures
    except Exception as error:
        outcome.status, outcome.why = "failed", f"{type(error).__name__}: {error}"
        traceback.print_exc()
    outcome.seconds = round(time.perf_counter() - began, 2)
    said.write_text(json.dumps(asdict(outcome)))


def run(index: int, place: Place, together: bool) -> Outcome:
    """The outcome of a check in a process of its own, or in this one (``together``)."""
    name, _, most = checks()[index]
    folder = place.folder / str(index + 1)
    folder.mkdir()
    place, said = Place(place.device, place.small, folder), folder / "outcome.json"
    if together:
        attempt(index, place, said)
        return Outcome(**json.loads(said.read_text()))
    log = folder / "log.txt"
    process = _processes(place).Process(target=alone, args=(index, place, said, log))
    began = time.perf_counter()
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
        outcome = Outcome(index + 1, name, "timeout" if late else "failed", seconds, why=why)
    if outcome.bad:
        print("\n".join(log.read_text(errors="replace").splitlines()[-LINES:]), file=sys.stderr)
    return outcome


def alone(index: int, place: Place, said: Path, log: Path) -> None:
    """``attempt``, with what it prints in ``log``."""
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    attempt(index, place, said)


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


def table(outcomes: list[Outcome]) -> str:
    """In 80 columns."""
    lines = [f"{'':>3} {'check':<48} {'status':<8} {'s':>6}"]
    for one in outcomes:
        lines.append(f"{one.number:>3} {one.name:<48} {one.status:<8} {one.seconds:>6.1f}")
        told = ", ".join(f"{key} {value}" for key, value in one.figures.items())
        for text in filter(None, (told, one.why)):
            lines += textwrap.wrap(text, 76, initial_indent="      ", subsequent_indent="      ", max_lines=8)
    return "\n".join(lines)


def arguments(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", help="where the checks compute (default: cuda)")
    parser.add_argument("--small", action="store_true", help="small sizes, for a CPU")
    parser.add_argument("--only", metavar="N", type=int, nargs="+", help="these checks, by number")
    parser.add_argument("--together", action="store_true", help="run all checks in this process")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="where the results go")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> int:
    words = sys.argv[1:] if words is None else words
    options = arguments(words)
    from mmrl.quiet import QUIET

    for key, value in {**QUIET, "HF_HUB_OFFLINE": "1"}.items():  # before the libraries are imported
        os.environ.setdefault(key, value)
    import torch

    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("error: torch sees no GPU here; give --device cpu --small for a trial run", file=sys.stderr)
        return 2
    every = checks()
    chosen = [n - 1 for n in options.only] if options.only else list(range(len(every)))
    if wrong := [n + 1 for n in chosen if not 0 <= n < len(every)]:
        print(f"error: --only: there is no check {wrong[0]}; they are 1 to {len(every)}", file=sys.stderr)
        return 2
    out = options.out or (None if options.device == "cpu" else RESULTS)
    began, outcomes, now = time.perf_counter(), list[Outcome](), datetime.now(UTC)
    with tempfile.TemporaryDirectory(prefix="mmrl-smoke-") as folder:
        for index in chosen:
            print(f"{index + 1} of {len(every)}: {every[index][0]}", file=sys.stderr, flush=True)
            outcomes.append(run(index, Place(options.device, options.small, Path(folder)), options.together))
            if out is not None:  # after each: a run that is stopped keeps what it has found
                written = write(out, options.device, outcomes, words, now)
    print(table(outcomes))
    print(f"{time.perf_counter() - began:.0f} s on {device_name(options.device)}")
    if out is not None:
        print(written)
    return int(any(one.bad for one in outcomes))


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name() if device.startswith("cuda") else "the CPU"


def write(folder: Path, device: str, outcomes: list[Outcome], words: list[str], now: datetime) -> Path:
    """The table and the JSON file; returns where the second is. ``words``: the command's; ``now``: when it began."""
    from mmrl.report.environment import environment

    folder.mkdir(parents=True, exist_ok=True)
    name = f"smoke_{now:%Y-%m-%d_%H%M}_{device.partition(':')[0]}"
    command = shlex.join(["python", "benchmarks/gpu_smoke.py", *words])
    made = {"date": f"{now:%Y-%m-%d %H:%M} UTC", "device": device_name(device), "command": command}
    found = made | {"environment": environment(), "checks": [asdict(one) for one in outcomes]}
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [*(f"{key}: {value}" for key, value in made.items()), "", table(outcomes)]
    (folder / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return folder / f"{name}.json"


if __name__ == "__main__":
    sys.exit(main())

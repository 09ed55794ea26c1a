"""CPU-seconds (user and system, children included) from the start of a process to what a user waits for.

    OMP_NUM_THREADS=1 python benchmarks/startup.py [--repeats 5] [--only NAME] [--json FILE]

``whole`` is the whole command. Of ``train``, ``first work`` is the moment when the run has loaded everything and begins
its first computation on data (an evaluation, where the recipe asks for one before the first step), and ``first step``
the moment when the first training step begins. On a machine that does other work, CPU-seconds vary less than seconds.
The files are in the page cache after the first repeat; mmrl itself keeps nothing between processes.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

CASES = {
    "mmrl --help": ["--help"],
    "mmrl plan sd35-medium": ["plan", "sd35-medium"],
    "mmrl train shapes-full train.steps=1": ["train", "shapes-full", "train.steps=1"],
}


def spent() -> float:
    """CPU-seconds of this process so far, and of its children that ended."""
    found = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in found)


def child(arguments: list[str], written: Path) -> None:
    """Run the command line in this process, and write into a file what was spent at each point, up to the last."""
    from mmrl import cli
    from mmrl.cli import runs

    points: dict[str, float] = {}

    def watched(name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            points.setdefault("first work", spent())
            if name != "first step":
                return function(*args, **kwargs)
            written.write_text(json.dumps(points | {name: spent()}))
            os._exit(0)  # what comes after is not asked

        return call

    read = runs.read_recipe

    def and_watch(*args: Any, **more: Any) -> Any:  # once the recipe is read, which sets the threads of torch
        loaded = read(*args, **more)
        if arguments[0] == "train":
            from mmrl.app import trainer as session

            session.measure = watched("first evaluation", session.measure)
            session.train_step = watched("first step", session.train_step)
        return loaded

    runs.read_recipe = and_watch
    try:
        cli.main()
    finally:
        written.write_text(json.dumps(points | {"whole": spent()}))


def measured(arguments: list[str]) -> dict[str, float]:
    """The points of one new process."""
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "points.json"
        if arguments[0] == "train":
            arguments = [*arguments, "--out", str(Path(folder) / "run")]
        command = [sys.executable, __file__, "--child", str(written), *arguments]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode or not written.exists():
            raise SystemExit(f"{' '.join(command)} exited with {done.returncode}:\n{done.stderr}")
        return json.loads(written.read_text())


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        written = Path(sys.argv[2])
        sys.argv[1:] = sys.argv[3:]
        return child(sys.argv[1:], written)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=[*CASES], default=[*CASES], help="these commands")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = {name: [measured(CASES[name]) for _ in range(options.repeats)] for name in options.only}
    for name, found in rows.items():
        for point in found[0]:
            seconds = sorted(one[point] for one in found)
            print(f"{name:40} {point:18} {statistics.median(seconds):6.2f}  ({seconds[0]:.2f} to {seconds[-1]:.2f})")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

"""Record what the shipped CPU recipes compute at two revisions, and compare them to the bit.

    python tools/freeze.py --base main                 # the working tree beside a revision
    python tools/freeze.py --base HEAD --only sums     # one recipe
    python tools/freeze.py --out frozen.json           # the working tree's record alone

Each recipe that needs no GPU and whose model is shipped is trained for three steps at a small size, with an evaluation
before and after; one of each kind also with two controllers and with two devices. Compared are all metrics, each tensor
of the checkpoint, its state.json and the resolved recipe. Both revisions run on this machine, side by side, each in a
process of its own. Differences are printed one by one, and the exit code is 1.

A name that was changed on purpose goes into ``tools/freeze_renames.yaml``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import yaml
from freeze_compare import ERROR, Compared, Record, RefusedError, Renames, compare, without_measured

from mmrl.report.nondeterministic_metrics import MEASURED

ROOT = Path(__file__).resolve().parents[1]
RENAMES = Path("tools") / "freeze_renames.yaml"
STEPS = 3
SPREAD = ("shapes-lora", "sums", "scenes")
"""Recipes that also run with two controllers and with two devices."""
SMALL = {
    "device": "cpu",
    "train.steps": STEPS,
    "train.prompts_per_step": 4,
    "train.max_cpu_seconds": "null",
    "eval.every": STEPS,
    "eval.samples": 8,
    "eval.grid": 4,
    "checkpoint.every": 100,  # the last step is always saved
}
"""Of every recipe, in the names of now."""
_MOST = {"train.group_size": 4, "train.micro_batch_size": 4, "sampling.batch_size": 4}
"""Of a recipe that has more: two micro-batches or more of a step."""
_TIMEOUT = 600
"""Seconds for a batch of rewards: this machine may be busy."""


@dataclass(frozen=True)
class Case:
    """One run: ``overrides`` of ``recipe``, a file."""

    name: str
    recipe: str
    overrides: list[str]
    alone: bool = False
    """Whether it takes several processes: the two revisions take turns with these."""

    @property
    def names(self) -> set[str]:
        """By which ``--only`` chooses it."""
        return {self.name, self.name.partition(":")[0]}


def cases(tree: Path, old: Callable[[str], str]) -> tuple[list[Case], dict[str, str]]:
    """The runs of the recipes in ``tree``, and why others are left out. ``old``: what a key is called there."""
    found, left_out = list[Case](), dict[str, str]()
    for path in sorted(tree.glob("pipelines/*/recipes/*.yaml")):
        recipe = yaml.safe_load(path.read_text(encoding="utf-8"))
        device, model = value(recipe, old("device")), value(recipe, old("model.path"))
        if str(device).startswith("cuda"):
            left_out[path.stem] = "needs a GPU"
        elif not (path.parent / str(model)).is_dir():
            left_out[path.stem] = f"its model {model} is not shipped"
        elif lacks := _lacking(recipe):
            left_out[path.stem] = f"{lacks} is not installed"
        else:
            found += [Case(name, str(path), w, ":" in name) for name, w in variants(path.stem, recipe, old)]
    return found, left_out


def _lacking(recipe: dict[str, Any]) -> str | None:
    """The package of others whose worlds or questions ``recipe`` needs, where it is not installed."""
    world = str(value(recipe, "environment.name")).partition(":")[0]
    return world if world in ("gymnasium", "reasoning_gym", "textarena") and find_spec(world) is None else None


def variants(name: str, recipe: dict[str, Any], old: Callable[[str], str]) -> Iterator[tuple[str, list[str]]]:
    """Names and overrides of the runs of one recipe."""
    small = dict(SMALL)
    for key, most in _MOST.items():
        given = value(recipe, old(key))
        if given is not None:
            small[key] = min(given, most)
    if small.get("train.group_size") == 1:
        small["train.prompts_per_step"] = 8
    for n in range(len(value(recipe, old("rewards")) or [])):
        small[f"rewards[{n}].timeout"] = _TIMEOUT

    def words(**more: Any) -> list[str]:
        return [f"{old(key)}={setting}" for key, setting in (small | more).items()]

    yield name, words()
    if name in SPREAD:
        yield f"{name}:controllers=2", words(controllers=2)
        yield f"{name}:devices=2", words(devices_per_controller=2)


def value(tree: Any, key: str) -> Any:
    """The value of ``train.group_size``; None where there is none."""
    for part in key.split("."):
        tree = tree.get(part) if isinstance(tree, dict) else None
    return tree


@dataclass
class Revision:
    """A tree, what runs there, and what came out by case."""

    label: str
    tree: Path
    cases: list[Case]
    process: subprocess.Popen[str] | None = None
    stopped: bool = False

    def record(self, folder: Path) -> dict[str, Record]:
        """Run the cases in a process of their own, which works in ``folder``.

        Where the process itself dies, the case that ran then has failed, and another process does the rest.
        """
        folder.mkdir()
        found: dict[str, Record] = {}
        while not self.stopped and len(found) < len(self.cases):
            left = self.cases[len(found) :]
            for answer in self._answers(left, folder):
                found[answer["case"]] = answer["record"]
                self._tell(len(found), answer)
            if len(found) < len(self.cases):
                log = (folder / "log.txt").read_text(errors="replace").splitlines()[-12:]
                why = "\n".join([f"the process ended with {self.process and self.process.returncode}", *log])
                case = self.cases[len(found)].name
                found[case] = {ERROR: {"why": why}}
                self._tell(len(found), {"case": case, "record": found[case], "seconds": 0.0})
        return found

    def _answers(self, cases: Sequence[Case], folder: Path) -> Iterator[dict[str, Any]]:
        """What ``freeze_record.py`` says of each case, until it ends."""
        listed = folder / "cases.json"
        listed.write_text(json.dumps([asdict(case) for case in cases]))
        paths = [str(self.tree), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        words = [sys.executable, "-P", str(ROOT / "tools" / "freeze_record.py"), str(self.tree), str(listed)]
        with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=folder, env=environment, text=True) as process:
            self.process = process
            for line in process.stdout or ():
                yield json.loads(line)

    def stop(self) -> None:
        """End the process. At the first signal ``mmrl train`` finishes its step, at the second it stops."""
        self.stopped = True
        for _ in range(20):
            if self.process is None or self.process.poll() is not None:
                return
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.5)
        if self.process is not None:
            self.process.kill()

    def _tell(self, done: int, answer: dict[str, Any]) -> None:
        how = "FAILED" if ERROR in answer["record"] else ""
        line = f"{self.label:>4} {done:>2}/{len(self.cases)}  {answer['case']:<26} {answer['seconds']:4.0f} s  {how}"
        print(line.rstrip(), file=sys.stderr, flush=True)


class Cpu:
    """CPU seconds of this process and all below it, also those that nobody waits for; looked at twice a second."""

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, float], float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        me = psutil.Process()
        while not self._ended.wait(0.5):
            for process in [me, *me.children(recursive=True)]:
                try:
                    times = process.cpu_times()
                    self._seconds[process.pid, process.create_time()] = times.user + times.system
                except psutil.Error:
                    continue

    def end(self) -> float:
        self._ended.set()
        self._thread.join()
        return sum(self._seconds.values())


@contextmanager
def worktree(revision: str, folder: Path) -> Generator[Path]:
    """The tree of ``revision``, under ``folder``. Raises ``RefusedError`` for a revision that is not there."""
    found = git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}")
    if found.returncode:
        raise RefusedError(f"--base: {revision!r} is no revision of {ROOT}; name a commit, a branch or a tag")
    tree = folder / "tree"
    added = git("worktree", "add", "--detach", str(tree), found.stdout.strip())
    if added.returncode:
        raise RefusedError(f"--base: git cannot check out {revision}: {added.stderr.strip()}")
    try:
        yield tree
    finally:
        git("worktree", "remove", "--force", str(tree))


def git(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


def main(words: Sequence[str] | None = None) -> int:
    """The exit code: 0 where all is equal, 1 where something differs, 2 for what the user must change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REV", help="compare the working tree with this revision")
    parser.add_argument("--only", metavar="RECIPE", nargs="+", default=[], help="these recipes, or sums:devices=2")
    parser.add_argument("--out", metavar="FILE", type=Path, help="write the working tree's record, as JSON")
    options = parser.parse_args(words)
    began, cpu = time.perf_counter(), Cpu()
    try:
        with tempfile.TemporaryDirectory(prefix="mmrl-freeze-") as folder:
            code = freeze(options.base, options.only, options.out, Path(folder).resolve())
    except RefusedError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        seconds = cpu.end()
    print(f"{time.perf_counter() - began:.0f} s wall, about {seconds:.0f} CPU-seconds")
    return code


def freeze(base: str | None, only: Sequence[str], out: Path | None, folder: Path) -> int:
    """Do what ``main`` does, in ``folder``."""
    if out is not None and not out.absolute().parent.is_dir():
        raise RefusedError(f"--out: there is no folder {out.absolute().parent}; make it, or name another file")
    renames = Renames.read(ROOT / RENAMES)
    every, left_out = cases(ROOT, lambda key: key)
    check_choice(every, only)
    chosen = [case for case in every if not only or case.names & {*only}]
    print_choice(chosen, left_out)
    new = Revision("new", ROOT, chosen)
    if base is None:
        (record,) = record_all([new], folder)
        return print_record(record, out)
    with worktree(base, folder) as tree:
        renames = renames.since(Renames.read(tree / RENAMES))
        theirs, _ = cases(tree, lambda key: renames.old_name("recipe", key))
        theirs = [case for case in theirs if not only or case.names & {*only}]
        before, now = record_all([Revision("base", tree, theirs), new], folder)
    if out is not None:
        write(now, out)
    return print_compared(compare(before, now, renames, whole=not only), now)


def record_all(revisions: Sequence[Revision], folder: Path) -> list[dict[str, Record]]:
    """The records of all revisions, which run side by side."""
    with ThreadPoolExecutor(len(revisions)) as pool:
        running = [pool.submit(one.record, folder / one.label) for one in revisions]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
            for ended in running:
                if ended.done():
                    ended.result()
        except BaseException:
            for one in revisions:
                one.stop()
            raise
        return [ended.result() for ended in running]


def check_choice(every: Sequence[Case], only: Sequence[str]) -> None:
    """Raises ``RefusedError`` for what ``--only`` or ``SPREAD`` names and is not there."""
    names = set[str]().union(*(case.names for case in every))
    recipes = ", ".join(sorted(name for name in names if ":" not in name))
    for name in only:
        if name not in names:
            raise RefusedError(f"--only: there is no CPU recipe {name!r}; give some of {recipes}")
    for name in SPREAD:
        if name not in names:
            raise RefusedError(f"SPREAD in tools/freeze.py names {name!r}, which is no CPU recipe; change it there")


def print_choice(chosen: Sequence[Case], left_out: dict[str, str]) -> None:
    """What runs, and what does not and why."""
    reasons = {reason: [n for n, why in left_out.items() if why == reason] for reason in left_out.values()}
    print(f"{len(chosen)} runs")
    for reason, names in reasons.items():
        say(f"Left out, {reason}: {', '.join(names)}.")
    if any(":" in case.name for case in chosen) and not find_spec("ray"):
        print("Ray is missing, so nothing runs on two controllers or devices: install the extra `ray`")


def print_record(record: dict[str, Record], out: Path | None) -> int:
    """Where a recipe did not run, the exit code is 1."""
    for name, one in record.items():
        print(f"{name:<26} {counts(one)}")
    if out is not None:
        write(record, out)
        print(f"written to {out}")
    return int(any(ERROR in one for one in record.values()))


def write(record: dict[str, Record], out: Path) -> None:
    """Without measured values, so that equal runs give equal files."""
    found = {name: without_measured(one) for name, one in record.items()}
    out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def counts(record: Record) -> str:
    if ERROR in record:
        return f"did not run: {record[ERROR]['why'].splitlines()[0]}"
    metrics = len(record["metrics"] | record["heldout"])
    others = (f"{len(record[section])} {section}" for section in ("tensors", "state", "recipe"))
    return ", ".join([f"{metrics} metrics", *others])


def print_compared(found: Compared, new: dict[str, Record]) -> int:
    """The exit code: 1 where anything differs."""
    for case, differences in found.differences.items():
        if not differences:
            print(f"{case:<26} equal  {counts(new[case])}")
            continue
        print(f"{case:<26} {len(differences)} differences")
        for one in differences:
            print("\n".join(one.lines()))
    for problem in found.problems:
        say(problem)
    reasons: dict[str, list[str]] = {}
    for name, why in [pair for patterns in MEASURED.values() for pair in patterns.items()]:
        reasons.setdefault(why, []).append(name)
    print("Not compared, but must be there:")
    for why, names in reasons.items():
        say(f"  {why}: {', '.join(names)}")
    differ = sum(map(bool, found.differences.values()))
    print(f"{differ} of {len(found.differences)} runs differ, {len(found.problems)} problems")
    return 0 if found.equal else 1


def say(text: str) -> None:
    """Print ``text`` in 80 columns, its own lines kept."""
    for line in text.splitlines():
        print(textwrap.fill(line, 80, subsequent_indent="    ", break_on_hyphens=False))


if __name__ == "__main__":
    sys.exit(main())

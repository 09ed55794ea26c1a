"""Kill a run with SIGKILL at random moments of training and saving, resume it, and compare with an undisturbed run.

    python benchmarks/random_kills.py --kills 100                                 # one controller
    python benchmarks/random_kills.py --kills 20 --controllers 4                  # four, as Ray actors on this machine
    python benchmarks/random_kills.py --kills 100 --recipe episodes               # an environment's calls among them

One run is trained to its end and never killed. Others are killed, again and again, until they reach their end; then
the next begins. After every kill the rows written so far and the newest checkpoint (SHA-256 of every file of tensors)
must be those of the first run, the newest checkpoint must be whole, and no process may be left. What is stopped goes on
with the same command; ``state.json`` in ``--folder`` has every kill.

A moment is drawn from ``(seed, number of the kill)``: while the run starts, in a step, or in a save; a save is waited
for and killed some milliseconds into it. A kill *was in a save* where it left a half-written checkpoint behind, or one
more than are kept. With several controllers it takes one of them (the launcher starts all again), the launcher with all
it started, or the launcher alone, whose processes must then end by themselves.

With ``--recipe episodes`` moments are drawn beside calls of an environment, too, and no answer may be in the journal
twice, nor differ from that of the first run. A kill was *in a call* where a call had no answer yet.

Runs of one controller are forked from this process, which has imported the libraries; ``--fresh`` starts Python anew.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

import mmrl.cli
from mmrl.config.loader import load_recipe
from mmrl.core import checkpoint_reader as reader
from mmrl.logging.metrics import read

ROOT = Path(__file__).resolve().parents[1]
MARK = "MMRL_RANDOM_KILLS"
REWARD = """
import mmrl

@mmrl.reward(inputs=({what!r},))
def score(samples, *, context):
    return [{value} for s in samples]
"""
WORLD = """
import random, time
from mmrl import Observation

class Counter:
    def __init__(self, log):
        self.log = log
    def note(self):
        with open(self.log, "ab", buffering=0) as file:
            file.write(b"x")
        time.sleep(0.02)
    def reset(self, prompt, seed):
        self.sum, self.turn = random.Random(seed).randint(1, 9), 0
        self.note()
        return f"Begin with {self.sum}."
    def step(self, action):
        self.sum += sum(map(ord, action.text))
        self.turn += 1
        self.note()
        return Observation(f"{self.sum}", reward=0.1 * (self.sum % 7), done=self.turn == 3)
"""
COMMON = ["train.group_size=4", "eval.every=4", "eval.samples=4", "checkpoint.every=1", "model.dtype=float32"]
COMMON += ["optim.schedule=constant"]
TEXT = ["train.prompts_per_step=2", "train.micro_batch_size=4", "sampling.max_new_tokens=8"]
RECIPES = {
    "sums": (("text", "sum(map(ord, s.text)) % 7 / 7"), TEXT),
    "episodes": (None, TEXT),
    "shapes-lora": (
        ("tensor", "float(s.tensor.mean())"),
        ["train.prompts_per_step=4", "train.micro_batch_size=4", "sampling.steps=4", "sampling.window={size: 2}"],
    ),
}
"""Small forms of them, with a reward that every sample has another of: weights move in every step."""
NOT_LEARNED = ("time/", "perf/", "plan/", "features/", "placement/", "sent/", "balance/load", "balance/residual")
LOG = "log.txt"
LEFT_S = 30.0
"""Seconds in which the processes of a launcher that was killed must have ended."""
LIFE_S = 900.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--controllers", type=int, default=1)
    parser.add_argument("--recipe", choices=RECIPES, help="sums; shapes-lora with several controllers (see docs)")
    parser.add_argument("--steps", type=int, default=16, help="of a run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--fresh", action="store_true", help="start Python anew for every life of a run")
    parser.add_argument("--folder", type=Path, default=Path("runs/kills"))
    chosen = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    # measured seconds decide which controller a text goes to, and who adds what the last digits of a sum
    chosen.recipe = chosen.recipe or ("sums" if chosen.controllers == 1 else "shapes-lora")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    trial = Trial(chosen)
    try:
        trial.go()
    finally:
        trial.end_all()
    print(trial.summary())
    if trial.faults:
        raise SystemExit("\n".join(trial.faults))


class Fresh:
    """Final class: ``mmrl`` with ``words``, in a new interpreter."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        command = [sys.executable, "-m", "mmrl.cli", *words]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {**os.environ, MARK: str(folder), "PYTHONPATH": paths}
        with (folder / LOG).open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=env, start_new_session=True)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.poll()

    def wait(self) -> int:
        return self._process.wait(LIFE_S)


class Forked:
    """Final class: ``mmrl`` with ``words``, in a fork of this process. It dies with it, also where that is killed."""

    def __init__(self, words: Sequence[str], folder: Path) -> None:
        self._process = multiprocessing.get_context("fork").Process(target=self._run, args=(words, folder))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join(LIFE_S)
        if self._process.exitcode is None:
            raise SystemExit(f"process {self.pid} does not end")
        return self._process.exitcode

    def _run(self, words: Sequence[str], folder: Path) -> None:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with (folder / LOG).open("ab") as log:
            for stream in (1, 2):
                os.dup2(log.fileno(), stream)
        sys.argv = ["mmrl", *words]
        mmrl.cli.main()


Life = Fresh | Forked


class Trial:
    """Final class: the runs of one folder. Raises ``SystemExit`` where a run fails that was not killed."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.folder: Path = chosen.folder.absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.kills, self.controllers, self.seed = chosen.kills, chosen.controllers, chosen.seed
        reward, small = RECIPES[chosen.recipe]
        own, self.calls = self.folder / "own.py", self.folder / "calls"
        self.plays = reward is None
        if reward is None:
            own.write_text(WORLD)
            self.calls.touch()
            world = f'name: "{own}:Counter", options: {{log: "{self.calls}"}}, max_tokens: 90, workers: 2'
            given = [f"environment={{{world}}}", "rewards=[{name: environment}]"]
        else:
            own.write_text(REWARD.format(what=reward[0], value=reward[1]))
            given = [f'rewards=[{{name: "{own}:score"}}]']
        words = [*COMMON, *small, *given, f"controllers={chosen.controllers}", f"train.steps={chosen.steps}"]
        self.words = ["sums" if self.plays else chosen.recipe, *words]
        self.fresh = chosen.fresh or chosen.controllers > 1
        self.whole, self.file, self.born = self.folder / "whole", self.folder / "state.json", 0.0
        fresh = {"words": self.words, "seed": self.seed, "reference": None, "kills": [], "runs": []}
        self.state: dict[str, Any] = json.loads(self.file.read_text()) if self.file.exists() else fresh
        if (self.state["words"], self.state["seed"]) != (self.words, self.seed):
            raise SystemExit(f"{self.file} is of other settings; give their options again, or another --folder")

    # -- the runs ------------------------------------------------------------------------------------------------------

    def go(self) -> None:
        self.end_all()
        if not self.fresh:
            warm(self.words)
        if self.state["reference"] is None:
            self.state["reference"] = self._never_killed()
            self._keep()
        rows = len(read(self.whole / "metrics.jsonl"))
        while len(self.state["kills"]) < self.kills or self._run().exists():
            out, self.born = self._run(), time.time()
            life = self._start(out)
            while life.poll() is None and len(self.state["kills"]) < self.kills:
                self._kill(life)
            if self._ended(life):
                self.state["runs"].append(self._compared(out, rows))
                self._keep()
                shutil.rmtree(out)

    def _run(self) -> Path:
        return self.folder / f"run-{self.seed}-{len(self.state['runs']):03d}"

    def _start(self, out: Path, *more: str) -> Life:
        words = ["train", *self.words, *more, "--out", str(out), *(["--resume"] if out.exists() else [])]
        return (Fresh if self.fresh else Forked)(words, self.folder)

    def _ended(self, life: Life) -> bool:
        """Wait for it; returns whether it came to its end, and was not killed."""
        code = life.wait()
        if code not in (0, -signal.SIGKILL):
            lines = (self.folder / LOG).read_text(errors="replace").splitlines()[-30:]
            raise SystemExit("\n".join([*lines, f"a run ended with status {code}, and nobody killed it"]))
        return code == 0

    def _never_killed(self) -> dict[str, float]:
        """Seconds until the first row, of a step and of a save."""
        shutil.rmtree(self.whole, ignore_errors=True)
        began, seen, saves, first = time.monotonic(), 0.0, [], 0.0
        life = self._start(self.whole, "checkpoint.keep=10000")
        while life.poll() is None:
            now = time.monotonic()
            first = first or (now - began if (self.whole / "checkpoints" / "step_000001").exists() else 0.0)
            if bool(aside(self.whole)) != bool(seen):
                saves += [now - seen] if seen else []
                seen = 0.0 if seen else now
            time.sleep(0.002)
        if not self._ended(life):
            raise SystemExit("the run that nobody is to kill was killed")
        rows = read(self.whole / "metrics.jsonl")
        if not all(row["optim/grad_norm"] for row in rows):
            raise SystemExit("a step has no gradient, so that there is nothing to compare")
        steps = statistics.median(row["time/step"] for row in rows)
        return {"start": first, "step": steps, "save": statistics.median(saves) if saves else 0.02}

    # -- one kill ------------------------------------------------------------------------------------------------------

    def _kill(self, life: Life) -> None:
        """Wait for the moment of the next kill, and kill; nothing where the run comes to its end before."""
        n, out, took = len(self.state["kills"]), self._run(), self.state["reference"]
        draw = random.Random(f"{self.seed} {n}")
        kind = draw.choices(["start", "call" if self.plays else "step", "save"], [0.15, 0.35, 0.5])[0]
        whom = "all" if self.controllers == 1 else draw.choices(["one", "all", "launcher"], [0.5, 0.25, 0.25])[0]
        share, more = draw.random(), draw.choice([1, 2]) + (whom == "one")
        before = last(out)
        if kind == "step":
            self._until(life, lambda: last(out) >= before + more, every=0.02)
        if kind == "call":
            noted = self.calls.stat().st_size + draw.randint(1, 60)  # a step has 18 to 26
            self._until(life, lambda: self.calls.stat().st_size >= noted)
        if kind == "save":
            self._until(life, lambda: any(step >= before + more for step in aside(out)))
        most = {"save": 0.9 * took["save"], "call": 0.03}
        until = time.monotonic() + share * most.get(kind, took.get(kind, 0.0))
        begun = before if kind == "start" else math.inf  # it may start sooner than the first run did
        self._until(life, lambda: time.monotonic() >= until or last(out) > begun, every=0.005)
        if life.poll() is not None:
            return
        victims = self._victims(life, whom, draw)
        half = self._in_save(out) if whom == "one" and victims else None
        for victim in victims or self._victims(life, "all", draw):
            with suppress(psutil.NoSuchProcess):
                victim.kill()
        killed = not victims or whom != "one"
        left = self._left(life) if killed else []
        made = {"n": n, "kind": kind, "whom": whom if victims else "all", "run": out.name, "row": last(out)}
        made["in_save"] = self._in_save(out) if half is None else half
        made["faults"] = [f"left: {left}"] * bool(left) + (self._differs(out) if killed else [])
        made["in_call"] = kind != "start" and any(None in of for of in told(out, "*.jsonl").values())
        found = reader.steps(out / "checkpoints")
        made["saved"] = found[-1] if found else 0
        self.state["kills"].append(made)
        self._keep()
        print(f"kill {n + 1}/{self.kills}: {json.dumps(made)}", file=sys.stderr, flush=True)

    def _in_save(self, out: Path) -> bool:
        """Whether something of this life of the run is half written, or one checkpoint too many stands there."""
        folder = out / "checkpoints"
        found = [folder / f".tmp-step_{step:06d}" for step in aside(out)]
        if len(kept := reader.steps(folder)) > 2:
            found.append(folder / f"step_{kept[-1]:06d}")
        with suppress(FileNotFoundError):  # it is in place now
            return any(path.stat().st_mtime > self.born for path in found)
        return False

    def _until(self, life: Life, reached: Callable[[], bool], every: float = 0.002) -> None:
        end = time.monotonic() + LIFE_S
        while life.poll() is None and not reached():
            if time.monotonic() > end:
                raise SystemExit(f"{self._run()} makes no progress; see {self.folder / LOG}")
            time.sleep(every)

    def _victims(self, life: Life, whom: str, draw: random.Random) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess):
            launcher = psutil.Process(life.pid)
            started = launcher.children(recursive=True)
            if whom == "one":
                actors = [p for p in started if "ray::Actor" in " ".join(p.cmdline())]
                return [draw.choice(actors)] if len(actors) == self.controllers else []
            return [launcher] if whom == "launcher" else [launcher, *started]
        return []

    def _left(self, life: Life) -> list[str]:
        """What still runs of a run that was killed, after all that it may take to end."""
        life.wait()
        until = time.monotonic() + (LEFT_S if self.controllers > 1 else 2.0)
        while (found := marked(self.folder)) and time.monotonic() < until:
            time.sleep(0.1)
        names = [f"{p.pid} {p.name()}" for p in found if p.is_running()]
        self.end_all()
        return names

    def end_all(self) -> None:
        """End what this command, or one before it in the same folder, has started."""
        for process in marked(self.folder):
            with suppress(psutil.Error):
                process.kill()
                process.wait(10)

    # -- what must be equal --------------------------------------------------------------------------------------------

    def _differs(self, out: Path) -> list[str]:
        """How the rows and the newest checkpoint of a run differ from those of the one never killed."""
        faults = []
        for name in ("metrics.jsonl", "heldout.jsonl"):
            mine, whole = self._learned(out / name), self._learned(self.whole / name)
            for row, other in zip(mine, whole, strict=False):
                keys = [k for k in row.keys() | other.keys() if row.get(k) != other.get(k)]
                faults += [f"{name}, step {row['step']}: {', '.join(sorted(keys)[:4])} differ"] * bool(keys)
        mine, whole = told(out), told(self.whole)
        faults += [f"{key}: told {n} times" for key in mine if (n := len([*filter(None, mine[key])])) > 1]
        faults += [f"{key}: told otherwise" for key in mine if not {*filter(None, mine[key])} <= {*whole.get(key, ())}]
        found, skipped = reader.load_latest(out / "checkpoints")
        faults += skipped
        if found is not None:
            theirs = tensors_of(self.whole / "checkpoints" / found.directory.name)
            mine = tensors_of(found.directory)
            names = [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
            faults += [f"{found.directory.name}: {', '.join(sorted(names))} differ"] * bool(names)
        return faults

    def _learned(self, file: Path) -> list[dict[str, Any]]:
        """Rows without times, bytes and figures of the machine. The last bits of the log-probs that an episode was
        sampled with depend on the episodes beside it."""
        left_out = (*NOT_LEARNED, *(["mismatch/"] if self.plays else []))
        return [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in read(file)]

    def _compared(self, out: Path, rows: int) -> dict[str, Any]:
        """What became of a run that has ended."""
        faults = self._differs(out)
        if told(out).keys() != told(self.whole).keys():
            faults.append("other calls were answered")
        for name in ("metrics.jsonl", "heldout.jsonl"):
            if (mine := len(read(out / name))) != (theirs := len(read(self.whole / name))):
                faults.append(f"{name}: {mine} rows, not {theirs}")
        if reader.steps(out / "checkpoints")[-1:] != [rows]:
            faults.append(f"no checkpoint of step {rows}")
        kills = sum(kill["run"] == out.name for kill in self.state["kills"])
        print(f"{out.name} ended after {kills} kills: {faults or 'exact'}", file=sys.stderr, flush=True)
        return {"run": out.name, "kills": kills, "faults": faults}

    @property
    def faults(self) -> list[str]:
        found = [f"kill {kill['n']}: {fault}" for kill in self.state["kills"] for fault in kill["faults"]]
        return found + [f"{run['run']}: {fault}" for run in self.state["runs"] for fault in run["faults"]]

    def summary(self) -> str:
        kills, runs = self.state["kills"], self.state["runs"]
        kinds, whom = Counter(k["kind"] for k in kills), Counter(k["whom"] for k in kills)
        exact = sum(not run["faults"] for run in runs)
        return (
            f"{len(kills)} kills ({dict(kinds)}; of {dict(whom)}), {sum(k['in_save'] for k in kills)} in a save, "
            f"{sum(k['in_call'] for k in kills)} in a call; "
            f"{exact} of {len(runs)} runs ended with the rows and tensors of the run never killed; "
            f"{sum(bool(k['faults']) for k in kills)} kills left something wrong"
        )

    def _keep(self) -> None:
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.state, indent=1))
        os.replace(new, self.file)


def warm(words: Sequence[str]) -> None:
    """Import, in this process, what a run needs; torch begins no threads for that."""
    import torch

    import mmrl.runtime.start  # noqa: F401
    from mmrl.app.build import build

    torch.set_num_threads(1)
    loaded = load_recipe([words[0]], list(words[1:]))
    build(loaded.recipe)


def aside(out: Path) -> list[int]:
    """The steps of checkpoints that are being written, or were when the run was killed."""
    return [int(path.name.rpartition("_")[2]) for path in (out / "checkpoints").glob(".tmp-step_*")]


def last(out: Path) -> int:
    """The step of the last whole row."""
    rows = read(out / "metrics.jsonl")
    return rows[-1]["step"] if rows else 0


def told(out: Path, files: str = "0*.jsonl") -> dict[str, list[str | None]]:
    """What an environment answered to each call of training, in JSON: None where it was only asked. A class that has
    lost its state is called again for what is answered already; that is no answer."""
    found: dict[str, list[str | None]] = {}
    for file in sorted((out / "episodes").glob(files)):
        for row in read(file):
            key = " ".join(str(row[name]) for name in ("slot", "attempt", "sample", "turn", "after"))
            answers = found.setdefault(f"{file.name} {key}", [])
            if "asked" not in row:
                answers[:] = [*filter(None, answers), json.dumps(row["told"])]
            elif not answers:
                answers.append(None)
    return found


def tensors_of(directory: Path) -> dict[str, str]:
    """The checksum of every file of tensors, as the manifest (which was checked) has it."""
    files = json.loads((directory / reader.MANIFEST).read_text())["files"]
    return {name: of["sha256"] for name, of in files.items() if name != reader.STATE}


def marked(folder: Path) -> list[psutil.Process]:
    """Processes that were started for ``folder``, by this process or one before it."""
    ours, found = set(psutil.Process().children(recursive=True)), []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            for_it = process in ours or process.environ().get(MARK) == str(folder)
            if for_it and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


if __name__ == "__main__":
    main()

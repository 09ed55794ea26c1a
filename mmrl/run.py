"""Build a run from its recipe, train it, resume it, measure it. The step itself is ``mmrl.loop``."""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import mmrl
from mmrl import checkpoint
from mmrl.batch import Run
from mmrl.config.algorithms import PPO, with_length_limit
from mmrl.config.loader import LoadedRecipe
from mmrl.config.names import resolve, resolve_drop_in
from mmrl.config.schema import Recipe
from mmrl.controller import Controller
from mmrl.datasets.records import checked
from mmrl.engines.policy import Policy
from mmrl.errors import UserError
from mmrl.evaluation import Heldout, measure
from mmrl.flight import Flight
from mmrl.loop import train_step
from mmrl.report.clock import Clock
from mmrl.report.metrics import MetricsLog, read
from mmrl.report.progress import Progress, status_line
from mmrl.report.rundir import RunDir
from mmrl.report.trackers import Tracker, check_trackers, open_trackers
from mmrl.rewards.scoring import RewardSet
from mmrl.trajectory import Prompt

if TYPE_CHECKING:
    from mmrl.algorithms.objective import Objective


def build(recipe: Recipe, root: Path) -> Run:
    """Load everything a step needs; what fails cheaply fails first. ``root``: where relative paths are looked up."""
    device = choose_device(recipe.device)
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    prompts = load_prompts(recipe, root, "train")
    controller = Controller(recipe.seed)
    rewards = RewardSet(recipe.rewards, root, device, controller.total)
    objective = load_objective(recipe)
    if objective.kind == "pathwise" and not rewards.differentiable:
        raise UserError(
            f"algorithm.type: {recipe.algorithm.type} follows the reward's gradient, and not every reward declares "
            "@mmrl.reward(differentiable=True); use a differentiable one (colour:target), or algorithm.type=flow_grpo"
        )
    pipeline = mmrl.load("pipelines", resolve_drop_in(root, recipe.pipeline)).build(
        recipe, resolve(root, recipe.model.path), device
    )
    policy = Policy(pipeline.policy, recipe.optim, recipe.train.steps * recipe.train.updates_per_step)
    for copy in objective.copies:
        policy.keep(copy)
    if any("reference" in name for name in objective.needs | objective.prepares):
        policy.keep("reference")
    critic = None
    if isinstance(recipe.algorithm, PPO):
        settings = recipe.optim.model_copy(update={"lr": recipe.algorithm.critic_lr, "ema_decay": None})
        critic = Policy(pipeline.open_critic(), settings, policy.total_updates)
    flight = Flight(recipe.rollout.partial) if recipe.rollout.partial else None
    return Run(recipe, controller, pipeline, policy, objective, rewards, prompts, critic, flight)


def choose_device(name: str) -> torch.device:
    """``auto`` takes an accelerator where torch sees one. Raises ``UserError`` for one that is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(f"device: {name!r} is not to be had here ({error}); use device=auto or device=cpu") from error
    return device


def load_prompts(recipe: Recipe, root: Path, split: str) -> Sequence[Prompt]:
    """The prompts of ``train`` or ``heldout``, as lazy as the data set makes them.

    Raises ``UserError`` for an empty or unusable data set, and past ``data.max_bad_fraction`` of bad records.
    """
    name = recipe.data.name if ":" in recipe.data.name else f"{recipe.data.name}:prompts"
    options = dict(getattr(recipe.data, split))
    if isinstance(options.get("path"), str):
        options["path"] = resolve(root, options["path"])
    try:
        made = mmrl.load("datasets", resolve_drop_in(root, name))(split, **options)
        prompts = made if isinstance(made, Sequence) else list(made)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"data.{split}: {name} cannot be called with {options}: {error}; change data.{split}"
        ) from error
    if not prompts:
        raise UserError(f"data.{split}: {name} gave no prompts for {options or 'its defaults'}; change data.{split}")
    checked(prompts, recipe.data.max_bad_fraction)
    return prompts


def load_objective(recipe: Recipe) -> Objective:
    """The objective of the recipe's algorithm, from the file of that name in ``mmrl.algorithms``."""
    import importlib

    module = importlib.import_module(f"mmrl.algorithms.{recipe.algorithm.type}")
    text = recipe.sampling.type == "text"
    settings = with_length_limit(recipe.algorithm, recipe.decoding.max_new_tokens) if text else recipe.algorithm
    return module.Objective(settings)


def train(loaded: LoadedRecipe, out: Path, resume: bool = False, overwrite: bool = False) -> Path:
    """Run the recipe into the directory ``out`` (or go on where it stopped) and return it."""
    recipe = loaded.recipe
    check_trackers(recipe.log)
    with RunDir.create(out, overwrite=overwrite, resume=resume) as directory, stop_on_signal() as stop:
        if resume and directory.resolved.exists():  # a run killed in its first second has none yet
            same_run(directory, loaded)
        directory.write_recipe(loaded.paths, loaded.overrides, loaded.resolved())
        directory.write_environment()
        session = Session(loaded, directory)
        if resume:
            session.restore()
        try:
            finished = session.train(stop)
        except UserError as error:
            saved = f"steps up to {session.saved} are saved; mend it, then: {command(loaded, out)} --resume"
            raise UserError(f"{error}\n{saved}") from error
        if finished:
            session.finish()
        else:
            print(f"stopped after step {session.done}; continue with: {command(loaded, out)} --resume", file=sys.stderr)
    return out


def command(loaded: LoadedRecipe, out: Path) -> str:
    """The command line that trains this recipe into ``out``."""
    words = ["mmrl", "train", *map(str, loaded.paths), *loaded.overrides, "--out", str(out)]
    return shlex.join(words)


@dataclass
class Stop:
    asked: bool = False


@contextmanager
def stop_on_signal() -> Iterator[Stop]:
    """Ctrl-C or SIGTERM asks for a stop after the step; a second one interrupts at once."""
    stop = Stop()

    def ask(number: int, _: object) -> None:
        if stop.asked:
            raise KeyboardInterrupt
        stop.asked = True
        print("stopping after this step; once more to stop at once (the last checkpoint stays)", file=sys.stderr)

    before = {s: signal.signal(s, ask) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def same_run(directory: RunDir, loaded: LoadedRecipe) -> None:
    """Refuse to go on with another recipe than the run's, but for how long it runs and what it shows.

    Raises ``UserError`` naming the keys that differ.
    """
    free = {"train.steps", "train.max_cpu_seconds", "eval", "checkpoint", "log", "threads", "architecture"}
    if loaded.recipe.optim.schedule == "linear":
        free.discard("train.steps")  # the learning rate of every step depends on it
    before, now = (flatten(d) for d in (json.loads(directory.resolved.read_text()), loaded.resolved()))
    changed = [k for k in sorted(before.keys() | now.keys()) if before.get(k) != now.get(k)]
    changed = [k for k in changed if k not in free and k.split(".")[0] not in free]
    if changed:
        raise UserError(
            f"--resume: {', '.join(changed)} differ from {directory.resolved}. Resume with the "
            "same recipe and overrides, or start a new run with --out"
        )


def flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``; lists stay whole."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    return {k: v for key, sub in tree.items() for k, v in flatten(sub, f"{prefix}.{key}" if prefix else key).items()}


class Session:
    """Final class: one process's part of a run, from a loaded model to a written report."""

    def __init__(self, loaded: LoadedRecipe, directory: RunDir) -> None:
        self.recipe, self.directory = loaded.recipe, directory
        with Progress(1, "load", "model") as progress:
            self.run = build(self.recipe, loaded.root)
            self.heldout = Heldout(self.run, load_prompts(self.recipe, loaded.root, "heldout"), loaded.root)
            for rewards in self.heldout.rewards:  # those of training among them
                rewards.folder = directory.path
            progress.advance()
        self._name_bad_records()
        self.done = 0
        self.cpu_seconds = 0.0
        self.saved = 0
        self.updates = 0
        self.last_save_failed: str | None = None
        self.trackers: list[Tracker] = []

    def _name_bad_records(self) -> None:
        """Records that the data sets left out, named in failures.jsonl (once: a resumed run finds them again)."""
        found = [r for prompts in (self.run.prompts, self.heldout.prompts) for r in checked(prompts, 1.0)]
        bad = dict.fromkeys(found)  # the splits of one source name the same records
        for record in bad if not self.directory.failures.exists() else ():
            self.directory.failure(0, "record", record.where, record.why)
        if bad:
            print(f"{len(bad)} records cannot be used and are left out (failures.jsonl names them)", file=sys.stderr)

    def restore(self) -> None:
        """Take up the newest whole checkpoint, and forget what was logged after it."""
        found, skipped = checkpoint.load_latest(self.directory.checkpoints)
        for line in skipped:
            print(f"warning: {line}; an older one is taken", file=sys.stderr)
        if found is not None:
            checkpoint.restore(self.run, found)
            self.done, self.cpu_seconds = found.step, found.state["cpu_seconds"]
            self.saved, self.updates = self.done, self.run.policy.updates
        print(
            f"resuming after step {self.done}" if found else "no checkpoint yet: starting from step 0", file=sys.stderr
        )
        self.directory.truncate_after(self.done if found else -1)

    def train(self, stop: Stop) -> bool:
        """Train to the end, or to a stop that was asked for; returns whether the end was reached.

        What fails in between (a reward, a full disk) saves the finished steps first and then goes up.
        """
        recipe = self.recipe
        self.trackers = open_trackers(recipe.log, self.directory, recipe.name)
        try:
            with (
                MetricsLog(self.directory.metrics, self.trackers) as metrics,
                MetricsLog(self.directory.heldout, self.trackers, prefix="heldout/") as heldout,
                Progress(recipe.train.steps, recipe.name, "steps", done=self.done) as progress,
            ):
                measured = {row["step"] for row in read(self.directory.heldout)}
                if self._due() and self.done not in measured and not stop.asked:
                    progress.line(self._measure(heldout))
                while not self.finished and not stop.asked:
                    self._step(metrics, progress)
                    if self._due():
                        progress.line(f"step {self.done}  {self._measure(heldout)}")
                    if self.done % recipe.checkpoint.every == 0:
                        self._save()
            if self.done > self.saved:
                self._save()
        except (UserError, OSError):
            if self.done > self.saved and self.run.policy.updates == self.updates:
                self._save()
            raise
        finally:
            for tracker in self.trackers:
                tracker.close()
            for rewards in self.heldout.rewards:
                rewards.close()
            self.run.pipeline.close()
        return self.finished

    @property
    def finished(self) -> bool:
        limit = self.recipe.train.max_cpu_seconds
        return self.done >= self.recipe.train.steps or (limit is not None and self.cpu_seconds >= limit)

    def _due(self) -> bool:
        """Whether this step is one to evaluate after: every ``eval.every``, the first and the last."""
        every = self.recipe.eval.every
        return every is not None and (self.done % every == 0 or self.finished)

    def _step(self, metrics: MetricsLog, progress: Progress) -> None:
        """One training step and its row."""
        device = choose_device(self.recipe.device)
        clock, cpu, wall = Clock(device), time.process_time(), time.perf_counter()
        row, failures = train_step(self.run, self.done, clock)
        self.cpu_seconds += time.process_time() - cpu
        self.done += 1
        self.updates = self.run.policy.updates
        for f in failures:
            self.directory.failure(self.done, "reward", f.prompt, f.reason, reward=f.reward, sample=vars(f.sample))
        row |= clock.row() | {"time/step": time.perf_counter() - wall, "perf/cpu_seconds": self.cpu_seconds}
        metrics.write(self.done, row | memory(device))
        progress.advance(1, status_line(self.done, self.recipe.train.steps, row, brief=True))

    def finish(self) -> None:
        """Write the report; raise ``UserError`` where the last checkpoint could not be saved."""
        from mmrl.report.html import write_report

        report = write_report(self.directory.path)
        print(
            f"done: {self.done} steps, {self.cpu_seconds:.0f} CPU-seconds of training; report: {report}",
            file=sys.stderr,
        )
        if self.last_save_failed:
            raise UserError(self.last_save_failed)

    def _measure(self, log: MetricsLog) -> str:
        """Evaluate on the held-out prompts: a row, a grid, and a line for the terminal."""
        row = measure(self.run, self.heldout, self.recipe.eval.samples, self.directory, self.done, log)
        shown = {k.removeprefix("reward/"): v for k, v in row.items() if k not in ("samples", "dropped")}
        return "held-out: " + "  ".join(f"{k} {v:.3f}" for k, v in shown.items())

    def _save(self) -> None:
        """Save; a disk that is full is told and the run goes on with the last good checkpoint."""
        whole = checkpoint.of_run(self.run, self.done, cpu_seconds=self.cpu_seconds)
        try:
            checkpoint.save(self.directory.checkpoints, whole, self.recipe.checkpoint.keep)
            self.saved, self.last_save_failed = self.done, None
        except OSError as error:
            kept = checkpoint.steps(self.directory.checkpoints)
            self.last_save_failed = (
                f"the checkpoint of step {self.done} could not be saved ({error.strerror or error}); "
                f"{f'the last whole one is step {kept[-1]}' if kept else 'there is none yet'}. "
                "Free space there; --resume repeats the steps since."
            )
            print(f"warning: {self.last_save_failed}", file=sys.stderr)


def memory(device: torch.device) -> dict[str, float]:
    """Peak memory so far in MiB: of the accelerator where there is one, else of the process."""
    if device.type == "cuda":
        return {"perf/peak_memory_mib": torch.cuda.max_memory_allocated(device) / 2**20}
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"perf/peak_memory_mib": peak / (2**20 if sys.platform == "darwin" else 2**10)}


def open_run(path: Path) -> tuple[Recipe, RunDir]:
    """A finished or interrupted run's recipe. Raises ``UserError`` where ``path`` is no run."""
    directory = RunDir(path)
    try:
        return Recipe.model_validate_json(directory.resolved.read_text()), directory
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is no run directory: its resolved.json cannot be read ({error}); "
            "name a directory that mmrl train of this version made"
        ) from error


def restored(path: Path, which: str) -> tuple[Run, RunDir, int]:
    """The run at ``path`` with the weights of a checkpoint: ``latest``, a step, or ``base`` (as it began).

    The weights are those that evaluation and export use (the moving average where the recipe keeps one).
    """
    recipe, directory = open_run(path)
    if recipe.device != "cpu":
        recipe = recipe.model_copy(update={"device": "auto"})  # a GPU's run may be looked at without one
    run = build(recipe, path)
    step = 0
    if which != "base":
        if which == "latest":
            found, skipped = checkpoint.load_latest(directory.checkpoints)
            for line in skipped:
                print(f"warning: {line}; an older one is taken", file=sys.stderr)
        elif which.isascii() and which.isdigit():
            found = checkpoint.load(directory.checkpoints, int(which))
        else:
            raise UserError(f"--checkpoint {which}: give latest, base or a step")
        if found is None:
            raise UserError(f"{path} has no whole checkpoint yet; use --checkpoint base, or train first")
        run.policy.load_state(found.tensors, found.state["policy"])
        step = found.step
    return run, directory, step


def evaluate(path: Path, samples: int | None = None, which: str = "latest") -> dict[str, float | None]:
    """Held-out rewards of a run's checkpoint over ``samples`` samples (None: as many as the recipe says)."""
    run, _, step = restored(path, which)
    heldout = Heldout(run, load_prompts(run.recipe, path, "heldout"), path)
    row, _, _ = heldout.score(samples or run.recipe.eval.samples)
    return {"step": step} | {k: v if math.isfinite(v) else None for k, v in row.items()}

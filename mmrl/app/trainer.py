"""Train one controller's part of a recipe: start or resume, then run step by step until the end or a stop. The step is
in ``mmrl.training.loop``; ``mmrl.runtime`` starts the controllers of a run."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from mmrl.app.build import build
from mmrl.app.divergence import Divergence, divergence
from mmrl.checkpoint.run_state import load_checkpoint, of_run, restore, saver_of
from mmrl.config.evaluation_checks import label_of
from mmrl.config.loader import LoadedRecipe
from mmrl.controller import Controller
from mmrl.core import checkpoint_reader as reader
from mmrl.core import notices
from mmrl.core.checkpoint_manifest import directory_of
from mmrl.core.checkpoint_reader import BEST, LAST_GOOD, PartState, Saved, Stateful
from mmrl.core.clock import Clock, memory
from mmrl.core.episode import notes_of_episodes
from mmrl.core.errors import NotFiniteError, StoppedError, UserError
from mmrl.core.garbage import rarely_collected
from mmrl.core.json_types import JsonObject
from mmrl.core.notices import tell
from mmrl.core.out_of_memory import OutOfMemoryError, in_phase
from mmrl.core.secrets import remember
from mmrl.core.signals import Stop
from mmrl.core.trajectory import Prompt
from mmrl.data.loading import load_prompts
from mmrl.data.records import checked, digest_of_prompts
from mmrl.families.text.pipeline import keep_episodes
from mmrl.logging.expected import Pace, expected
from mmrl.logging.metrics import MetricsLog, Tracker, read, read_numbers
from mmrl.logging.profile import Traces, named
from mmrl.logging.progress import Progress, status_line
from mmrl.logging.rundir import Ended, RunDir
from mmrl.logging.trackers import open_trackers
from mmrl.placement import device_tasks
from mmrl.planner.oom_message import explained
from mmrl.planner.unread import few, unread
from mmrl.rewards.judging.usage import PREFIX, Spending
from mmrl.rewards.patience import one_line, summary
from mmrl.rewards.scoring import Failure
from mmrl.step.step_context import Devices
from mmrl.training.callbacks import Callbacks
from mmrl.training.early_stopping import EarlyStop
from mmrl.training.evaluation import Evaluator, measure, unmeasured
from mmrl.training.guards import Limits
from mmrl.training.loop import train_step

ANEW = "nothing was changed; put the files back from a copy, or start anew with --overwrite"
"""The edit where a run cannot go on from any of its checkpoints."""


@dataclass(frozen=True)
class Outcome:
    """How training ended: ``done`` steps, of which ``saved`` are in a checkpoint; ``error`` is what stopped it, and
    ``end`` says how it has finished."""

    finished: bool
    done: int
    saved: int
    cpu_seconds: float
    error: str | None = None
    save_failed: str | None = None
    divergence: Divergence | None = None
    exit_code: int = UserError.exit_code
    """The exit code of the process, if there is an error."""
    end: Ended | None = None
    asked: str | None = None
    """Why a callback stopped it."""


class _DataBefore:
    """What the prompts of a run are, kept in its checkpoints: a run that goes on with others says so."""

    def __init__(self, train: Sequence[Prompt], heldout: Sequence[Prompt]) -> None:
        self._digests = {"train": digest_of_prompts(train), "heldout": digest_of_prompts(heldout)}

    def state_dict(self) -> PartState:
        return PartState({**self._digests})

    def load_state_dict(self, numbers: JsonObject, saved: Saved) -> None:
        for split in (split for split, now in self._digests.items() if numbers.get(split) != now):
            tell(
                f"warning: data.{split} is not what it was at step {saved.step}: records were changed, added, moved or "
                "taken out. The run goes on with those that are there now, so no run of either has its numbers"
            )


class Trainer:
    """Final class: one controller's part of a run, from a loaded model to the last step.

    ``directory`` is where this controller writes, ``checkpoints`` where the leader saves for all; by default the
    directory's own. ``devices``: what computes; by default this process. ``pulse``: entered with every
    phase, for who watches. ``callbacks``: of the user's, called after steps, evaluations and checkpoints.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        directory: RunDir,
        controller: Controller | None = None,
        checkpoints: Path | None = None,
        devices: Devices | None = None,
        pulse: Callable[[str], AbstractContextManager[None]] = nullcontext,
        callbacks: Callbacks | None = None,
    ) -> None:
        self.recipe, self.directory = loaded.recipe, directory
        remember(loaded.tree.values)  # of a controller in a process of its own
        self.checkpoints = checkpoints or directory.checkpoints
        self.callbacks = callbacks
        self.controller = controller or Controller(self.recipe.seed)
        self._loaded = loaded
        self._traces = Traces(directory.path) if self.recipe.profile else None
        self.pulse = named(pulse) if self.recipe.profile else pulse
        with Progress(1, "load", "model") as progress, self.pulse("load"), rarely_collected():
            try:
                with in_phase("load"):
                    self.run = build(self.recipe, self.controller, devices)
                    prompts = load_prompts(self.recipe, "heldout")
                    self.heldout = Evaluator(self.run, prompts, self.pulse)
            except OutOfMemoryError as error:
                raise UserError(explained(error, loaded)) from error
            for rewards in self.heldout.rewards:  # those of training among them
                rewards.folder = directory.path
            in_files = self.controller.leads and self.recipe.data.in_files
            self._data = _DataBefore(self.run.prompts, prompts) if in_files else None
            self._episodes = keep_episodes(self.run.pipeline, directory.path)
            progress.advance()
        self.saver = saver_of(self.run, self.checkpoints)
        self._name_bad_records()
        self.done = 0
        self.cpu_seconds = 0.0
        self.updates = 0
        self._measured: int | None = None
        self._evaluating = False
        self._evaluation_seconds = 0.0
        self._paced = False
        self._given: dict[str, float] = {}
        self.trackers: list[Tracker] = []
        settings = self.recipe.eval.early_stopping
        self.early = None if settings is None else EarlyStop(settings, self.recipe.eval.since)
        watched = [label_of(reward.name, reward.label) for reward in self.recipe.eval.rewards]
        self.limits = Limits(self.recipe.eval.guards, watched, self.recipe.eval.since)
        self.spending = Spending({"rewards": self.recipe.rewards, "eval.rewards": self.recipe.eval.rewards})

    def _name_bad_records(self) -> None:
        """Records that the data sets left out, named in failures.jsonl (once: a resumed run finds them again)."""
        found = [r for prompts in (self.run.prompts, self.heldout.prompts) for r in checked(prompts, 1.0)]
        bad = dict.fromkeys(found)  # the splits of one source name the same records
        for record in bad if not self.directory.failures.exists() else ():
            self.directory.failure(0, "record", record.where, record.why)
        for note in self._notes_on_data() if self.controller.leads else ():
            notices.note(f"note: {note}")
        if bad:
            notices.note(f"{len(bad)} records cannot be used and are left out (failures.jsonl names them)")

    def _notes_on_data(self) -> Iterator[str]:
        """What ``mmrl plan`` says of pictures that nothing reads, or that are few."""
        prompts, pipeline = self.run.prompts, self.run.pipeline
        first = [prompts[n] for n in range(min(len(prompts), 100))]
        yield from unread(self.recipe, first, reads_media=getattr(pipeline, "reads_media", False))
        yield from few(self.recipe, len(prompts))

    def begin(self, stop: Stop, found: Saved | None = None, *, resume: bool) -> Outcome:
        """Train, after the newest checkpoint where ``resume``, which is ``found`` where it is known; what the user must
        mend is in the outcome."""
        if resume:
            self.restore(found)
        try:
            for _ in self.steps(stop):
                pass
        except UserError as error:
            if isinstance(error, StoppedError) and (error.everywhere or self.controller.size == 1):
                return self.outcome()
            return self.failed(error)
        return self.outcome()

    def outcome(self) -> Outcome:
        """How training ended, without an error."""
        failed, saved = self.saver.failed, self.saver.saved
        asked = None if self.callbacks is None else self.callbacks.asked
        return Outcome(self.finished, self.done, saved, self.cpu_seconds, None, failed, end=self._end(), asked=asked)

    def _end(self) -> Ended | None:
        """How training has finished; None where it has not."""
        if (why := self._ended_early()) is not None:
            return Ended("early", self.done, why)
        spent = self._spent >= 1 and self.done < self.recipe.train.steps
        return Ended("finished", self.done, "CPU budget spent" if spent else "") if self.finished else None

    def _ended_early(self) -> str | None:
        """Why early stopping or a guard has ended training; None where none has."""
        if self.early is not None and self.early.stopped:
            return self.early.why()
        return self.limits.reason() if self.limits.stopped else None

    def failed(self, error: UserError) -> Outcome:
        """How training ended, with ``error``."""
        met, what, code = None, str(error), UserError.exit_code
        if isinstance(error, NotFiniteError):
            met = divergence(self.run, error, self.done, evaluating=self._evaluating, proved=self._proved)
            what = met.what
        elif isinstance(error, OutOfMemoryError):
            what = explained(error, self._loaded)
        else:
            code = error.exit_code
        return Outcome(False, self.done, self.saver.saved, self.cpu_seconds, what, self.saver.failed, met, code)

    @property
    def _proved(self) -> bool:
        """Whether something finite was computed with the weights after the last finished step: an evaluation, or the
        gradient of an update."""
        evaluated = self._measured == self.done and self.run.policy.evaluated == "current"
        return evaluated or self.run.policy.updates > self.updates

    def restore(self, found: Saved | None = None) -> None:
        """Take up ``found``, or the newest whole checkpoint, and forget what was logged after it.

        Raises ``UserError`` where there are checkpoints and none is whole; nothing is forgotten then.
        """
        found = found or reader.newest(self.checkpoints, ANEW)
        if found is not None:
            if found.step < self.recipe.train.steps:
                with self.pulse("evaluation"), in_phase("evaluation"):
                    self.heldout.draw_base()
            with self.pulse("load"):
                restore(self.run, found, self._others)
                self.run.compute.devices.run_on_other_trainers(self.run, load_checkpoint, self.checkpoints, found.step)
            self.done, self.cpu_seconds = found.step, found.cpu_seconds
            self.saver.saved, self.updates = self.done, self.run.policy.updates
        notices.note(f"resuming after step {self.done}" if found else "no checkpoint yet: starting from step 0")
        gone = self.directory.of_others(self.controller.size) if self.controller.leads else []
        for directory in (self.directory, *gone):
            directory.truncate_after(self.done if found else -1)

    def steps(self, stop: Stop) -> Generator[dict[str, float]]:
        """Train to the end, or to a stop that was asked for: yields the metrics of each step once it is done, evaluated
        and saved where that was due.

        What fails in between (a reward, a full disk) saves the finished steps first and then goes up. So does closing
        the iterator before the end.
        """
        recipe = self.recipe
        self.run.rewards.heed(lambda: stop.asked)
        self.trackers = open_trackers(recipe.log, self.directory, recipe.name) if self.controller.leads else []
        gone = self.directory.of_others(self.controller.size) if self.controller.leads else []
        self.spending.begin([d.path for d in (self.directory, *gone)], self.controller.gather)
        try:
            with (
                MetricsLog(self.directory.metrics, self.trackers) as metrics,
                MetricsLog(self.directory.heldout, self.trackers, prefix="heldout/") as heldout,
                Progress(recipe.train.steps, recipe.name, "steps", self.done, spent=self._spent) as progress,
            ):
                measured = {row["step"] for row in read_numbers(self.directory.heldout)}
                self._known_evaluations()
                due = self._due() and self.done not in measured and not self.spending.over()
                if self.controller.gather(due)[0] and not self._agreed(stop.asked):  # others may be new to the run
                    progress.line(self._measure(heldout), paced=False)
                while not self.finished and not self.spending.over() and not self._agreed(stop.asked):
                    with nullcontext() if self._traces is None else self._traces.step(self.done + 1):
                        row = self._step(metrics, progress)
                    if self._due():
                        progress.line(f"step {self.done}  {self._measure(heldout)}")
                    if self.done % recipe.checkpoint.every == 0 or self._best_now or self._good_now:
                        self._save()
                    yield row
                if self.early is not None and self.early.stopped:
                    progress.line(self.early.message())
                elif self.limits.stopped:
                    progress.line(self.limits.message())
            self._save_rest()
            if not self.finished and (why := self.spending.over()):
                self._agreed(True)  # nobody ends the others while they save
                raise UserError(why)
            if self.callbacks is not None:
                self.callbacks.ended()
        except GeneratorExit:  # whoever takes the steps goes no further
            self._save_rest()
            raise
        except NotFiniteError:
            self.saver.finish()  # of a step before; this one is not to be gone on from
            raise
        except (UserError, OSError) as error:
            # what is saved together is saved by all, and those that did not fail are elsewhere
            all_here = not self.saver.together or getattr(error, "everywhere", False)
            if all_here and self.run.policy.updates == self.updates:
                self._save_rest()
            self.saver.finish()
            raise
        finally:
            for one in (*self.trackers, *self.heldout.rewards, self.run.pipeline, self.run.compute.devices):
                one.close()

    def _agreed(self, asked: bool) -> bool:
        """Whether any controller was asked: all go on, or stop, after the same step."""
        return any(self.controller.gather(asked))

    @property
    def finished(self) -> bool:
        if self._ended_early() is not None:
            return True
        return self.done >= self.recipe.train.steps or self._spent >= 1

    @property
    def _spent(self) -> float:
        """The share of train.max_cpu_seconds that the steps so far have used; 0 without a limit."""
        limit = self.recipe.train.max_cpu_seconds
        return 0.0 if limit is None else self.cpu_seconds / limit

    @property
    def _best_now(self) -> bool:
        """Whether the evaluation after this very step is the best so far."""
        return self.early is not None and self.done > 0 and self.early.step == self.done

    @property
    def _good_now(self) -> bool:
        """Whether the evaluation after this very step is one that a guard goes back to."""
        return self.limits.keeps and self.done > 0 and self.limits.within == self.done

    def _expected(self, seconds: float, spent: float) -> str:
        """How long the rest of training will take, for the terminal, by its first step."""
        pace = Pace(seconds, spent, self._evaluation_seconds)
        every, may_stop = self.recipe.eval.every, self.early is not None or self.limits.settings.action == "stop"
        return expected(self.done, self.recipe.train.steps, every, pace, self._spent, may_stop=may_stop)

    def _due(self) -> bool:
        """Whether this step is one to evaluate after: every ``eval.every``, the first and the last."""
        every = self.recipe.eval.every
        return every is not None and (self.done % every == 0 or self.finished)

    def _step(self, metrics: MetricsLog, progress: Progress) -> dict[str, float]:
        """One training step; returns its row."""
        device = self.run.compute.device
        clock, cpu, wall = (
            Clock(device, self.pulse),
            self.run.compute.devices.cpu_seconds(self.run),
            time.perf_counter(),
        )
        sent, features = self._sent(), self.run.pipeline.features
        written = features.written_bytes
        spent = self._spent
        with in_phase("step"):
            row, failures = train_step(self.run, self.done, clock, spent)
        self.cpu_seconds += self.controller.count(self.run.compute.devices.cpu_seconds(self.run) - cpu)
        self.done += 1
        self.updates = self.run.policy.updates
        for f in failures:
            self.directory.failure(self.done, "reward", f.prompt, f.reason, reward=f.reward, sample=vars(f.sample))
        mine = clock.row() | {"time/step": time.perf_counter() - wall} | memory(device)
        mine |= {f"sent/{kind}": n for kind, n in (self._sent() - sent).items() if not kind.startswith(PREFIX)}
        mine |= self.spending.fresh(rewards.sent for rewards in self.heldout.rewards)
        mine |= {"features/bytes": features.bytes, "features/held": features.held}
        mine["features/spilled_bytes"] = features.written_bytes - written
        given = self.run.pipeline.updates()  # evaluations before the step among them
        mine |= {name: n - self._given.get(name, 0) * name.startswith("perf/") for name, n in given.items()}
        self._given = given
        mine |= self._loaded.planned
        rows = self.controller.gather(mine)
        row |= largest(rows) | self.spending.add(rows) | {"perf/cpu_seconds": self.cpu_seconds}
        logged: dict[str, float] = {}
        try:
            if self.callbacks is not None:
                logged = self.callbacks.step(self.done, row)
        finally:  # a callback that raises loses no row
            metrics.write(self.done, row | logged)
        self.directory.placed(self.run.compute.devices.lines() if self.controller.leads else ())
        line = status_line(row)
        progress.advance(1, line + self._left_out(row, failures), self._spent)
        if not self._paced and not self.finished:
            progress.line(self._expected(row["time/step"], self._spent - spent))
            for note in notes_of_episodes(row):
                progress.line(note)
        self._paced = True
        return row | logged

    def _left_out(self, row: Mapping[str, float], failures: Sequence[Failure]) -> str:
        """How many samples of a step have no score, and why, for the terminal; nothing where all have one."""
        if not row.get("reward/dropped"):
            return ""
        weights = self.run.rewards.weights
        mine = [(f.reward, one_line(f.reason, 60)) for f in failures if weights.get(f.reward)]
        size = self.recipe.train.prompts_per_step * self.recipe.train.group_size
        return f"  {summary(mine, int(row['reward/dropped']), size)}"

    def _sent(self) -> Counter[str]:
        """Bytes given away so far, by kind: to the other controllers, and by rewards."""
        return self.controller.peers.sent + self.run.rewards.sent

    def _measure(self, log: MetricsLog) -> str:
        """Evaluate on the held-out prompts: a row, a grid, and a line for the terminal."""
        self._evaluating, began = True, time.perf_counter()
        with self.pulse("evaluation"), in_phase("evaluation"):
            row, text = measure(self.run, self.heldout, self.recipe.eval.samples, self.directory, self.done, log)
        self._evaluating, self._measured = False, self.done
        if self._episodes is not None:
            self._episodes.evaluated(self.done)
        self._evaluation_seconds = time.perf_counter() - began
        if self.callbacks is not None:
            self.callbacks.evaluated(self.done, row)
        beyond = self.limits.saw(self.done, row)
        if beyond and not self.limits.stopped:
            text += f"\nwarning: {'; '.join(beyond)}: the reward may be over-optimised (docs/reward_hacking.md)"
        if self.early is not None:
            if not unmeasured(row, self.early.settings.metric, self.recipe.scoring.max_failed):
                self.early.saw(self.done, row)
            else:
                text += f"; not counted by eval.early_stopping: too few samples have {self.early.settings.metric}"
        return f"held-out: {text}"

    def _known_evaluations(self) -> None:
        """Have the guards know the evaluations of before, which the leader has: controllers may be new to the run."""
        mine = [{name: v for name, v in row.items() if v is not None} for row in read_numbers(self.directory.heldout)]
        for row in self.controller.gather(mine)[0]:
            if row["step"] == 0:
                self.heldout.guards.base = row
            self.limits.saw(row["step"], row)
        if self.heldout.alarm is not None:
            self.heldout.alarm.saw_before(self.controller.gather(read(self.directory.heldout_samples))[0])

    def _save(self) -> None:
        together = self.saver.ranks is not None
        with (
            self.pulse("save"),
            self.run.compute.devices.running_on_other_trainers(self.run, device_tasks.save, self.done)
            if together
            else nullcontext(),
        ):
            taken = of_run(self.run, self.done, self._others, cpu_seconds=self.cpu_seconds)
            self.saver.begin(taken, proved=self._proved)
        self._name_saved()

    def _name_saved(self) -> None:
        """Tell callbacks of the newest checkpoint that is on the disk."""
        if self.callbacks is not None:
            self.callbacks.saved(self.saver.saved, self.checkpoints / directory_of(self.saver.saved))

    @property
    def _others(self) -> dict[str, Stateful]:
        """The parts of the trainer that a checkpoint keeps."""
        good = self.limits if self.limits.keeps else None
        kept: dict[str, Stateful | None] = {BEST: self.early, "data": self._data, LAST_GOOD: good}
        return {"placement": self.run.compute.devices, **{name: part for name, part in kept.items() if part}}

    def _save_rest(self) -> None:
        """Have the last step on the disk, where it can be."""
        with self.pulse("save"):
            self.saver.finish()
        lacks = self.done > self.saver.saved
        if self._agreed(lacks) if self.saver.together else lacks:  # a disk may be full where only the leader writes
            self._save()
            with self.pulse("save"):
                self.saver.finish()
        self._name_saved()


def largest(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """By name, the largest of the controllers' values: a step takes as long as its slowest controller."""
    return {name: max(row.get(name, 0.0) for row in rows) for name in dict.fromkeys(n for row in rows for n in row)}

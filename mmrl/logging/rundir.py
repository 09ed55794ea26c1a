"""The directory of a run: its files, who may write them, and which of them may be removed.

recipe.yaml        the recipe as given, the command line's overrides as comments
resolved.json      every setting of the run, defaults included
env.json           versions and machine
ended.json         how the run ended                 continued.jsonl  what `mmrl continue` changed, and when
metrics.jsonl      a row per training step          heldout.jsonl    a row per evaluation
heldout_samples.jsonl  of each evaluation the prompt and the rewards of every sample
failures.jsonl     every sample or record left out, by name
placement.jsonl    what each device did when, and why roles were moved (several devices to a controller)
judge-*.jsonl      what generative judges read and wrote (transcripts), verdicts by content (cache), and their usage
episodes/          what an environment answered: 000012.jsonl in training step 12, counted from 0
samples/           step_000000.png (a grid), .json (prompts and scores) and the pictures themselves
votes/             what people vote on while it trains, votes.jsonl, and the rewards made of the votes
profile/           step_000002.json.gz, a trace by torch's profiler (profile: true)
controllers/1/     the same of another controller: its own log, failures, verdicts and samples
calling.json       the rewards that are being called, while they are
checkpoints/       report.html        run.lock (held by the process that writes here)
"""

from __future__ import annotations

import fcntl
import io
import itertools
import json
import os
import re
import shlex
import time
import warnings
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

from mmrl.config.loader import Continuation
from mmrl.config.masked_text import masked_document, masked_override
from mmrl.config.names import refuse_moved
from mmrl.core.errors import UserError, one_line
from mmrl.core.files import remove, write_atomic
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.secrets import hidden, masked
from mmrl.core.stored import LARGEST_LINES, BadFileError, parsed, read_as, read_object, read_text
from mmrl.core.untrusted import open_file, resolved
from mmrl.logging.environment import environment
from mmrl.logging.metrics import truncate_after

FILES = (
    "recipe.yaml",
    "resolved.json",
    "env.json",
    "metrics.jsonl",
    "heldout.jsonl",
    "heldout_samples.jsonl",
    "failures.jsonl",
    "placement.jsonl",
    "judge-cache.jsonl",
    "judge-transcripts.jsonl",
    "judge-usage.jsonl",
    "ended.json",
    "continued.jsonl",
    "calling.json",
    "report.html",
)
FOLDERS = (
    *("samples", "episodes", "checkpoints", "controllers", "profile", "strength"),
    *("tensorboard", "wandb", "trackio"),
)
LOCK = "run.lock"
_OVERRIDE = "# override: "
_LOCK_PATIENCE = 0.5
"""Seconds to wait for the lock: a report that asks whether a run is alive holds it for an instant."""


class RunDir(AbstractContextManager["RunDir"]):
    """Paths inside a run directory, and its lock once ``create`` made or took it over. Reading needs no lock."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.recipe = self.path / "recipe.yaml"
        self.resolved = self.path / "resolved.json"
        self.env = self.path / "env.json"
        self.metrics = self.path / "metrics.jsonl"
        self.heldout = self.path / "heldout.jsonl"
        self.heldout_samples = self.path / "heldout_samples.jsonl"
        self.failures = self.path / "failures.jsonl"
        self.placement = self.path / "placement.jsonl"
        self.samples = self.path / "samples"
        self.checkpoints = self.path / "checkpoints"
        self.continued = self.path / "continued.jsonl"
        self.report = self.path / "report.html"
        self._lock: IO[str] | None = None

    @classmethod
    def create(cls, path: Path | str, *, overwrite: bool = False, resume: bool = False) -> RunDir:
        """Make the directory, or take over an existing one, and lock it until ``close``.

        ``overwrite`` removes what a run made there, ``resume`` keeps it; what came to no row and no checkpoint is
        removed without being asked for. Raises ``UserError`` where a run exists and neither is given, where there is
        none to resume, where the directory holds something other than a run, and where another process is writing it.
        """
        run = cls(Path(path).absolute())  # code of the user's may go to another folder for a while
        try:
            refuse_directory(Path(path), overwrite=overwrite, resume=resume)
            if resume:
                run.check()
            run.path.mkdir(parents=True, exist_ok=True)
            run._acquire()
            if overwrite or not (resume or has_begun(run.path)):
                run._clear()
            run.samples.mkdir(exist_ok=True)
            run.checkpoints.mkdir(exist_ok=True)
        except OSError as error:
            run.close()
            reason = error.strerror or error
            raise UserError(f"cannot write the run directory {path}: {reason}; use --out other") from error
        return run

    def of_controller(self, rank: int) -> RunDir:
        """Where controller ``rank`` writes: the leader here, another in a folder of its own."""
        if rank == 0:
            return RunDir(self.path)
        own = RunDir(self.path / "controllers" / str(rank))
        own.samples.mkdir(parents=True, exist_ok=True)
        return own

    def of_others(self, size: int) -> list[RunDir]:
        """The folders of controllers that a start of this run with more than ``size`` had."""
        found = (self.path / "controllers").glob("*")
        return [RunDir(f) for f in sorted(found) if f.is_dir() and f.name.isdecimal() and int(f.name) >= size]

    def close(self) -> None:
        """Give the lock back. The lock file stays: it also marks the directory as a run."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __exit__(self, *_: object) -> None:
        self.close()

    def write_recipe(self, recipes: Sequence[Path], overrides: Sequence[str], resolved: JsonObject) -> None:
        """Keep the recipe files as given (overlays as further YAML documents), the overrides and the whole outcome.

        Secrets are masked in all of them.
        """
        head = [f"{_OVERRIDE}{one_line(masked_override(text, resolved))}" for text in overrides]
        texts = [masked_document(path.read_text(encoding="utf-8"), resolved).rstrip() for path in recipes]
        parts = [f"# {one_line(path.name)}\n{text}" for path, text in zip(recipes, texts, strict=True)]
        write_atomic(self.recipe, "\n".join([*head, "\n---\n".join(parts), ""]))
        write_atomic(self.resolved, json.dumps(masked(resolved), indent=2, ensure_ascii=False) + "\n")

    def write_continued(self, how: Continuation, resolved: JsonObject) -> None:
        """Keep the recipe with which the run goes on, and a line of what changed; recipe.yaml stays as it was."""
        if how.changes:
            changes = [{"key": key, "before": before, "now": now} for key, before, now in how.changes]
            _append(self.continued, [{"after": how.step, "changes": changes, "notes": list(how.notes)}])
        write_atomic(self.resolved, json.dumps(masked(resolved), indent=2, ensure_ascii=False) + "\n")

    def check(self) -> None:
        """Raises ``UserError`` where something in the directory is not of the kind that mmrl makes: a pipe or a device
        in place of a file, which would be read without end, a link to a file elsewhere, which would be written, or a
        file in place of a folder."""
        for name in (*FILES, LOCK):
            path = self.path / name
            try:
                resolved(path, self.path)
            except OSError as error:
                raise BadFileError(f"{path} is not used: {error.strerror}") from error
            if path.exists() and not path.is_file():
                raise BadFileError(f"{path} is no regular file; remove it, or put the file back from a copy")
            if path.exists() and path.stat().st_size > LARGEST_LINES:
                raise BadFileError(f"{path} has more than {LARGEST_LINES:,} bytes; shorten or remove it")
        for path in (self.path / name for name in FOLDERS):
            if path.exists() and not path.is_dir():
                raise BadFileError(f"{path} is no folder; remove it, or put the folder back from a copy")

    def settings(self) -> dict[str, Any]:
        """What resolved.json holds. Raises ``FileNotFoundError`` where it is missing, ``UserError`` where it is no
        mapping."""
        return read_object(self.resolved)

    def overrides(self) -> list[str]:
        """The ``a.b=c`` of the command line that started the run, from recipe.yaml."""
        try:
            lines = read_text(self.recipe).splitlines()
        except (OSError, BadFileError):
            return []
        head = itertools.takewhile(lambda line: line.startswith(_OVERRIDE), lines)
        return [line.removeprefix(_OVERRIDE) for line in head]

    def write_environment(self) -> None:
        """Write env.json (imports torch)."""
        write_atomic(self.env, json.dumps(environment(), indent=2) + "\n")

    def failure(self, step: int, kind: str, name: str, error: str, **more: Json) -> None:
        """Name one thing that was left out: ``kind`` is reward, record, ...; ``more`` holds JSON values."""
        _append(self.failures, [{"step": step, "kind": kind, "name": name, "error": hidden(error), **more}])

    def placed(self, lines: Iterable[JsonObject]) -> None:
        """Keep what devices did in a step."""
        _append(self.placement, lines)

    def evaluated(self, step: int, lines: Iterable[JsonObject]) -> None:
        """Keep the figures of each sample of the evaluation after ``step``; of a repeated one the last lines count."""
        _append(self.heldout_samples, [{"step": step, **line} for line in lines])

    def truncate_after(self, step: int) -> None:
        """Forget what was recorded after ``step``: rows, failures and samples of steps that resuming will repeat."""
        transcripts = self.path / "judge-transcripts.jsonl"
        for file in (self.metrics, self.heldout, self.heldout_samples, self.failures, self.placement, transcripts):
            truncate_after(file, step)
        for entry in self.samples.glob("step_*"):
            if (found := re.match(r"step_(\d+)", entry.name)) and int(found[1]) > step:
                remove(entry)

    def owner(self) -> JsonObject | None:
        """``{"pid", "started"}`` of the process that is writing this run now, or None."""
        # without a lock file, or locks on this file system, whether a process writes cannot be found out
        with suppress(OSError), io.TextIOWrapper(open_file(self.path / LOCK), "utf-8", "replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return _owner(file)
        return None

    def _acquire(self) -> None:
        file = (self.path / LOCK).open("a+", encoding="utf-8")
        deadline = time.monotonic() + _LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() < deadline:
                    time.sleep(0.02)
                    continue
                owner = _owner(file)
                file.close()
                raise UserError(
                    f"{self.path} is being written by another process (pid {owner.get('pid', 'unknown')}, "
                    f"started {owner.get('started', 'at an unknown time')}); wait for it, stop it, or use --out other"
                ) from None
            except OSError as error:
                warnings.warn(f"{self.path} cannot be locked ({error}): start no second run there", stacklevel=3)
                break
        file.truncate(0)
        started = datetime.now().astimezone().isoformat(timespec="seconds")
        file.write(json.dumps({"pid": os.getpid(), "started": started}) + "\n")
        file.flush()
        self._lock = file

    def _clear(self) -> None:
        for name in (*FILES, *FOLDERS):
            remove(self.path / name)


def looks_like_run(path: Path) -> bool:
    """Whether a run made this directory (its lock file, or the recipe and its outcome, as in a copy)."""
    return (path / LOCK).is_file() or all((path / name).is_file() for name in ("recipe.yaml", "resolved.json"))


def has_begun(path: Path) -> bool:
    """Whether a run there came to anything that is worth keeping: a row, a verdict or a checkpoint."""
    rows = ("metrics.jsonl", "heldout.jsonl", "judge-cache.jsonl")
    written = any((path / name).is_file() and (path / name).stat().st_size for name in rows)
    return written or any((path / "checkpoints").glob("step_*"))


def refuse_directory(path: Path, *, overwrite: bool, resume: bool) -> None:
    """Raise ``UserError`` where no run may be made, or continued, in ``path``, also because a file that the
    run names was moved."""
    if overwrite and resume:
        raise UserError("--resume continues the run and --overwrite removes it; give one of them")
    if path.exists() and not path.is_dir():
        raise UserError(f"{path} is a file, and a run needs a directory; use --out other")
    contents = [p for p in path.iterdir() if p.name != LOCK] if path.is_dir() else []
    if resume:
        if not contents or not looks_like_run(path):
            raise UserError(f"there is no run in {path} to resume; leave out --resume, or name the run with --out RUN")
        refuse_moved(path)
    elif not contents:
        return
    elif not looks_like_run(path):
        raise UserError(f"{path} holds files that no run made, so nothing is written or removed there; use --out other")
    elif not overwrite and has_begun(path):
        raise UserError(
            f"{path} already holds a run; continue it with --resume (or mmrl continue {shlex.quote(str(path))}), "
            "replace it with --overwrite, or keep it and use --out other"
        )


def _owner(file: IO[str]) -> JsonObject:
    try:
        file.seek(0)
        found = parsed(file.read(4096), LOCK)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _append(path: Path, lines: Iterable[JsonObject]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    if text:
        with path.open("a", encoding="utf-8") as file:
            file.write(text)


ENDED = "ended.json"
"""How a run ended: what says so where a run has fewer steps than its recipe."""
How = Literal["finished", "early", "stopped", "failed"]
_MOST_ENDED = 1 << 16
"""Bytes of the file that are read."""


@dataclass(frozen=True)
class Ended:
    """``how``: it came to its end; early stopping or a guard ended it; a signal, a callback or whoever took its steps
    did; an error did. ``step``: finished steps; ``why``: in a few words."""

    how: How
    step: int
    why: str = ""

    def __str__(self) -> str:
        words = {"finished": "finished", "early": "stopped early", "stopped": "stopped", "failed": "failed"}[self.how]
        if self.how == "finished":
            return f"finished ({self.why})" if self.why else words
        return f"{words} at step {self.step}: {self.why}" if self.why else f"{words} at step {self.step}"

    def write(self, run: Path) -> None:
        """Keep it in the directory of the run."""
        made = asdict(self) | {"why": hidden(self.why)}
        write_atomic(run / ENDED, json.dumps(made, ensure_ascii=False) + "\n")


def read_ended(run: Path) -> Ended | None:
    """How the run in ``run`` ended; None while it trains, where it was killed, and of an older version."""
    try:
        return read_as(Ended, run / ENDED, _MOST_ENDED)
    except (OSError, BadFileError):
        return None

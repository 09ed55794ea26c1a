"""Checkpoints that are whole or absent: written aside, checksummed, renamed into place.

``checkpoints/step_000010/`` holds one safetensors file per part, ``state.json`` and, written last,
``manifest.json`` with the size and SHA-256 of each. Step ``n`` means: ``n`` training steps are done.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from mmrl.errors import UserError

if TYPE_CHECKING:
    from mmrl.batch import Run

_NAME = re.compile(r"step_(\d{6,})$")


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: ``tensors`` by part and name, ``state`` any JSON, ``step`` the number of finished steps."""

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]


def of_run(run: Run, step: int, **state: Any) -> Checkpoint:
    """All that going on after ``step`` finished steps needs: policy, critic, responses in flight, what
    is known of prompts' workload, and ``state``."""
    tensors, state["policy"] = run.policy.state()
    if run.critic is not None:
        theirs, state["critic"] = run.critic.state()
        tensors |= {f"critic_{part}": values for part, values in theirs.items()}
    if run.flight is not None:
        tensors["flight"], state["flight"] = run.flight.state()
    if run.balance is not None:
        state["balance"] = run.balance.state()
    if run.attempts is not None:
        state["attempts"] = {"valid": run.attempts.valid}
    return Checkpoint(step, tensors, state)


def restore(run: Run, found: Checkpoint) -> None:
    """Bring ``run`` to where ``of_run`` left it. Raises ``UserError`` where the checkpoint is of another run."""
    run.policy.load_state(found.tensors, found.state["policy"])
    if run.critic is not None:
        theirs = {k.removeprefix("critic_"): v for k, v in found.tensors.items() if k.startswith("critic_")}
        run.critic.load_state(theirs, found.state["critic"])
    if run.flight is not None:
        run.flight.load_state(run, found.tensors["flight"], found.state["flight"])
    if run.balance is not None and "balance" in found.state:
        run.balance.load_state(found.state["balance"])
    if run.attempts is not None:
        run.attempts.valid = found.state["attempts"]["valid"]


def save(folder: Path, checkpoint: Checkpoint, keep: int) -> Path:
    """Write ``checkpoint`` into ``folder`` atomically and delete all but the newest ``keep``.

    Raises ``OSError`` where the disk is full or not writable; what was there before is untouched then.
    """
    target = folder / f"step_{checkpoint.step:06d}"
    aside = folder / f".tmp-{target.name}"
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
        for part, tensors in checkpoint.tensors.items():
            save_file({k: v.contiguous() for k, v in tensors.items()}, aside / f"{part}.safetensors")
        (aside / "state.json").write_text(json.dumps(checkpoint.state))
        manifest = {p.name: {"bytes": p.stat().st_size, "sha256": _sha256(p)} for p in sorted(aside.iterdir())}
        _write_synced(aside / "manifest.json", json.dumps({"step": checkpoint.step, "files": manifest}, indent=1))
        for path in aside.iterdir():
            _sync(path)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(aside, target)
        _sync(folder)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, SafetensorError):  # how safetensors reports a full disk
            raise OSError(str(error)) from error
        raise
    for old in steps(folder)[:-keep]:
        shutil.rmtree(folder / f"step_{old:06d}", ignore_errors=True)
    return target


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint directory, ascending; whole or not."""
    if not folder.is_dir():
        return []
    return sorted(int(m.group(1)) for p in folder.iterdir() if (m := _NAME.match(p.name)) and p.is_dir())


def load(folder: Path, step: int) -> Checkpoint:
    """Read one checkpoint after comparing every file with its manifest. Raises ``UserError`` naming what is torn."""
    directory = folder / f"step_{step:06d}"
    fault = _fault(directory)
    if fault:
        raise UserError(f"checkpoint {directory.name} is not whole: {fault}")
    tensors = {p.stem: load_file(p) for p in sorted(directory.glob("*.safetensors"))}
    return Checkpoint(step, tensors, json.loads((directory / "state.json").read_text()))


def load_latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, if any, and a line for each newer one that was passed over."""
    skipped = []
    for step in reversed(steps(folder)):
        try:
            return load(folder, step), skipped
        except UserError as error:
            skipped.append(str(error))
    return None, skipped


def _fault(directory: Path) -> str | None:
    """Why the checkpoint must not be loaded, or None."""
    try:
        files = json.loads((directory / "manifest.json").read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest.json cannot be read ({type(error).__name__})"
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {expected['bytes']}"
        if _sha256(path) != expected["sha256"]:
            return f"{name} does not match its checksum"
    return None if "state.json" in files else "state.json is missing"


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_synced(path: Path, text: str) -> None:
    path.write_text(text)
    _sync(path)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

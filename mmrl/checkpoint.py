"""What a checkpoint holds, and how a run takes it up again. ``mmrl.saving`` writes it.

``checkpoints/step_000010/`` holds safetensors files, ``state.json`` and, written last, ``manifest.json`` with the size
and SHA-256 of each. Step ``n`` means: ``n`` training steps are done. Tensors are called ``part/name``.

Where the weights lie in shards each rank wrote a file, in the safetensors layout of ``torch.distributed.checkpoint``:
the place of each piece in its tensor stands in the file. Otherwise there is a file per part. Any number of ranks reads
either, each only what it keeps. There is no pickle in it.
"""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from mmrl import early_stopping
from mmrl.errors import UserError

if TYPE_CHECKING:
    from mmrl.batch import Run
    from mmrl.engines.policy import Policy

MANIFEST = "manifest.json"
STATE = "state.json"
_NAME = re.compile(r"step_(\d{6,})$")
_CRITIC = "critic_"
_FLIGHT = "flight"
_AHEAD = "ahead"


@dataclass(frozen=True)
class Checkpoint:
    """What is to be saved: ``tensors`` by part and name, ``state`` any JSON, ``step`` the number of finished steps.

    Tensors are the run's own, which the next step changes; those in shards are ``DTensor``. ``own``: the parts that no
    other controller has.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: dict[str, Any]
    own: frozenset[str] = frozenset()

    @property
    def flat(self) -> dict[str, Tensor]:
        return {f"{part}/{name}": t for part, tensors in self.tensors.items() for name, t in tensors.items()}


@dataclass(frozen=True)
class Saved:
    """A checkpoint that was found whole in ``directory``."""

    step: int
    state: dict[str, Any]
    directory: Path

    @cached_property
    def shapes(self) -> dict[str, dict[str, Tensor]]:
        """Its tensors without their data, by part and name."""
        out: dict[str, dict[str, Tensor]] = {}
        for key, found in self._reader().read_metadata().state_dict_metadata.items():
            part, _, name = key.partition("/")
            out.setdefault(part, {})[name] = torch.empty(found.size, dtype=found.properties.dtype, device="meta")
        return out

    @cached_property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All of it, read whole."""
        return self.parts("")

    def parts(self, prefix: str) -> dict[str, dict[str, Tensor]]:
        """The parts whose names begin so, read whole."""
        out = {
            part: {k: torch.empty_like(t, device="cpu") for k, t in of.items()}
            for part, of in self.shapes.items()
            if part.startswith(prefix)
        }
        self.read(out)
        return out

    def read(self, rooms: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Fill ``rooms``: of a ``DTensor`` this rank's shard. Needs no other rank."""
        from torch.distributed import checkpoint as dcp

        flat = {f"{part}/{name}": room for part, of in rooms.items() for name, room in of.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # each reads for itself
            dcp.load(flat, storage_reader=self._reader(), no_dist=True)

    def _reader(self) -> Any:
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        return HuggingFaceStorageReader(str(self.directory))


def of_run(run: Run, step: int, **state: Any) -> Checkpoint:
    """All that going on after ``step`` finished steps needs: policy, critic, responses in flight, what
    is known of prompts' workload, and ``state``."""
    tensors, state["policy"] = _spread(run.policy)
    if run.critic is not None:
        theirs, state["critic"] = _spread(run.critic)
        tensors |= {f"{_CRITIC}{part}": values for part, values in theirs.items()}
    own: dict[str, dict[str, Tensor]] = {}
    if run.flight is not None:
        pools, state[_FLIGHT] = run.flight.state()
        own = {f"{_FLIGHT}-{pool}": rows for pool, rows in pools.items()}
    if run.ahead is not None:
        tensors[_AHEAD], state[_AHEAD] = run.ahead.state()
    if run.balance is not None:
        state["balance"] = run.balance.state()
    if run.attempts is not None:
        state["attempts"] = {"valid": run.attempts.valid}
    return Checkpoint(step, tensors | own, state, frozenset(own))


def restore(run: Run, found: Saved) -> None:
    """Bring ``run`` to where ``of_run`` left it. Raises ``UserError`` where the checkpoint is of another run."""
    restore_trained(run, found)
    if run.flight is not None:
        pools = {int(part.partition("-")[2]): rows for part, rows in found.parts(_FLIGHT).items()}
        run.flight.load_state(run, pools, found.state[_FLIGHT])
    if run.ahead is not None:
        run.ahead.load_state(run, found.parts(_AHEAD).get(_AHEAD, {}), found.state[_AHEAD])
    if run.balance is not None and "balance" in found.state:
        run.balance.load_state(found.state["balance"])
    if run.attempts is not None:
        run.attempts.valid = found.state["attempts"]["valid"]


def restore_trained(run: Run, found: Saved) -> None:
    """As ``restore``, of what every device that trains has."""
    restore_policy(run.policy, found)
    if run.critic is not None:
        _load(run.critic, found, _CRITIC, "critic")


def restore_policy(policy: Policy, found: Saved) -> None:
    """The trained weights and all that belongs to them. Raises ``UserError`` where they are another policy's."""
    _load(policy, found, "", "policy")


def _spread(policy: Policy) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    tensors, numbers = policy.state()
    return {part: {k: policy.spread(part, k, t) for k, t in of.items()} for part, of in tensors.items()}, numbers


def _load(policy: Policy, found: Saved, prefix: str, key: str) -> None:
    parts = [
        p for p in found.shapes if p.startswith(prefix) and (prefix or not p.startswith((_CRITIC, _FLIGHT, _AHEAD)))
    ]
    rooms = policy.rooms({part.removeprefix(prefix): found.shapes[part] for part in parts})
    found.read({f"{prefix}{p}": {k: policy.spread(p, k, t) for k, t in of.items()} for p, of in rooms.items()})
    policy.load_state(rooms, found.state[key])


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint directory, ascending; whole or not."""
    if not folder.is_dir():
        return []
    return sorted(int(m.group(1)) for p in folder.iterdir() if (m := _NAME.match(p.name)) and p.is_dir())


def load(folder: Path, step: int) -> Saved:
    """One checkpoint, after comparing every file with its manifest. Raises ``UserError`` naming what is torn."""
    directory = folder / f"step_{step:06d}"
    fault = _fault(directory)
    if fault:
        raise UserError(f"checkpoint {directory.name} is not whole: {fault}")
    return Saved(step, json.loads((directory / STATE).read_text()), directory)


def load_latest(folder: Path) -> tuple[Saved | None, list[str]]:
    """The newest whole checkpoint, if any, and a line for each newer one that was passed over."""
    skipped = []
    for step in reversed(steps(folder)):
        try:
            return load(folder, step), skipped
        except UserError as error:
            skipped.append(str(error))
    return None, skipped


def load_best(folder: Path) -> Saved | None:
    """The checkpoint that early stopping found best; None where there is no checkpoint at all.

    Raises ``UserError`` where the run has none such, or the base itself was best.
    """
    newest, _ = load_latest(folder)
    if newest is None or newest.state.get(early_stopping.KEY, {}).get("step") == newest.step:
        return newest
    best = newest.state.get(early_stopping.KEY, {}).get("step")
    if best is None:
        raise UserError("--checkpoint best: the recipe has no eval.early_stopping, so none was kept; give latest")
    if best == 0:
        raise UserError("--checkpoint best: no checkpoint was better than the base model; give base")
    return load(folder, best)


def _fault(directory: Path) -> str | None:
    """Why the checkpoint must not be loaded, or None."""
    try:
        files = json.loads((directory / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"its manifest.json cannot be read ({type(error).__name__})"
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{name} has {path.stat().st_size} bytes, not {expected['bytes']}"
        if sha256(path) != expected["sha256"]:
            return f"{name} does not match its checksum"
    return None if STATE in files else f"{STATE} is missing"


def sha256(path: Path) -> str:
    """Of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()

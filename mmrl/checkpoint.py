"""What a checkpoint holds, and how a run takes it up again. ``mmrl.saving`` writes it.

``checkpoints/step_000010/`` holds safetensors files, ``state.json`` and, written last, ``manifest.json`` with the size
and SHA-256 of each. Step ``n`` means: ``n`` training steps are done. Tensors are called ``part/name``.

Where the weights lie in shards each rank wrote a file, in the safetensors layout of ``torch.distributed.checkpoint``:
the place of each piece in its tensor stands in the file. Otherwise there is a file per part. Any number of ranks reads
either, each only what it keeps. There is no pickle in it.
"""

from __future__ import annotations

import json
import sys
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
from mmrl.manifest import MANIFEST, STATE, Entry, directory_of, entries, fault_of

if TYPE_CHECKING:
    from mmrl.batch import Run
    from mmrl.engines.policy import Policy

ELSEWHERE = "put the files back from a copy, or give --checkpoint base"
"""The edit where a run is looked at and has no whole checkpoint."""
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
    return sorted({entry.step for entry in entries(folder)})


def load(folder: Path, step: int) -> Saved:
    """The checkpoint of ``step``, after comparing every file with its manifest.

    Raises ``UserError`` naming what is torn, and where there is none such.
    """
    errors = []
    for entry in entries(folder):
        if entry.step == step:
            try:
                return _load_entry(entry)
            except UserError as error:
                errors.append(str(error))
    if errors:
        raise UserError("\n".join(errors))
    there = ", ".join(map(str, steps(folder))) or "none"
    raise UserError(f"there is no checkpoint of step {step} in {folder}; the steps there: {there}")


def load_latest(folder: Path) -> tuple[Saved | None, list[str]]:
    """The newest whole checkpoint, if any, and a line for each newer one that was passed over."""
    skipped: list[str] = []
    for entry in _newest_first(folder):
        try:
            return _load_entry(entry), skipped
        except UserError as error:
            skipped.append(str(error))
    return None, skipped


def newest(folder: Path, mend: str) -> Saved | None:
    """The newest whole checkpoint; what is passed over, and what was renamed, is printed. None where there is none.

    Raises ``UserError`` where there are checkpoints and none is whole: all faults, and the edit ``mend``.
    """
    found, skipped = load_latest(folder)
    if found is None and skipped:
        raise UserError("\n  ".join([f"no checkpoint in {folder} can be used", *skipped, mend]))
    if found is not None:
        for line in [f"{line}; an older one is taken" for line in skipped] + _renamed(folder, found):
            print(f"warning: {line}", file=sys.stderr)
    return found


def load_best(folder: Path) -> Saved | None:
    """The checkpoint that early stopping found best; None where there is no checkpoint at all.

    Raises ``UserError`` where the run has none such, where the base itself was best, and where none is whole.
    """
    last = newest(folder, ELSEWHERE)
    if last is None or last.state.get(early_stopping.KEY, {}).get("step") == last.step:
        return last
    best = last.state.get(early_stopping.KEY, {}).get("step")
    if best is None:
        raise UserError("--checkpoint best: the recipe has no eval.early_stopping, so none was kept; give latest")
    if best == 0:
        raise UserError("--checkpoint best: no checkpoint was better than the base model; give base")
    return load(folder, best)


def _newest_first(folder: Path) -> list[Entry]:
    return sorted(entries(folder), key=lambda entry: (-entry.step, entry.renamed))


def _load_entry(entry: Entry) -> Saved:
    if entry.diverged is not None:
        raise UserError(
            f"checkpoint {entry.directory.name} is not used, as training diverged after it: {entry.diverged}"
        )
    fault = fault_of(entry)
    if fault:
        raise UserError(f"checkpoint {entry.directory.name} is not whole: {fault}")
    return Saved(entry.step, json.loads((entry.directory / STATE).read_text()), entry.directory)


def _renamed(folder: Path, found: Saved) -> list[str]:
    """A line for each directory whose name is of another step than its manifest."""
    lines = []
    for entry in entries(folder):
        if entry.renamed and entry.manifest is not None:
            same = found.directory if found.step == entry.step else folder / directory_of(entry.step)
            again = f"; {same.name} is another of it" if same != entry.directory and same.is_dir() else ""
            lines.append(f"checkpoint {entry.directory.name} is of step {entry.step}, as its {MANIFEST} says{again}")
    return lines

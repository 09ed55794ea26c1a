"""The format of a checkpoint, and its reader. ``writer`` writes it, ``run_state`` restores a run from it.

``checkpoints/step_000010/`` holds safetensors files, ``state.json`` and, written last, ``manifest.json`` with the size
and SHA-256 of each. Step ``n`` means: ``n`` training steps are done. Tensors are called ``part/name``.

With sharded weights each rank writes a file, in the safetensors layout of ``torch.distributed.checkpoint``, which
contains the offsets of each shard in its tensor. Otherwise there is one file per part. Any number of ranks can read
both forms, each rank only its shards. No pickle is used.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from mmrl.core.checkpoint_manifest import MANIFEST, STATE, TENSORS, Entry, directory_of, entries, fault_of
from mmrl.core.errors import UserError, refuse
from mmrl.core.json_types import JsonObject, as_integer, as_number, as_object
from mmrl.core.stored import BadFileError, blamed, read_as
from mmrl.core.tensor_files import check_shards

if TYPE_CHECKING:
    from torch.distributed.checkpoint import HuggingFaceStorageReader

ELSEWHERE = "put the files back from a copy, or give --checkpoint base"
"""The edit for commands on a run without a complete checkpoint."""
BEST = "early_stopping"
"""The key of early stopping in the state of a checkpoint; its ``step`` is that of the best weights."""
LAST_GOOD = "guards"
"""The key of a guard that stops; its ``step`` is that of the last evaluation without a sign of over-optimisation."""


@dataclass(frozen=True)
class Checkpoint:
    """The data to save: ``tensors`` by part and name, ``state``, and ``step``, the number of finished steps.

    The tensors are the run's own, not copies, so the next step changes them; sharded ones are ``DTensor``. ``own``: the
    parts that each controller saves itself.
    """

    step: int
    tensors: dict[str, dict[str, Tensor]]
    state: JsonObject
    own: frozenset[str] = frozenset()

    @property
    def flat(self) -> dict[str, Tensor]:
        return {f"{part}/{name}": t for part, tensors in self.tensors.items() for name, t in tensors.items()}


class State(BaseModel):
    """The schema of ``state.json``; beside the seconds it has the numbers of each part of the run by its name."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    cpu_seconds: Annotated[float, Field(ge=0, strict=True)] | None = None


@dataclass(frozen=True)
class Saved:
    """A complete checkpoint in ``directory``: every file has the size and SHA-256 of its manifest."""

    step: int
    state: JsonObject
    directory: Path

    def numbers(self, part: str) -> JsonObject:
        """The ``PartState.numbers`` of the run's part ``part``."""
        return as_object(self.state[part])

    @property
    def cpu_seconds(self) -> float:
        """CPU seconds of all training steps up to the checkpoint."""
        with blamed(self.directory / STATE, "cpu_seconds"):
            return as_number(self.state["cpu_seconds"])

    def into(self, part: str, load: Callable[[JsonObject, Saved], None]) -> None:
        """Restore a part of the run: ``load`` gets its numbers and this checkpoint. Raises ``UserError``, also where
        ``load`` fails with what the checkpoint holds."""
        with blamed(self.directory, part):
            load(self.numbers(part), self)

    @cached_property
    def shapes(self) -> dict[str, dict[str, Tensor]]:
        """The tensors on the meta device (without data), by part and name."""
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        out: dict[str, dict[str, Tensor]] = {}
        for key, found in self._reader().read_metadata().state_dict_metadata.items():
            part, _, name = key.partition("/")
            assert isinstance(found, TensorStorageMetadata)
            out.setdefault(part, {})[name] = torch.empty(found.size, dtype=found.properties.dtype, device="meta")
        return out

    @cached_property
    def tensors(self) -> dict[str, dict[str, Tensor]]:
        """All tensors, by part and name."""
        return self.parts("")

    def parts(self, prefix: str) -> dict[str, dict[str, Tensor]]:
        """The tensors of the parts whose names begin with ``prefix``."""
        out = {
            part: {k: torch.empty_like(t, device="cpu") for k, t in of.items()}
            for part, of in self.shapes.items()
            if part.startswith(prefix)
        }
        self.read(out)
        return out

    def read(self, rooms: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Read into the tensors ``rooms``; for a ``DTensor`` only this rank's shard. Not collective."""
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.api import CheckpointException

        flat = {f"{part}/{name}": room for part, of in rooms.items() for name, room in of.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # every rank reads by itself
            try:
                dcp.load(flat, storage_reader=self._reader(), no_dist=True)
            except CheckpointException as error:  # which is no Exception
                why = next(iter(error.failures.values()))[0]
                raise BadFileError(
                    f"{self.directory}: its tensors are not those of this run ({why}); put it back from a copy"
                ) from None

    def _reader(self) -> HuggingFaceStorageReader:
        from torch.distributed.checkpoint import HuggingFaceStorageReader

        return HuggingFaceStorageReader(str(self.directory))


@dataclass(frozen=True)
class PartState:
    """The state of a part of a run: ``numbers`` (JSON), and ``tensors`` by file and name."""

    numbers: JsonObject
    tensors: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)


class Stateful(Protocol):
    """A part of a run that a checkpoint saves and restores."""

    def state_dict(self) -> PartState: ...

    def load_state_dict(self, numbers: JsonObject, saved: Saved, /) -> None:
        """Restore the state of ``state_dict``: its ``numbers``, and its tensors, which it reads from ``saved``.

        Raises ``UserError`` if the checkpoint is of a different run.
        """
        ...


def steps(folder: Path) -> list[int]:
    """The steps that have a checkpoint directory, complete or not, in ascending order."""
    return sorted({entry.step for entry in entries(folder)})


def load(folder: Path, step: int) -> Saved:
    """The checkpoint of ``step``, after checking every file against the manifest.

    Raises ``UserError`` if there is none, or if it is damaged; the message names the damage.
    """
    errors = []
    for entry in entries(folder):
        if entry.step == step:
            try:
                return _load_entry(entry)
            except UserError as error:
                errors.append(str(error))
    refuse(errors)
    there = ", ".join(map(str, steps(folder))) or "none"
    raise UserError(f"there is no checkpoint of step {step} in {folder}; the steps there: {there}")


def load_latest(folder: Path) -> tuple[Saved | None, list[str]]:
    """The newest complete checkpoint, if there is one, and a line for each newer one that was skipped."""
    skipped: list[str] = []
    for entry in sorted(entries(folder), key=lambda entry: (-entry.step, entry.renamed)):
        try:
            return _load_entry(entry), skipped
        except UserError as error:
            skipped.append(str(error))
    return None, skipped


def newest(folder: Path, mend: str) -> Saved | None:
    """The newest complete checkpoint; None without checkpoints. Prints which ones were skipped or renamed.

    Raises ``UserError`` if there are checkpoints and none is complete: with all faults, and the edit ``mend``.
    """
    found, skipped = load_latest(folder)
    if found is None and skipped:
        raise UserError("\n  ".join([f"no checkpoint in {folder} can be used", *skipped, mend]))
    if found is not None:
        for line in [f"{line}; an older one is used" for line in skipped] + _renamed(folder, found):
            print(f"warning: {line}", file=sys.stderr)
    return found


def load_best(folder: Path) -> Saved | None:
    """The checkpoint that early stopping found best; None without checkpoints.

    Raises ``UserError`` without early stopping, if the base model was best, and if no checkpoint is complete.
    """
    last = newest(folder, ELSEWHERE)
    best = None if last is None else best_step(last.state)
    if last is None or best == last.step:
        return last
    if best is None:
        raise UserError("--checkpoint best: the recipe has no eval.early_stopping, so none was kept; give latest")
    if best == 0:
        raise UserError("--checkpoint best: no checkpoint was better than the base model; give base")
    return load(folder, best)


def best_step(state: JsonObject) -> int | None:
    """The step of the best weights by early stopping, from the ``state`` of a checkpoint; 0 is the base model, None
    means that the run has no early stopping."""
    return _step_of(state, BEST)


def kept_steps(state: JsonObject) -> set[int | None]:
    """The steps whose checkpoints are kept however old they are, from the ``state`` of a checkpoint."""
    return {_step_of(state, BEST), _step_of(state, LAST_GOOD)}


def _step_of(state: JsonObject, part: str) -> int | None:
    with blamed(Path(STATE), part):
        found = as_object(state.get(part, {})).get("step")
        return None if found is None else as_integer(found)


def _load_entry(entry: Entry) -> Saved:
    if entry.diverged is not None:
        raise UserError(
            f"checkpoint {entry.directory.name} is not used, because training diverged after it: {entry.diverged}"
        )
    fault = fault_of(entry)
    if fault:
        raise UserError(f"checkpoint {entry.directory.name} is not whole: {fault}")
    return whole(entry)


def read_state(entry: Entry) -> State:
    """What ``state.json`` of a checkpoint holds. Raises ``OSError`` and ``BadFileError``."""
    return read_as(State, entry.directory / STATE)


def whole(entry: Entry) -> Saved:
    """The checkpoint of ``entry``, whose files have their checksums. Raises ``UserError`` where what they hold is not
    what mmrl writes."""
    try:
        state = read_state(entry)
        check_shards(sorted(entry.directory.glob(TENSORS)))
    except FileNotFoundError as error:
        raise UserError(f"checkpoint {entry.directory.name} is not whole: {error.filename} is missing") from error
    except BadFileError as error:
        raise UserError(f"checkpoint {entry.directory.name} is not whole: {error}") from error
    return Saved(entry.step, state.model_dump(exclude_unset=True), entry.directory)


def _renamed(folder: Path, found: Saved) -> list[str]:
    """A line for each directory whose name has a different step than its manifest."""
    lines = []
    for entry in entries(folder):
        if entry.renamed and entry.manifest is not None:
            same = found.directory if found.step == entry.step else folder / directory_of(entry.step)
            again = f"; {same.name} is of the same step" if same != entry.directory and same.is_dir() else ""
            lines.append(f"checkpoint {entry.directory.name} is of step {entry.step}, as its {MANIFEST} says{again}")
    return lines

"""Write checkpoints while the run continues: copy the state, write it to a new folder, checksum it and rename it."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, TypedDict, TypeVar

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from mmrl.core import checkpoint_reader as reader
from mmrl.core import nan_check
from mmrl.core.checkpoint_manifest import MANIFEST, STATE, File, Manifest, directory_of, entries, sha256
from mmrl.core.checkpoint_reader import Checkpoint, kept_steps
from mmrl.core.errors import NotFiniteError

if TYPE_CHECKING:
    from torch.distributed.checkpoint.staging import AsyncStager

T = TypeVar("T")


class WrittenParts(TypedDict):
    """The parts that a controller wrote for the leader, or its error."""

    parts: list[str]
    error: str | None


Gather = Callable[[WrittenParts], list[WrittenParts]]


class Saver:
    """Final class: saves one checkpoint at a time into ``folder``, and keeps the newest ``keep``.

    ``ranks``: with sharded weights a separate process group on the CPU, in which every rank saves its shards. None: the
    leader saves everything. ``gather``: collects from all controllers which parts of their own (``Checkpoint.own``)
    they have written; None if the leader has all parts.
    """

    def __init__(
        self,
        folder: Path,
        keep: int,
        ranks: dist.ProcessGroup | None = None,
        gather: Gather | None = None,
        *,
        leads: bool = True,
    ) -> None:
        self.folder, self.keep, self.ranks, self.leads, self._gather = folder, keep, ranks, leads, gather
        self.saved = 0
        """The newest step that was saved, or that the run was resumed from."""
        self.failed: str | None = None
        """The error of the last save; None if it succeeded."""
        self._copies: dict[str, Tensor] = {}
        self._stager = None if ranks is None else stager()
        self._thread: Thread | None = None
        self._error: BaseException | None = None
        self._step = 0

    @property
    def together(self) -> bool:
        """Whether ``begin`` is collective: all controllers must call it together."""
        return self.ranks is not None or self._gather is not None

    def begin(self, taken: Checkpoint, *, proved: bool = True) -> None:
        """Copy ``taken``, and write it in a thread. Waits first for the previous save.

        ``proved``: whether something finite was computed with its weights. If not, the previous checkpoint is also
        kept, even with ``keep`` 1. Raises ``NotFiniteError``, and writes nothing, if a tensor of ``taken`` is not
        finite.
        """
        self.finish()
        if held := nan_check.first({k: t for k, t in taken.flat.items() if k.partition("/")[0] not in taken.own}):
            raise NotFiniteError(f"the checkpoint of step {taken.step} is not finite, and is not written: {held}")
        keep = self.keep if proved else max(self.keep, 2)
        self._step = taken.step
        others: list[str] = []
        try:
            if self._gather is not None:
                others = write_own_parts(self.folder, taken, leads=self.leads, gather=self._gather)
            if self.ranks is None and not self.leads:
                self.saved = taken.step
                return
            if self.ranks is None:
                work = self._copied(taken, keep, others)
            else:
                work = begin_shards(self.folder, taken, keep, self.ranks, self._stager)
        except OSError as error:
            self._error = error
            self.finish()
            return
        # not waited for where the process must end at once: what is half written is written aside
        self._thread = Thread(target=self._run, args=(work,), name="checkpoint", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until the save is done. A full disk is reported, and the last good checkpoint is kept."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            self.saved = self._step if self._error is None else self.saved
            self.failed = None if self._error is None else self.failed
        error, self._error = self._error, None
        if isinstance(error, OSError):
            kept = reader.steps(self.folder)
            self.failed = (
                f"the checkpoint of step {self._step} could not be saved ({error.strerror or error}); "
                f"{f'the last whole one is step {kept[-1]}' if kept else 'there is none yet'}. "
                "Free space there; --resume repeats the steps since."
            )
            print(f"warning: {self.failed}", file=sys.stderr)
        elif error is not None:
            raise error

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written; any thread may ask."""
        thread = self._thread
        return thread is not None and thread.is_alive()

    def wait(self) -> None:
        """Wait until nothing is being written; any thread may call it."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self, work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as error:  # reported or raised when the run waits for it next
            self._error = error

    def _copied(self, taken: Checkpoint, keep: int, others: Sequence[str]) -> Callable[[], object]:
        """Copy into the last copy's memory: allocating hundreds of megabytes takes longer than copying them."""
        before, self._copies = self._copies, {}
        tensors: dict[str, dict[str, Tensor]] = {}
        for part, of in taken.tensors.items():
            tensors[part] = {}
            for name, t in of.items():
                room = before.get(f"{part}/{name}")
                if room is None or (room.shape, room.dtype) != (t.shape, t.dtype):
                    room = torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda)
                room.copy_(t, non_blocking=t.is_cuda)
                self._copies[f"{part}/{name}"] = tensors[part][name] = room
        if any(t.is_cuda for t in taken.flat.values()):
            torch.cuda.current_stream().synchronize()
        copied = Checkpoint(taken.step, tensors, taken.state)
        return lambda: save(self.folder, copied, keep, others)


def write_own_parts(folder: Path, taken: Checkpoint, gather: Gather, *, leads: bool) -> list[str]:
    """Write this controller's own parts for the leader. Collective over all controllers. Returns the parts that the
    other controllers wrote.

    Raises ``OSError`` on every controller if one cannot write.
    """
    mine: list[str] = [] if leads else sorted(taken.own)
    error = None
    try:
        for part in mine:
            room = _own_parts_folder(folder, taken.step)
            room.mkdir(parents=True, exist_ok=True)
            _save_part(room, part, taken.tensors[part])
    except OSError as failed:
        error = _why(failed)
    found = gather({"parts": mine, "error": error})
    errors = [one["error"] for one in found if one["error"] is not None]
    if errors:
        raise OSError(errors[0])
    return [part for one in found for part in one["parts"]]


def _own_parts_folder(folder: Path, step: int) -> Path:
    return folder / f".parts-step_{step:06d}"


def _save_part(folder: Path, part: str, tensors: Mapping[str, Tensor]) -> None:
    try:
        save_file({f"{part}/{k}": v.contiguous() for k, v in tensors.items()}, folder / f"{part}.safetensors")
    except SafetensorError as error:  # how safetensors reports a full disk
        raise OSError(str(error)) from error


def save(folder: Path, whole: Checkpoint, keep: int, others: Sequence[str] = ()) -> Path:
    """Write ``whole`` into ``folder`` atomically, with the parts ``others`` of other controllers. Deletes all
    checkpoints except the newest ``keep`` and the best.

    Raises ``OSError`` if the disk is full or not writable; older checkpoints are untouched then.
    """
    aside = _aside(folder, whole.step)
    try:
        for part, tensors in whole.tensors.items():
            _save_part(aside, part, tensors)
        handed_in = _own_parts_folder(folder, whole.step)
        for part in others:
            os.replace(handed_in / f"{part}.safetensors", aside / f"{part}.safetensors")
        shutil.rmtree(handed_in, ignore_errors=True)
        files = {path.name: _described(path) for path in sorted(aside.iterdir())}
        return _in_place(folder, aside, whole, files, keep)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def stager() -> AsyncStager:
    """A stager that copies shards into the memory of its last copy."""
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    cuda = torch.cuda.is_available()
    return DefaultStager(StagingOptions(cuda, False, False, cuda))


def begin_shards(
    folder: Path, taken: Checkpoint, keep: int, ranks: dist.ProcessGroup, stager: AsyncStager | None
) -> Callable[[], object]:
    """Copy this rank's shards of ``taken`` and start to write them. Collective over all ranks. Returns the function
    that finishes the save. ``stager``: None copies into new memory.

    Raises ``OSError`` on every rank if the leader cannot write; the returned function does if any rank cannot.
    """
    from torch.distributed import checkpoint as dcp

    rank = dist.get_rank(ranks)
    aside = folder / f".tmp-step_{taken.step:06d}"
    _run_on_all_ranks(ranks, lambda: _aside(folder, taken.step) if rank == 0 else None)
    writer = dcp.HuggingFaceStorageWriter(str(aside), save_distributed=True)
    writing = dcp.async_save(taken.flat, storage_writer=writer, process_group=ranks, async_stager=stager)
    assert isinstance(writing, Future)

    def finish() -> None:
        try:
            _run_on_all_ranks(ranks, writing.result)
            mine = sorted(aside.glob(f"shard-{rank + 1:05d}-*"))
            found = _on_every_rank(ranks, lambda: {path.name: _described(path) for path in mine})
            files = {name: described for of in found for name, described in of.items()}
            _run_on_all_ranks(ranks, lambda: _in_place(folder, aside, taken, files, keep) if rank == 0 else None)
        except BaseException:
            if rank == 0:
                shutil.rmtree(aside, ignore_errors=True)
            raise

    return finish


def _run_on_all_ranks(ranks: dist.ProcessGroup, work: Callable[[], object]) -> None:
    """Run ``work`` on every rank. Raises ``OSError`` on all of them if it fails on one."""

    def done() -> None:
        work()

    _on_every_rank(ranks, done)


def _on_every_rank(ranks: dist.ProcessGroup, work: Callable[[], T]) -> list[T]:
    """The results of ``work`` on every rank, without None. Raises ``OSError`` on all of them if it fails on one."""
    from torch.distributed.checkpoint import CheckpointException

    mine: T | None = None
    error: str | None = None
    try:
        mine = work()
    except CheckpointException as failed:  # not an ``Exception``; it holds the errors of all ranks
        error = _why(next(iter(failed.failures.values()))[0])
    except Exception as failed:
        error = _why(failed)
    found: list[tuple[T | None, str | None]] = [(None, None)] * dist.get_world_size(ranks)
    dist.all_gather_object(found, (mine, error), group=ranks)
    errors = [why for _, why in found if why is not None]
    if errors:
        raise OSError(errors[0])
    return [done for done, _ in found if done is not None]


def _why(failed: BaseException) -> str:
    return str(getattr(failed, "strerror", None) or failed)


def _aside(folder: Path, step: int) -> Path:
    """A new empty directory to write into; removes those of killed processes."""
    for left in folder.glob(".tmp-step_*"):
        shutil.rmtree(left, ignore_errors=True)
    aside = folder / f".tmp-step_{step:06d}"
    aside.mkdir(parents=True)
    return aside


def _in_place(folder: Path, aside: Path, taken: Checkpoint, files: Mapping[str, File], keep: int) -> Path:
    """Add state and manifest to the directory ``aside``, and rename it to its final name."""
    target = folder / directory_of(taken.step)
    (aside / STATE).write_text(json.dumps(taken.state))
    files = {**files, STATE: _described(aside / STATE)}
    (aside / MANIFEST).write_text(Manifest(step=taken.step, files=files).model_dump_json(indent=1))
    for path in aside.iterdir():
        _sync(path)
    shutil.rmtree(target, ignore_errors=True)
    os.replace(aside, target)
    _sync(folder)
    _rotate(folder, taken, keep)
    return target


def _rotate(folder: Path, taken: Checkpoint, keep: int) -> None:
    """Delete the checkpoints older than the newest ``keep`` usable ones, except the best and the last good one.

    Checkpoints of later steps belong to an earlier attempt at these steps: they do not count, and are replaced later.
    """
    always = kept_steps(taken.state)
    before = [entry for entry in entries(folder) if entry.step <= taken.step]
    kept = sorted({entry.step for entry in before if entry.usable})[-keep:]
    for entry in before if len(kept) == keep else ():
        if entry.step < kept[0] and entry.step not in always:
            shutil.rmtree(entry.directory, ignore_errors=True)


def _described(path: Path) -> File:
    return File(bytes=path.stat().st_size, sha256=sha256(path))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)

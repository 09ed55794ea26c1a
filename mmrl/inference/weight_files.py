"""Weights on their way to an engine in other processes: safetensors files in the host's memory, or on a disk.

A tensor is written as it comes, from its own memory, in the dtype that the engine's checkpoint has: the host holds one
copy, and the engine maps it. Nothing but one tensor at a time is held besides.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import weakref
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.sizes import size
from mmrl.core.tensor_files import header

BUCKET_BYTES = 512 * 2**20
"""The most bytes of weights in a file; a larger tensor has its own."""
MEMORY = Path("/dev/shm")
"""The file system of Linux that is memory."""
_ROOM = 2**18 - 8
"""Bytes of a file's header. The tensors are not known when a file is begun, so its header has room; the format allows
blanks at its end."""
_PREFIX = "mmrl-weights-"
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}


@dataclass(frozen=True)
class Sending:
    """How weights are sent: ``bucket_bytes`` in a file at most, ``transport`` as ``rollout.weight_transport``."""

    bucket_bytes: int = BUCKET_BYTES
    transport: str = "auto"
    optional: bool = False
    """Files are taken where the processes of ``transport`` do not find together."""


def transport_for(
    setting: str, *, engine: str, cuda: bool, first: bool, devices: int, several: bool, own: bool, adapter: bool
) -> str:
    """``setting``, or what ``auto`` means where that is more than files: to vLLM's server, for whole weights, ``nccl``
    where it has GPUs of its own on this host, and ``ipc`` where it has exactly the GPU that trains.

    ``cuda``: the trainer's device is one of NVIDIA's; ``first``: the one that a server starts on. ``devices``: of one
    engine, all of its parallel sizes; ``several``: it holds the model several times. ``own``: the engine has GPUs of
    its own. ``adapter``: only an adapter is sent, always as files.
    """
    if setting != "auto" or engine != "vllm_server" or not cuda or several or adapter:
        return setting
    if own:
        return "nccl"
    return "ipc" if first and devices == 1 else setting


def checkpoint_dtypes(model: Path, dtype: str) -> dict[str, torch.dtype]:
    """The dtypes of the weights in the folder ``model`` that an engine with ``dtype`` keeps as they are stored, by
    name.

    ``dtype``: ``auto`` or torch's name of one. Sending these in the stored dtype changes no bit of the engine's
    weights: it would round them itself.
    """
    found: dict[str, torch.dtype] = {}
    for file in sorted(model.glob("*.safetensors")):
        for name, tensor in header(file).items():
            stored = _DTYPES.get(tensor.dtype)
            if stored is not None and stored.is_floating_point and dtype in ("auto", str(stored)[len("torch.") :]):
                found[name] = stored
    return found


def place_for(transport: str, need: int) -> Path:
    """A new private folder for ``need`` bytes of weights, which are reserved as long as it is there: ``shm`` in memory,
    ``files`` on the disk that ``TMPDIR`` names, ``auto`` in memory where it has room. Raises ``UserError`` where
    ``shm`` has none."""
    if transport == "files" or not os.access(MEMORY, os.W_OK):
        free, promised, made = 0, 0, None
    else:
        with _alone():
            _sweep()
            free, promised = shutil.disk_usage(MEMORY).free, _promised()
            fits = free - promised >= need
            made = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-{need}-", dir=MEMORY)) if fits else None
    if made is None and transport == "shm":
        others = f", {size(promised)} of it reserved for weights to other engines on this host" if promised else ""
        raise UserError(
            f"rollout.weight_transport is shm: the weights take {size(need)} of {MEMORY}, which has {size(free)} free"
            f"{others}. Enlarge it (docker run --shm-size), or set rollout.weight_transport=files"
        )
    return made or Path(tempfile.mkdtemp(prefix=_PREFIX))


class Room:
    """Final class. Where the weights of one server lie on their way: ``need`` bytes, from the first ``folder`` on."""

    def __init__(self, need: int) -> None:
        self._need = need
        self._place: Path | None = None

    def folder(self, transport: str) -> Path:
        """A folder that the caller makes and removes, in the place of ``place_for``."""
        if self._place is None:
            self._place = place_for(transport, self._need)
            self._end = weakref.finalize(self, shutil.rmtree, self._place, True)
        return self._place / "weights"

    @contextmanager
    def written(
        self,
        weights: Iterable[tuple[str, Tensor]],
        sending: Sending,
        dtypes: Mapping[str, torch.dtype] | None = None,
        inside: str = "",
    ) -> Generator[Path]:
        """The folder with the ``weights``, or with a folder ``inside`` it that has them (``write_weights``); it is
        removed afterwards. Raises ``UserError``."""
        folder = self.folder(sending.transport)
        try:
            if inside:
                folder.mkdir(mode=0o700)
            write_weights(folder / inside, weights, sending.bucket_bytes, dtypes)
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._place is not None:
            self._end()


@contextmanager
def _alone() -> Generator[None]:
    """No other process of this host looks for room meanwhile."""
    folder = os.open(MEMORY, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)


def _folders() -> Iterator[tuple[Path, list[str]]]:
    """This user's folders in memory, each with the parts of its name: the process, the bytes that it reserves."""
    for folder in MEMORY.glob(f"{_PREFIX}*-*"):
        with suppress(OSError):
            if folder.stat().st_uid == os.getuid():
                yield folder, folder.name.removeprefix(_PREFIX).split("-")


def _promised() -> int:
    """Bytes that are reserved and not written yet."""
    total = 0
    for folder, parts in _folders():
        written = 0
        for file in folder.rglob("*.safetensors"):
            with suppress(OSError):  # it may be removed meanwhile
                written += file.stat().st_blocks * 512
        total += max(0, int(parts[1]) - written) if len(parts) > 2 and parts[1].isdigit() else 0
    return total


def _sweep() -> None:
    """Remove what a process that was killed has left in memory."""
    for folder, (pid, *_) in _folders():
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(folder, ignore_errors=True)


def write_weights(
    folder: Path,
    weights: Iterable[tuple[str, Tensor]],
    most: int = BUCKET_BYTES,
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> None:
    """Write named weights to the new ``folder`` as safetensors, at most ``most`` bytes a file. ``dtypes``: by name, for
    those that are sent in another than their own.

    Raises ``UserError`` on a full disk.
    """
    folder.mkdir(mode=0o700)
    file: _File | None = None
    try:
        for name, tensor in weights:
            sent = tensor.detach().to("cpu", dtypes.get(name, tensor.dtype) if dtypes else tensor.dtype).contiguous()
            del tensor  # it may be freed before the next one is gathered
            if file is None or not file.add(name, sent, most):
                if file is not None:
                    file.close()
                file = _File(folder, len(list(folder.iterdir())))
                file.add(name, sent, most)
        if file is not None:
            file.close()
    except OSError as error:
        raise UserError(
            f"weights for the rollout engine could not be written to {folder}: {error}. Free some of that disk, or set "
            "TMPDIR to another"
        ) from error


class _File:
    """Final class. A safetensors file that is written tensor by tensor: its header at the end."""

    def __init__(self, folder: Path, number: int) -> None:
        self._file: BinaryIO = (folder / f"model-{number:05}.safetensors").open("xb", buffering=0)
        self._file.seek(8 + _ROOM)
        self._header: dict[str, dict[str, str | list[int]]] = {}
        self._at, self._left = 0, _ROOM - 2

    def add(self, name: str, tensor: Tensor, most: int) -> bool:
        """Write ``tensor``, where it goes into this file: by its size, by the header, and at a place its dtype can be
        read from. The first one does. Returns whether it does. Raises ``OSError``."""
        end = self._at + tensor.nbytes
        entry = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [self._at, end]}
        line = f"{json.dumps(name)}: {json.dumps(entry)}, ".encode()
        if self._header and (end > most or self._at % tensor.element_size() or len(line) >= self._left):
            return False
        self._header[name] = entry
        self._left -= len(line)
        rest = memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]  # an array is a buffer
        while rest:
            rest = rest[self._file.write(rest) :]
        self._at = end
        return True

    def close(self) -> None:
        """Raises ``OSError``."""
        header = json.dumps(self._header).encode().ljust(_ROOM)
        self._file.seek(0)
        self._file.write(_ROOM.to_bytes(8, "little") + header)
        self._file.close()

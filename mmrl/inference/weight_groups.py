"""Weights on their way to an engine's processes without a file: through a process group, or by handles of GPU memory.

The trainer is rank 0 of a group, and each process of the engine another rank. It sends buckets of tensors in the dtype
that the engine's checkpoint has: a header with names, dtypes and shapes, then the bytes. ``gloo`` and ``nccl``
broadcast the bytes; for ``ipc`` the receivers open the sender's memory on the GPU and copy it (one bucket besides the
model). The group meets in a file of a private folder, and gloo listens on the loopback.

``ipc`` has run between two processes on an H100 and an H200, without vLLM; ``prove`` finds out whether it works.
``nccl`` has not run: all but the group's backend is shared with gloo, which has. It waits for each broadcast and raises
after the group's patience; a watchdog of NCCL's, which would end the process in place of that, is not started.
"""

from __future__ import annotations

import base64
import inspect
import json
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing import reductions

from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject, as_integer, as_list, as_object, as_text

Backend = Literal["gloo", "nccl", "ipc"]
_ALIGNED = 16
"""Bytes of which the place of a tensor in its bucket is a multiple, so that it is one of its dtype."""
_END = -1
"""In place of a header's length: no bucket follows."""
_GIVEN_UP = -2
"""The same: the sender failed."""
_OF_BYTES: dict[str, Any] = {"tensor_cls": Tensor, "storage_cls": torch.storage.TypedStorage, "dtype": torch.uint8}
"""What names every bucket."""


class Sharing:
    """How a bucket's memory on a GPU is named for another process, and opened there: by CUDA's IPC handles as
    torch.multiprocessing makes them. They travel as JSON, not pickled."""

    def handle(self, bucket: Tensor) -> JsonObject:
        torch.cuda.synchronize(bucket.device)
        _, given = reductions.reduce_tensor(bucket)
        names = inspect.signature(reductions.rebuild_cuda_tensor).parameters
        said: dict[str, Any] = {n: value for n, value in zip(names, given, strict=True) if n not in _OF_BYTES}
        return {
            name: {"bytes": base64.b64encode(value).decode()} if isinstance(value, bytes) else value
            for name, value in said.items()
        }

    def opened(self, handle: JsonObject) -> Tensor:
        given: dict[str, Any] = {
            name: base64.b64decode(as_text(value["bytes"])) if isinstance(value, Mapping) else value
            for name, value in handle.items()
        }
        given["tensor_size"] = torch.Size(given["tensor_size"])
        given["storage_device"] = torch.cuda.current_device()  # one process's first GPU may be the other's second
        return reductions.rebuild_cuda_tensor(**_OF_BYTES, **given)


class WeightGroup:
    """Final class. Rank ``rank`` of ``size``, which meet in the file ``meeting``: 0 sends, the others receive.

    ``device``: where buckets lie. ``sharing``: for ``ipc``. Raises ``RuntimeError`` where the
    others do not come within ``patience`` seconds.
    """

    def __init__(
        self,
        meeting: Path,
        rank: int,
        size: int,
        backend: Backend,
        device: torch.device,
        *,
        patience: float = 1800.0,
        sharing: Sharing | None = None,
    ) -> None:
        store = dist.FileStore(str(meeting), size)
        self._device, self._rank, self._size = device, rank, size
        self._sharing = (sharing or Sharing()) if backend == "ipc" else None
        self._group: Any = _group(store, rank, size, "nccl" if backend == "nccl" else "gloo", patience)
        self._words = device if backend == "nccl" else torch.device("cpu")

    def send(
        self,
        weights: Iterable[tuple[str, Tensor]],
        most: int,
        dtypes: Mapping[str, torch.dtype] | None = None,
        going: Callable[[], None] = lambda: None,
    ) -> None:
        """Send named weights, at most ``most`` bytes in a bucket; a larger tensor has its own. ``dtypes``: by name, for
        those that are sent in another than their own. ``going`` is called before each bucket, and may raise.

        Raises ``RuntimeError`` where a receiver is lost. The others are told of every error.
        """
        try:
            for header, bucket in buckets(weights, most, self._device, dtypes or {}):
                going()
                self._say(header)
                self._send_bytes(bucket)
        except BaseException:
            with suppress(RuntimeError):  # the group may be what failed
                self._number(_GIVEN_UP)
            raise
        self._number(_END)

    def received(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that the sender sends, as they come; a tensor stays as it is until it is dropped.

        Raises ``UserError`` where the sender gave up, and ``RuntimeError`` where it is lost.
        """
        while (length := self._number(0)) >= 0:
            entries = [as_list(one) for one in as_list(json.loads(self._heard(length)))]
            sizes = [prod(_shape(one[2])) * _dtype(one[1]).itemsize for one in entries]
            bucket = self._receive_bytes(sum(map(_padded, sizes)))
            at = 0
            for (name, dtype, shape), n in zip(entries, sizes, strict=True):
                yield as_text(name), bucket[at : at + n].view(_dtype(dtype)).reshape(_shape(shape))
                at += _padded(n)
        if length == _GIVEN_UP:
            raise UserError("the trainer could not send its weights; its own message says why")

    def prove(self) -> None:
        """Send a few known bytes as a bucket: all ranks call it. Raises ``UserError`` in all where they do not arrive
        equal everywhere, ``RuntimeError`` where a rank is lost."""
        known = torch.arange(4 * _ALIGNED, dtype=torch.uint8, device=self._device)
        why = ""
        handle: JsonObject = {}
        if self._rank == 0:
            try:
                handle = self._sharing.handle(known) if self._sharing else {}
            except RuntimeError as error:
                why = str(error)
            self._say({"handle": handle, "why": why})
        else:
            said = as_object(json.loads(self._heard(self._number(0))))
            handle, why = as_object(said["handle"]), as_text(said["why"])
        if self._sharing is None:
            self._broadcast(known)
        elif self._rank and not why:
            try:
                same = torch.equal(self._sharing.opened(handle), known)
                why = "" if same else "other bytes arrived"
            except (RuntimeError, OSError) as error:
                why = str(error)
        wrong = torch.tensor([int(bool(why))], dtype=torch.int64, device=self._words)
        self._group.allreduce([wrong]).wait()
        if int(wrong.item()):
            raise UserError(f"memory of the trainer could not be opened: {why or 'another process says why'}")

    def close(self) -> None:
        self._group = None

    def _number(self, value: int) -> int:
        word = torch.tensor([value], dtype=torch.int64, device=self._words)
        self._broadcast(word)
        return int(word.item())

    def _say(self, what: object) -> None:
        text = json.dumps(what).encode()
        self._number(len(text))
        self._broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8).to(self._words))

    def _heard(self, length: int) -> bytes:
        text = torch.empty(length, dtype=torch.uint8, device=self._words)
        self._broadcast(text)
        return bytes(text.cpu().numpy())

    def _send_bytes(self, bucket: Tensor) -> None:
        if self._sharing is None:
            self._broadcast(bucket)
            return
        self._say(self._sharing.handle(bucket))
        self._group.barrier().wait()  # until all have their copies

    def _receive_bytes(self, size: int) -> Tensor:
        if self._sharing is None:
            bucket = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._broadcast(bucket)
            return bucket
        handle = as_object(json.loads(self._heard(self._number(0))))
        bucket = self._sharing.opened(handle).clone()
        if bucket.is_cuda:
            torch.cuda.synchronize(bucket.device)
        self._group.barrier().wait()
        return bucket

    def _broadcast(self, tensor: Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        self._group.broadcast([tensor], options).wait()


def _group(store: dist.Store, rank: int, size: int, backend: str, patience: float) -> Any:
    """A group of its own, beside those that the process may have."""
    if backend == "nccl":
        nccl: Any = dist.ProcessGroupNCCL
        given = nccl.Options()
        given._timeout = timedelta(seconds=patience)
        with _variable("TORCH_NCCL_BLOCKING_WAIT", "1"):  # read once, by the constructor
            return nccl(store, rank, size, given)
    gloo: Any = dist.ProcessGroupGloo  # whose options the type checker does not know
    options = gloo._Options()
    options._devices = [gloo.create_device(hostname="127.0.0.1")]
    options._timeout = timedelta(seconds=patience)
    return gloo(store, rank, size, options)


@contextmanager
def _variable(name: str, value: str) -> Generator[None]:
    """The environment variable is ``value`` inside."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def buckets(
    weights: Iterable[tuple[str, Tensor]], most: int, device: torch.device, dtypes: Mapping[str, torch.dtype]
) -> Iterator[tuple[list[tuple[str, str, list[int]]], Tensor]]:
    """Weights in buckets of bytes on ``device``, each with its header: name, dtype and shape of every tensor."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        one = tensor.detach().to(device, dtypes.get(name, tensor.dtype)).contiguous()
        if held and size + one.nbytes > most:
            yield _packed(held, device)
            held, size = [], 0
        held.append((name, one))
        size += _padded(one.nbytes)
        del tensor, one
    if held:
        yield _packed(held, device)


def _packed(
    held: Sequence[tuple[str, Tensor]], device: torch.device
) -> tuple[list[tuple[str, str, list[int]]], Tensor]:
    header = [(name, str(one.dtype).removeprefix("torch."), list(one.shape)) for name, one in held]
    if len(held) == 1 and held[0][1].nbytes % _ALIGNED == 0:  # its own memory is the bucket
        return header, held[0][1].reshape(-1).view(torch.uint8)
    bucket = torch.zeros(sum(_padded(one.nbytes) for _, one in held), dtype=torch.uint8, device=device)
    at = 0
    for _, one in held:
        bucket[at : at + one.nbytes].copy_(one.reshape(-1).view(torch.uint8))
        at += _padded(one.nbytes)
    return header, bucket


def _padded(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, as_text(name), None)
    if not isinstance(found, torch.dtype):
        raise UserError(f"the trainer sent a weight of the dtype {name!r}, which this torch does not know")
    return found


def _shape(value: Any) -> list[int]:
    return [as_integer(n) for n in as_list(value)]

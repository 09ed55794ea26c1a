"""The protocol between a controller and its workers on the same host: Python objects with tensors.

Both ends are this program, of one run and one user, on a socket in the file system that only this user can open, so
pickle is safe. The bytes of tensors are not pickled: many of them lie in memory that both ends map (Linux), few of them
follow on the socket. A tensor from a GPU arrives on the reader's GPU.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Sequence
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor

SHARED_FROM = 2**18
"""Bytes of a message's tensors from which they travel in shared memory: below, opening it takes longer than copying."""
_ALIGNED = 64
"""Bytes of which the place of a tensor in shared memory is a multiple."""


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in (Tensor, torch.nn.Parameter):
            return NotImplemented
        flat = obj.detach().cpu().contiguous().flatten().view(torch.uint8)
        content = pickle.PickleBuffer(flat.numpy()) if flat.numel() else b""
        return _tensor, (content, str(obj.dtype).removeprefix("torch."), tuple(obj.shape), obj.device.type)


def _tensor(content: Any, dtype: str, shape: tuple[int, ...], device: str) -> Tensor:
    kind = getattr(torch, dtype)
    if isinstance(content, bytes):
        content = bytearray(content)  # a tensor may be written to
    flat = torch.frombuffer(content, dtype=kind) if len(content) else torch.empty(0, dtype=kind)
    return flat.view(shape).to(device)


def send(connection: Connection, message: Any) -> int:
    """Send ``message``; returns its size in bytes."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, protocol=5, buffer_callback=buffers.append).dump(message)
    raws = [buffer.raw() for buffer in buffers]
    size = sum(raw.nbytes for raw in raws)
    shared = size >= SHARED_FROM and hasattr(os, "memfd_create")
    connection.send((shared, [raw.nbytes for raw in raws]))
    connection.send_bytes(head.getbuffer())
    if shared:
        _share(connection, raws)
    else:
        for raw in raws:
            connection.send_bytes(raw)
    return head.tell() + size


def receive(connection: Connection) -> Any:
    """The next message. Its tensors are the reader's own. Raises ``EOFError`` if the other end is gone."""
    shared, sizes = connection.recv()
    head = connection.recv_bytes()
    contents = _shared(connection, sizes) if shared else [connection.recv_bytes() for _ in sizes]
    return pickle.loads(head, buffers=contents)


def _share(connection: Connection, raws: Sequence[memoryview]) -> None:
    """Copy ``raws`` into new memory, and give the reader its descriptor. It is freed when nobody maps it."""
    file = os.memfd_create("mmrl", os.MFD_CLOEXEC)
    try:
        at = 0
        for raw in raws:
            rest = raw
            while rest:
                written = os.pwrite(file, rest, at)
                rest, at = rest[written:], at + written
            at = _next(at)
        reduction.send_handle(connection, file, 0)
    finally:
        os.close(file)


def _shared(connection: Connection, sizes: Sequence[int]) -> list[memoryview]:
    """What ``_share`` sent. The memory is mapped privately: the pages that a tensor's owner writes are copied then."""
    file = reduction.recv_handle(connection)
    try:
        whole = memoryview(mmap.mmap(file, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE))
    finally:
        os.close(file)
    found, at = [], 0
    for size in sizes:
        found.append(whole[at : at + size])
        at = _next(at + size)
    return found


def _next(at: int) -> int:
    return -(-at // _ALIGNED) * _ALIGNED

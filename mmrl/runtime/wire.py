"""The protocol between a controller and its workers on the same host: Python objects with tensors.

Both ends are this program, of one run and one user, on a socket in the file system that only this user can open, so
pickle is safe. Tensors are sent as raw bytes; a tensor from a GPU arrives on the reader's GPU.
"""

from __future__ import annotations

import io
import pickle
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor


class _Pickler(pickle.Pickler):
    def reducer_override(self, obj: Any) -> Any:
        if type(obj) not in (Tensor, torch.nn.Parameter):
            return NotImplemented
        flat = obj.detach().cpu().contiguous().flatten().view(torch.uint8)
        content = pickle.PickleBuffer(flat.numpy()) if flat.numel() else b""
        return _tensor, (content, str(obj.dtype).removeprefix("torch."), tuple(obj.shape), obj.device.type)


def _tensor(content: Any, dtype: str, shape: tuple[int, ...], device: str) -> Tensor:
    kind = getattr(torch, dtype)
    flat = torch.frombuffer(bytearray(content), dtype=kind) if len(content) else torch.empty(0, dtype=kind)
    return flat.view(shape).to(device)


def send(connection: Connection, message: Any) -> int:
    """Send ``message``; returns its size in bytes."""
    buffers: list[pickle.PickleBuffer] = []
    head = io.BytesIO()
    _Pickler(head, protocol=5, buffer_callback=buffers.append).dump(message)
    raws = [buffer.raw() for buffer in buffers]
    connection.send((len(head.getbuffer()), [raw.nbytes for raw in raws]))
    connection.send_bytes(head.getbuffer())
    for raw in raws:
        connection.send_bytes(raw)
    return head.tell() + sum(raw.nbytes for raw in raws)


def receive(connection: Connection) -> Any:
    """The next message. Raises ``EOFError`` if the other end is gone."""
    _, sizes = connection.recv()
    head = connection.recv_bytes()
    return pickle.loads(head, buffers=[connection.recv_bytes() for _ in sizes])

"""A CUDA stream of a reward's own, so that its kernels do not queue behind those that sample. Imports no torch."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mmrl.core.trajectory import Sample

if TYPE_CHECKING:
    import torch


class OwnStream:
    """That of one reward. Thread-safe. On other devices than CUDA, and with ``wanted`` false, nothing happens."""

    def __init__(self, *, wanted: bool) -> None:
        self._wanted = wanted
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def mark(self, device: torch.device | str) -> torch.cuda.Event | None:
        """What this thread has given ``device`` to do so far; None where it computes as it does anyway."""
        torch = sys.modules.get("torch")
        if torch is None or not self._wanted or torch.device(device).type != "cuda":
            return None
        return torch.cuda.current_stream(device).record_event()

    @contextmanager
    def behind(
        self, mark: torch.cuda.Event | None, device: torch.device | str, samples: Sequence[Sample]
    ) -> Generator[None]:
        """Inside the block this thread computes on the stream, behind ``mark``; the host does not wait for that. The
        memory of ``samples`` is not used anew before the stream has read it."""
        if mark is None:
            yield
            return
        import torch

        on = torch.device(device)
        stream = self._streams.setdefault(on, torch.cuda.Stream(on))
        stream.wait_event(mark)
        for sample in samples:
            if sample.tensor is not None and sample.tensor.is_cuda:
                sample.tensor.record_stream(stream)
        with self.here(on):
            yield

    @contextmanager
    def here(self, device: torch.device | str) -> Generator[None]:
        """Inside the block this thread computes on the stream, if ``behind`` was called before. At its end the thread
        waits for the stream: whoever gets the result need not."""
        torch = sys.modules.get("torch")
        stream = None if torch is None else self._streams.get(torch.device(device))
        if torch is None or stream is None:
            yield
            return
        with torch.cuda.stream(stream):
            yield
            stream.synchronize()

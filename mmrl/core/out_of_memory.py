"""Name the phase in which a device runs out of memory (``mmrl.planner.oom_message`` adds what the plan expected).

Sampling and decoding go on with fewer rows at once: each sample has randomness of its own, so that it is the same but
for rounding. Training never does so by itself.
"""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TypeVar

import torch

from mmrl.core.errors import UserError, plain
from mmrl.core.notices import tell

T = TypeVar("T")
_SAID = re.compile(
    r"DefaultCPUAllocator: (can't allocate|not enough) memory|(CUDA|HIP) error: out of memory|_STATUS_ALLOC_FAILED"
)
"""What torch says where it raises a plain ``RuntimeError``."""


class OutOfMemoryError(UserError):
    """A device has no memory left for what ``phase`` needs; ``what`` is what torch said."""

    def __init__(self, phase: str, what: str) -> None:
        super().__init__(f"out of memory in the phase {phase}: {what}")
        self.phase, self.what = phase, what


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation has failed, on an accelerator or in the host's memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and _SAID.search(str(error)) is not None


@contextmanager
def in_phase(name: str) -> Generator[None]:
    """Raises ``OutOfMemoryError`` of the phase ``name`` where memory runs out inside, and no phase inside has."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        said = str(error).strip() or type(error).__name__
        raise OutOfMemoryError(name, plain(said.splitlines()[0].split(" If reserved")[0], 400)) from error


def in_parts(most: dict[str, int], phase: str, n: int, work: Callable[[range], T], mend: str) -> list[T]:
    """Call ``work`` for rows ``range(n)``, all at once or at most ``most[phase]`` at a time; returns the results.

    If memory runs out, half as many rows are tried, then and in later calls. A notice with ``mend`` says so. Raises
    ``OutOfMemoryError`` if memory does not suffice for one row.
    """
    made: list[T] = []
    first = 0
    while first < n:
        rows = range(first, min(n, first + most.get(phase, n)))
        try:
            with in_phase(phase):
                made.append(work(rows))
            first = rows.stop
            continue
        except OutOfMemoryError:
            if len(rows) == 1:
                raise
        most[phase] = (len(rows) + 1) // 2  # outside of except: the error holds what was computed
        free()
        tell(
            f"out of memory in the phase {phase} with {len(rows)} samples at once: it goes on with {most[phase]}, and "
            f"samples are the same but for rounding; {mend.format(most[phase])}"
        )
    return made


def free() -> None:
    """Give back what nobody holds any more."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()

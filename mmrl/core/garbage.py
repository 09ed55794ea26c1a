"""Pause Python's cyclic garbage collector while a command loads libraries, a model and a plan.

Loading makes about a million objects that stay. Each full collection visits all of them and frees next to nothing:
together these took 1.4 of 10 CPU-seconds of ``mmrl plan sd35-medium``.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager

_OBJECTS = 100_000
"""Made and not yet freed, after which the youngest are visited; 700 is Python's default."""


@contextmanager
def rarely_collected() -> Generator[None]:
    """Collect less often inside; not for training, where cycles may hold tensors."""
    usual = gc.get_threshold()
    gc.set_threshold(_OBJECTS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)

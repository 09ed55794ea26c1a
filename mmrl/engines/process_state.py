"""Keep the state of this process while an engine inside it loads or shuts down."""

from __future__ import annotations

import random
from collections.abc import Generator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def process_settings_kept() -> Generator[None]:
    """Restore Python's and numpy's random states and torch's number of threads, which loading vLLM changes."""
    python, numpy = random.getstate(), np.random.get_state()
    threads, setter = torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = setter
        torch.set_num_threads(threads)


@contextmanager
def default_group_kept() -> Generator[None]:
    """Keep torch's default process group. vLLM's shutdown destroys it, whichever part of the process made it."""
    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy

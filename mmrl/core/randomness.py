"""Random seeds from ``(run seed, step, slot, attempt, sample, purpose)``, never from process state.

Every controller draws the same prompt and the same noise for a slot, so a run does not depend on the number of
controllers, on the micro-batch, on earlier samples, or on whether it was resumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.core.trajectory import SampleId


def seed_of(run_seed: int, *parts: int | str) -> int:
    """A 63-bit seed that depends only on the arguments, on every machine and in every process."""
    text = "/".join(str(p) for p in (run_seed, *parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def generator(run_seed: int, *parts: int | str) -> torch.Generator:
    """A CPU generator for ``seed_of(...)``; noise is always drawn on the CPU, so it does not depend on the device."""
    return torch.Generator().manual_seed(seed_of(run_seed, *parts))


def noise(run_seed: int, ids: Sequence[SampleId], purpose: str, shape: Sequence[int]) -> Tensor:
    """Standard normal noise ``[B, *shape]`` float32, each row from its own sample's seed."""
    rows = [
        torch.randn(*shape, generator=generator(run_seed, i.step, i.slot, i.attempt, i.sample, purpose)) for i in ids
    ]
    return torch.stack(rows)


def permutation(run_seed: int, epoch: int, n: int) -> list[int]:
    """The order of ``n`` records in ``epoch``, one global permutation for all controllers."""
    return torch.randperm(n, generator=generator(run_seed, "order", epoch)).tolist()

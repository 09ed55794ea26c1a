"""The training loop of the studies' small models: passes over groups, steps down the gradient, and the best look."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from torch import Tensor
from torch.nn.utils import clip_grad_norm_
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

W = TypeVar("W")


def descend(
    optimizer: Optimizer, loss: Tensor, rates: LRScheduler | None = None, clipped: Iterable[Tensor] = ()
) -> None:
    """One step down the gradient of ``loss``. The gradients of ``clipped`` have together at most the length 1."""
    optimizer.zero_grad()
    loss.backward()
    clip_grad_norm_(clipped, 1.0)
    optimizer.step()
    if rates is not None:
        rates.step()


def passes(count: int, size: int, number: int, seed: int) -> Iterator[list[list[int]]]:
    """``number`` passes over ``count`` groups, each in a new order: lists of up to ``size`` groups."""
    order, draw = list(range(count)), random.Random(seed)
    for _ in range(number):
        draw.shuffle(order)
        yield [order[first : first + size] for first in range(0, count, size)]


def best(looks: Iterable[float], copied: Callable[[], W], patience: int | None, least: float = math.inf) -> W:
    """What ``copied`` gave at the smallest of the losses ``looks``, where it is below ``least``, else at the start.

    Training goes on with each look, until there was no smaller loss for ``patience`` looks. Without patience all are
    taken, and the last one counts.
    """
    kept, waited = copied(), 0
    for now in looks:
        waited += 1
        if patience is None or now < least:
            kept, least, waited = copied(), now, 0
        if patience is not None and waited >= patience:
            break
    return kept

"""The learning rate of every update: a function of the recipe, so that a run that was killed has the same again."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmrl.config.schema import Optim

LAG = 0.05
"""How far a schedule may stay behind the limit of CPU time. Measured time differs from run to run; with this it has no
say where a run comes to its last step before the limit, or shortly after it would have."""


def learning_rate(optim: Optim, total: int, updates: int, spent: float = 0.0) -> float:
    """The rate of the update after ``updates`` updates, of a run of ``total``.

    ``spent``: the share of train.max_cpu_seconds that is used. Where that limit will end the run, a falling rate
    follows it in place of the updates done. Updates before the run was continued keep the rate that they had.
    """
    for before in optim.earlier:
        if updates < before.until:
            return _scheduled(optim, before.peak, before.total, updates) if before.constant is None else before.constant
    return _scheduled(optim, optim.lr, total, updates, spent) if optim.held is None else optim.held


def for_critic(optim: Optim, lr: float) -> Optim:
    """The settings of a critic whose peak rate is ``lr``: its schedule is the policy's, and it has no average."""

    def held(rate: float | None, peak: float) -> float | None:
        return None if rate is None else rate / peak * lr

    earlier = [one.model_copy(update={"peak": lr, "constant": held(one.constant, one.peak)}) for one in optim.earlier]
    changes = {"lr": lr, "held": held(optim.held, optim.lr), "earlier": earlier, "ema_decay": None}
    return optim.model_copy(update=changes)


def _scheduled(optim: Optim, lr: float, total: int, updates: int, spent: float = 0.0) -> float:
    done = max(updates / total, spent - LAG)
    if optim.schedule == "cosine":
        return lr * _cosine(optim, total, updates, done)
    warm = min(1.0, (updates + 1) / (optim.warmup_steps + 1))
    fallen = _above_floor(optim, max(0.0, 1 - done)) if optim.schedule == "linear" else 1.0
    return lr * warm * fallen


def _cosine(optim: Optim, total: int, updates: int, done: float) -> float:
    """As transformers' get_cosine_schedule_with_warmup, and with a floor as its ..._with_min_lr_...: the first update
    of a warm-up has rate 0. ``done``: the share of the run."""
    warmup = optim.warmup_steps
    if updates < warmup:
        return updates / warmup
    past = min(1.0, max(0.0, done * total - warmup) / max(1, total - warmup))
    return _above_floor(optim, 0.5 * (1 + math.cos(math.pi * past)))


def _above_floor(optim: Optim, share: float) -> float:
    return share * (1 - optim.min_lr_ratio) + optim.min_lr_ratio

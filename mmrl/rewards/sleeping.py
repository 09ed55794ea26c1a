"""Rewards with frozen models: in which dtype these multiply, and how they leave their device while it does other work
(``placement.sleep``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import nn

from mmrl.config.dtype import has_bfloat16
from mmrl.core.errors import UserError
from mmrl.core.offload import Frozen

M = TypeVar("M", bound="nn.Module")
T = TypeVar("T", bound="tuple[Any, ...]")

DTYPES = ("auto", "float32", "bfloat16")


def check_dtype(dtype: str, known: Sequence[str] = DTYPES) -> str:
    """``dtype``, if it is one of ``known``. Raises ``UserError``."""
    if dtype not in known:
        raise UserError(f"options.dtype is {dtype!r}; set it to {', '.join(known[:-1])} or {known[-1]}")
    return dtype


def dtype_on(dtype: str, device: torch.device | str) -> str:
    """``dtype``; for ``auto`` bfloat16 where ``device`` has instructions for it, and float32 elsewhere."""
    return dtype if dtype != "auto" else "bfloat16" if has_bfloat16(str(device)) else "float32"


def multiplying(dtype: str, device: torch.device | str) -> torch.autocast:
    """Inside, modules with float32 weights on ``device`` multiply in ``dtype`` (see ``dtype_on``), whatever autocast is
    on outside."""
    chosen = getattr(torch, dtype_on(dtype, device))
    kind = torch.device(device).type
    if chosen == torch.float32:
        return torch.autocast(kind, enabled=False)
    return torch.autocast(kind, dtype=chosen)


def single(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` in float32, or in what is more exact."""
    return tensor if tensor.dtype.itemsize >= 4 else tensor.float()


class Sleeping:
    """Base of a reward with frozen models, so that it has ``sleep`` and ``wake``.

    @mmrl.reward(device=True)
    class Mine(Sleeping):
        def __init__(self, path):
            self.model = self.frozen(load(path), lambda: load(path))

        def score(self, samples, *, context):
            self.wake(context.device)  # costs nothing where that has been done
    """

    _frozen: tuple[Frozen, ...] = ()

    def frozen(self, module: M, read: Callable[[], nn.Module] | None = None) -> M:
        """Add ``module`` to those that sleep and wake; ``read`` as in ``Frozen``. Returns the module."""
        self._frozen = (*self._frozen, Frozen(module, read))
        return module

    def kept(self, load: Callable[[], T]) -> T:
        """What ``load`` gives: a model, which is ``frozen`` here, and what it is used with."""
        made = load()
        self.frozen(made[0], lambda: load()[0])
        return made

    def sleep(self, device: torch.device | str) -> None:
        """Free the memory of ``device``. Harmless when called first, or twice."""
        for one in self._frozen:
            one.sleep(device)

    def wake(self, device: torch.device | str) -> bool:
        """Move the models to ``device`` and wait for the copies. Returns whether later calls are faster."""
        came = [one.wake(device) for one in self._frozen]
        return any(came)

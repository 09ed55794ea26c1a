"""Rewards whose frozen models leave their device while it does other work (``placement.sleep``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from mmrl.frozen_modules import Frozen

if TYPE_CHECKING:
    import torch
    from torch import nn

M = TypeVar("M", bound="nn.Module")


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

    def sleep(self, device: torch.device | str) -> None:
        """Free the memory of ``device``. Harmless when called first, or twice."""
        for one in self._frozen:
            one.sleep(device)

    def wake(self, device: torch.device | str) -> bool:
        """Move the models to ``device`` and wait for the copies. Returns whether later calls are faster."""
        came = [one.wake(device) for one in self._frozen]
        return any(came)

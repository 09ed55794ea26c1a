"""The layout of trained weights on the ranks: whole on each (here), sharded (``mmrl.models.sharded``), or divided over
ranks that share a model (``mmrl.models.megatron``).

A *rank* is a process that computes gradients of the same policy.
"""

# ``outermost`` keeps its flag on the object whose method it wraps.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn


class _Gathers(Protocol):
    _unsharded: bool


S = TypeVar("S", bound=_Gathers)
P = TypeVar("P")
R = TypeVar("R")


def outermost(body: Callable[[S], Generator[None]]) -> Callable[[S], AbstractContextManager[None]]:
    """Make the method ``unsharded`` of ``body``: a nested call does nothing. ``_unsharded``: whether one is active."""
    enter = contextmanager(body)

    @wraps(body)
    @contextmanager
    def unsharded(self: S) -> Generator[None]:
        if self._unsharded:
            yield
            return
        self._unsharded = True
        try:
            with enter(self):
                yield
        finally:
            self._unsharded = False

    return unsharded


def probe(vocabulary: int, length: int, device: torch.device) -> tuple[dict[str, Any], Tensor]:
    """Arguments of a causal language model for two rows, the first with padding, and the tokens of its logits."""
    rows = torch.arange(2 * length, device=device).view(2, -1) % vocabulary
    mask = torch.ones_like(rows)
    mask[0, :3] = 0
    kept = torch.arange(4, length - 1, device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": rows, "attention_mask": mask, "logits_to_keep": kept}
    return {**given, "position_ids": positions, "use_cache": False}, rows[:, 5:]


class Passed(Exception):
    """Raised in the forward of a stage that has no log-probs: ``hidden`` goes to the next stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("a stage of a pipeline cannot return logits; call the model through Stages.through")
        self.hidden = hidden


class Stages(Protocol):
    """Pipeline parallelism: ranks that each have some of the layers, in order."""

    multiple: int
    """The number of slices must be a multiple of this."""

    def through(self, pieces: Sequence[P], work: Callable[[P], R], *, graph: bool) -> list[R]:
        """Call ``work``, which calls the model once, for each piece. Returns its results on the last stage, and an
        empty list on the others. With ``graph`` it returns a loss, whose gradients are added to the parameters; then
        the list is empty everywhere."""
        ...


class Weights(Protocol):
    """The trained weights on this rank, and how ranks divide them."""

    mine: dict[str, Tensor]
    """This rank's part of each trained parameter, by name: all of it, or some of its rows. Parameters that only other
    ranks have are missing."""
    in_shards: bool
    """Whether weights are sharded: ranks gather and save them together."""
    lockstep: bool
    """Whether a forward or backward pass is collective (all ranks must call it together) outside of ``unsharded``."""
    width: int
    """How many neighbouring ranks compute each slice together."""

    @property
    def stepped(self) -> Collection[str]:
        """The names in ``mine`` that this rank's optimizer steps on; ranks with the same weights step on the others."""
        ...

    @property
    def names(self) -> Collection[str]:
        """The names of all trained parameters, on any rank."""
        ...

    @property
    def stages(self) -> Stages | None:
        """The stages of pipeline parallelism; None without."""
        ...

    def gather_gradients(self) -> None:
        """Set the gradient of each tensor in ``mine``, summed over all ranks; None if no rank has one."""
        ...

    def norm(self) -> Tensor:
        """The norm of the gradient of all parameters, equal on every rank."""
        ...

    def swap(self, copy: dict[str, Tensor]) -> None:
        """Exchange the weights with ``copy``, which has the names of ``mine``."""
        ...

    def changed(self) -> None:
        """Update the weights that the model computes with, after ``mine`` was written to."""
        ...

    def updated(self) -> None:
        """Make ranks with the same weights equal again after an optimizer step. All ranks call it together."""
        ...

    def unsharded(self) -> AbstractContextManager[None]:
        """A context in which this rank's forward passes need no other rank: sharded weights are gathered for it.
        All ranks enter and leave it together."""
        ...

    def checkpoint_view(self, name: str, mine: Tensor) -> Tensor:
        """This rank's part of a tensor that belongs to the parameter ``name`` (a moment, a copy), in the form that
        ``torch.distributed.checkpoint`` takes: a ``DTensor`` where it is sharded. It shares the storage."""
        ...

    def whole(self, name: str, mine: Tensor) -> Tensor:
        """The whole tensor; ranks that have parts of it call this together."""
        ...


class ByItself:
    """The layouts in which each rank computes its slices alone, with the weights that the optimizer steps on."""

    width = 1
    stages = None

    def changed(self) -> None:
        """Nothing: the model computes with them."""

    def updated(self) -> None:
        """Nothing: no other rank steps on the same."""


class Replicated(ByItself):
    """Final class: each rank has all weights. ``sum_over`` sums ``[n]`` over all ranks; None for one rank."""

    in_shards = lockstep = False

    def __init__(self, module: nn.Module, sum_over: Callable[[Tensor], Tensor] | None = None) -> None:
        self.mine: dict[str, Tensor] = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.names: Collection[str] = self.mine
        self.stepped = self.names
        self._sum_over = sum_over

    @torch.no_grad()
    def gather_gradients(self) -> None:
        if self._sum_over is None:
            return
        parameters = list(self.mine.values())
        there = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
        flat = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        total = self._sum_over(torch.cat([g.flatten() for g in flat] + [there]))
        *grads, there = total.split([p.numel() for p in parameters] + [len(parameters)])
        for p, grad, n in zip(parameters, grads, there.tolist(), strict=True):
            p.grad = grad.view_as(p) if n else None

    def norm(self) -> Tensor:
        return torch.nn.utils.get_total_norm(gradients(self.mine))

    def swap(self, copy: dict[str, Tensor]) -> None:
        for k, p in self.mine.items():
            p.data, copy[k] = copy[k], p.data

    def unsharded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def checkpoint_view(self, name: str, mine: Tensor) -> Tensor:
        return mine

    def whole(self, name: str, mine: Tensor) -> Tensor:
        return mine


class Around:
    """The layout ``weights`` of ranks of which ``size`` neighbours compute each slice together. See ``Weights``, of
    which a class of it adds ``unsharded``."""

    def __init__(self, weights: Weights, size: int) -> None:
        self._weights, self.width = weights, size * weights.width
        self.mine, self.in_shards, self.lockstep = weights.mine, weights.in_shards, weights.lockstep
        self.gather_gradients, self.norm, self.swap = weights.gather_gradients, weights.norm, weights.swap
        self.checkpoint_view, self.whole = weights.checkpoint_view, weights.whole
        self.names, self.stepped, self.stages = weights.names, weights.stepped, weights.stages
        self.changed, self.updated = weights.changed, weights.updated


def gradients(mine: Mapping[str, Tensor]) -> list[Tensor]:
    """All gradients that are not None."""
    return [p.grad for p in mine.values() if p.grad is not None]


@torch.no_grad()
def exchange(mine: Mapping[str, Tensor], copy: Mapping[str, Tensor], *, unsharded: bool) -> None:
    """The values of ``mine`` and ``copy`` in place, where others read this very storage. Raises ``RuntimeError`` inside
    ``Weights.unsharded``: the weights gathered for it would keep their old values."""
    if unsharded:
        raise RuntimeError("weights that are gathered for a phase cannot be exchanged inside it")
    for k, p in mine.items():
        before = p.clone()
        p.copy_(copy[k])
        copy[k].copy_(before)

"""The layout of trained weights on the ranks: whole on each (here), sharded (``mmrl.engines.sharded``), or divided over
ranks that share a model (``mmrl.engines.megatron``).

A *rank* is a process that computes gradients of the one policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any, Protocol

import torch
from torch import Tensor, nn


def outermost(body: Callable[[Any], Generator[None]]) -> Callable[[Any], AbstractContextManager[None]]:
    """Make the method ``unsharded`` of ``body``: a nested call does nothing. ``_unsharded``: whether one is active."""
    enter = contextmanager(body)

    @wraps(body)
    @contextmanager
    def unsharded(self: Any) -> Generator[None]:
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
    """Two rows, the first with padding, as a causal language model takes them, and the tokens its logits are for."""
    rows = torch.arange(2 * length, device=device).view(2, -1) % vocabulary
    mask = torch.ones_like(rows)
    mask[0, :3] = 0
    kept = torch.arange(4, length - 1, device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    given = {"input_ids": rows, "attention_mask": mask, "logits_to_keep": kept}
    return {**given, "position_ids": positions, "use_cache": False}, rows[:, 5:]


class Passed(Exception):
    """Raised out of a forward by a stage that has no log-probs: ``hidden`` goes to the next one."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__("a stage of a pipeline has handed its part on; who calls the model goes through Stages")
        self.hidden = hidden


class Stages(Protocol):
    """Ranks that have some of the layers each, one behind the other."""

    multiple: int
    """Slices go through them by so many."""

    def through(self, pieces: Sequence[Any], work: Callable[[Any], Any], *, graph: bool) -> list[Any]:
        """``work`` of each piece, which calls the model once. ``graph``: it returns a loss, whose gradients are left on
        the parameters, and nothing is returned; else what it made, on the last stage, and nothing elsewhere."""
        ...


class Weights(Protocol):
    mine: dict[str, Tensor]
    """By parameter's name, what this rank keeps of it and its optimizer steps on: all of it, or its rows of it; nothing
    of parameters that only other ranks have."""
    in_shards: bool
    """Whether ranks hold parts, which they gather and save together."""
    lockstep: bool
    """Whether a forward or backward pass is collective (all ranks must call it together) outside of ``unsharded``."""
    width: int
    """Ranks that go through each slice together; neighbours do."""

    @property
    def stepped(self) -> Collection[str]:
        """Of ``mine``, what this rank's optimizer steps on; ranks with the same weights step on the rest."""
        ...

    @property
    def names(self) -> Collection[str]:
        """Of all parameters that are trained, on any rank."""
        ...

    @property
    def stages(self) -> Stages | None:
        """What slices go through; None where a call of the model is all of it."""
        ...

    def gather_gradients(self) -> None:
        """Give each of ``mine`` its gradient, summed over all ranks; what none has a gradient for stays without."""
        ...

    def norm(self) -> Tensor:
        """Of the gradient of all parameters, the same on every rank."""
        ...

    def swap(self, copy: dict[str, Tensor]) -> None:
        """Exchange the weights and ``copy``, which has what ``mine`` has."""
        ...

    def changed(self) -> None:
        """Something was written into ``mine``: what the model computes with follows."""
        ...

    def updated(self) -> None:
        """The optimizer has stepped: ranks with the same weights have the same again. All call it together."""
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
        """The whole of it, where ranks hold parts of it; all of them ask together."""
        ...


class Replicated:
    """Final class: each rank holds all weights. ``sum_over`` adds ``[n]`` over all ranks; None for one."""

    in_shards = lockstep = False
    width = 1
    stages = None

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

    def changed(self) -> None:
        pass

    def updated(self) -> None:
        pass

    def unsharded(self) -> AbstractContextManager[None]:
        return nullcontext()

    def checkpoint_view(self, name: str, mine: Tensor) -> Tensor:
        return mine

    def whole(self, name: str, mine: Tensor) -> Tensor:
        return mine


def gradients(mine: Mapping[str, Tensor]) -> list[Tensor]:
    """The gradients that are there."""
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

"""Reduce the gradients of a model that ranks share to the rank that updates each tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmrl.engines.megatron.mapping import Place
from mmrl.engines.megatron.model import Groups


class Twin(NamedTuple):
    """The embedding; ``tied``: the last stage has it a second time, for the output."""

    place: Place
    tied: bool


class Gradients:
    """Final class: of this rank's parameters ``ours``, whose weights in float32 are ``exact``.

    ``among_copies``: ranks with the same weights divide what they step on, tensor by tensor. ``by_tokens``: ranks
    divide the tokens of what lies between the parts of layers. ``sent`` counts the bytes given to the ranks with the
    same weights.
    """

    def __init__(
        self,
        ours: Mapping[Place, nn.Parameter],
        exact: Mapping[Place, Tensor],
        groups: Groups,
        twin: Twin,
        sent: Counter[str],
        *,
        by_tokens: bool,
        among_copies: bool,
    ) -> None:
        self._ours, self._exact, self._groups, self._twin = ours, exact, groups, twin
        self._by_tokens, self._sent = by_tokens, sent
        self._sums: dict[Place, Tensor] | None = None
        self._owners: dict[Place, int] = {}
        if among_copies:
            self._divide()

    def _divide(self) -> None:
        """The next largest goes to who has the least."""
        loads = {copies: [0] * copies.size() for copies in (self._groups.copies, self._groups.expert_copies)}
        # what two stages have first: then both come to the same
        for place in sorted(self._exact, key=lambda p: (p is not self._twin.place, -self._exact[p].numel(), p.name)):
            load = loads[self._copies_of(place)]
            owner = self._owners[place] = load.index(min(load))
            load[owner] += self._exact[place].numel()

    @property
    def divided(self) -> bool:
        """Whether ranks with the same weights step on different ones."""
        return bool(self._owners)

    def steps(self, place: Place) -> bool:
        """Whether this rank steps on ``place``."""
        return self._owners.get(place) in (None, self._copies_of(place).rank())

    def add_in_float32(self) -> None:
        """From now, gradients of parameters that are rounded."""
        self._sums = sums = {}

        for place, p in self._ours.items():

            def add(p: Tensor, place: Place = place) -> None:
                assert p.grad is not None
                sums[place] = sums[place] + p.grad if place in sums else p.grad.float()
                p.grad = None

            p.register_post_accumulate_grad_hook(add)

    def gathered(self) -> dict[Place, Tensor]:
        """Of what this rank steps on and any rank has a gradient of, the sum over all rows and parts. Parameters are
        left without. All ranks call it together."""
        if (sums := self._sums) is None:
            sums = {place: p.grad for place, p in self._ours.items() if p.grad is not None}
        there = torch.tensor([float(place in sums) for place in self._ours], device=self._device)
        self._add(there, self._groups.copies)
        found = {}
        for n, (place, p) in zip(there.tolist(), self._ours.items(), strict=True):
            if n:
                gradient = sums.pop(place) if place in sums else torch.zeros_like(self._exact[place])
                self._add(gradient, self._copies_of(place), self._owners.get(place))
                if self.steps(place):
                    found[place] = self._over_parts(place, gradient)
            p.grad = None
        return found

    def updated(self) -> None:
        """Give the ranks with the same weights what this one stepped on, and take what they did."""
        for place, owner in self._owners.items():
            dist.broadcast(self._exact[place], group=self._copies_of(place), group_src=owner)
            self._sent["weights"] += self._exact[place].nbytes * self.steps(place)

    def _over_parts(self, place: Place, gradient: Tensor) -> Tensor:
        """With what other parts of the model add to it, in place."""
        if place.cut == "shared" or (place.cut == "same" and self._by_tokens):
            dist.all_reduce(gradient, group=self._groups.layers)
        if self._twin.tied and place is self._twin.place:
            dist.all_reduce(gradient, group=self._groups.ends)
        return gradient

    def _add(self, gradient: Tensor, copies: dist.ProcessGroup, owner: int | None = None) -> None:
        """In place, over the ranks ``copies`` that have the same part of the model: for the rank ``owner``, or for
        all."""
        if (n := copies.size()) == 1:
            return
        if owner is None:
            dist.all_reduce(gradient, group=copies)
            self._sent["gradients"] += 2 * (n - 1) * gradient.nbytes // n
        else:
            dist.reduce(gradient, group=copies, group_dst=owner)
            self._sent["gradients"] += gradient.nbytes * (owner != copies.rank())

    def _copies_of(self, place: Place) -> dist.ProcessGroup:
        return self._groups.expert_copies if place.cut == "experts" else self._groups.copies

    @property
    def _device(self) -> torch.device:
        return next(iter(self._exact.values())).device

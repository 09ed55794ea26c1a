"""Embeddings of a graph with one interface: TransE, RotatE, OTE, and OTE with normalised scales (NOTE)."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.rewards.learned.knowledge import formulas

Kind = Literal["transe", "rotate", "ote", "note"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_TURNED = ("ote", "note")
Side = Literal["head", "tail"]


class Embedding(nn.Module):
    """Vectors of entities and parameters of relations, and the distance of a triple: small where it is plausible.

    ``size``: numbers an entity has, also with ``rotate`` (half of them imaginary); ``group``: those that an orthogonal
    matrix of OTE and NOTE turns together. ``margin``: of the loss. Raises ``UserError`` for sizes that do not divide.
    """

    def __init__(self, kind: Kind, entities: int, relations: int, size: int, group: int, margin: float) -> None:
        super().__init__()
        if kind == "rotate" and size % 2:
            raise UserError(f"--size {size}: RotatE has a real and an imaginary part of each number; give an even size")
        if kind in _TURNED and (group < 1 or size % group):
            raise UserError(f"--group {group}: it must divide --size {size}; give another")
        self.kind, self.group, self.margin = kind, group, margin
        width = (margin + 2) / size  # as RotatE begins
        self.entities = nn.Parameter(torch.empty(entities, size).uniform_(-width, width))
        if kind in _TURNED:
            shape = (relations, size // group, group)
            self.relations = nn.Parameter(torch.eye(group).expand(*shape, group) + 0.1 * torch.randn(*shape, group))
            self.scales = nn.Parameter(torch.zeros(shape))
        else:
            of = size if kind == "transe" else size // 2
            bound = width if kind == "transe" else torch.pi
            self.relations = nn.Parameter(torch.empty(relations, of).uniform_(-bound, bound))

    def forward(self, triples: Tensor, candidates: Tensor, side: Side) -> Tensor:
        """``[B, N]``: distances of ``triples`` ``[B, 3]``, with ``candidates`` ``[B, N]`` for their head or tail."""
        of, fixed = self.entities[candidates], self.entities[triples[:, 2 if side == "head" else 0]].unsqueeze(1)
        heads, tails = (of, fixed) if side == "head" else (fixed, of)
        relation = self.relations[triples[:, 1]]
        if self.kind == "transe":
            return formulas.transe_distance(heads, relation, tails)
        if self.kind == "rotate":
            return formulas.rotate_distance(heads, relation, tails)
        cut, to_head = (-1, self.group), side == "head"
        scales = formulas.scale(self.scales[triples[:, 1]], to_head=to_head, normalised=self.kind == "note")
        turn = formulas.orthogonal(relation)
        return formulas.ote_distance(heads.unflatten(-1, cut), turn, scales, tails.unflatten(-1, cut), to_head=to_head)

    def distance(self, triples: Tensor) -> Tensor:
        """``[B]``: the mean of both directions, which are the same for TransE and RotatE."""
        from_head = self(triples, triples[:, 2:], "tail")
        return ((from_head + self(triples, triples[:, :1], "head")) / 2).squeeze(1)

"""Formulas of knowledge graph embeddings. Shapes: ``B`` triples, each with ``N`` candidates (or 1) for an entity, ``d``
numbers an entity, in ``K`` groups of ``s`` for OTE."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def orthogonal(matrices: Tensor) -> Tensor:
    """The Gram-Schmidt orthogonalisation of the columns of ``[..., s, s]``, with determinants of either sign.

    It is the ``Q`` of the QR decomposition whose ``R`` has a positive diagonal.
    """
    q, r = torch.linalg.qr(matrices)
    return q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)


def scale(logs: Tensor, *, to_head: bool, normalised: bool) -> Tensor:
    """OTE's ``exp(s)`` from the head and ``exp(-s)`` to it, ``[..., s]``; ``normalised``: over its length along the
    last axis (NOTE, arXiv 2107.01892)."""
    grown = torch.exp(-logs if to_head else logs)
    return F.normalize(grown, dim=-1) if normalised else grown


def ote_distance(heads: Tensor, transform: Tensor, scales: Tensor, tails: Tensor, *, to_head: bool) -> Tensor:
    """``[B, N]``: OTE's distance (arXiv 1911.04910).

    ``heads``, ``tails``: ``[B, N or 1, K, s]``; ``transform``: orthogonal ``[B, K, s, s]``; ``scales``: ``[B, K, s]``,
    as ``scale`` gives them. From the head: the sum over ``k`` of ``||s_k (Phi h)_k - t_k||``; ``to_head``: that of
    ``||s_k (Phi^T t)_k - h_k||``.
    """
    start, end = (tails, heads) if to_head else (heads, tails)
    turned = torch.einsum("bkji,bnkj->bnki" if to_head else "bkij,bnkj->bnki", transform, start)
    return (turned * scales.unsqueeze(1) - end).norm(dim=-1).sum(-1)


def transe_distance(heads: Tensor, shift: Tensor, tails: Tensor) -> Tensor:
    """``[B, N]``: ``||h + r - t||_1`` (Bordes et al. 2013). ``heads``, ``tails``: ``[B, N or 1, d]``; ``shift``:
    ``[B, d]``."""
    return (heads + shift.unsqueeze(1) - tails).abs().sum(-1)


def rotate_distance(heads: Tensor, angle: Tensor, tails: Tensor) -> Tensor:
    """``[B, N]``: ``sum_j |h_j e^{i r_j} - t_j|`` (arXiv 1902.10197); an entity has real parts, then imaginary ones."""
    (real, imaginary), (to_real, to_imaginary) = heads.chunk(2, -1), tails.chunk(2, -1)
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    off = torch.stack((real * cos - imaginary * sin - to_real, real * sin + imaginary * cos - to_imaginary))
    return off.norm(dim=0).sum(-1)


def adversarial_loss(true: Tensor, false: Tensor, margin: float, temperature: float) -> Tensor:
    """The mean of ``-log sigma(margin - d) - sum_i p_i log sigma(d_i - margin)`` (arXiv 1902.10197, eq. 5 and 6).

    ``true``: distances ``[B]``; ``false``: those of negatives ``[B, N]``, infinite where it is none. ``p`` is the
    softmax of ``-temperature d_i``, and has no gradient. A triple without negatives has no second term.
    """
    none = torch.isinf(false)
    weights = torch.softmax((-temperature * false).detach().masked_fill(none, -torch.inf), -1).nan_to_num()
    apart = F.logsigmoid(false.masked_fill(none, margin) - margin)
    return -(F.logsigmoid(margin - true) + (weights * apart).sum(-1)).mean() / 2


def smoothed(entities: Tensor, triples: Tensor, share: float) -> Tensor:
    """``share u + (1 - share)`` times the mean of the neighbours of ``u``, heads and tails alike.

    Post-smoothing of arXiv 2107.01892, which prints a sum in place of the mean: with a sum the length of a vector would
    grow with its number of neighbours. ``entities``: ``[E, d]``; ``triples``: ``[N, 3]``. Entities without neighbours
    stay.
    """
    heads, tails = triples[:, 0], triples[:, 2]
    total = torch.zeros_like(entities).index_add(0, heads, entities[tails]).index_add(0, tails, entities[heads])
    count = torch.bincount(torch.cat((heads, tails)), minlength=len(entities)).unsqueeze(1)
    mixed = share * entities + (1 - share) * total / count.clamp(min=1)
    return torch.where(count > 0, mixed, entities)


def rank_of(distances: Tensor, right: Tensor) -> Tensor:
    """``[B]``: the rank, from 1, of the candidate ``right`` ``[B]`` among ``distances`` ``[B, N]``; equal ones share
    the mean rank."""
    mine = distances.gather(1, right.unsqueeze(1))
    nearer, equal = (distances < mine).sum(1), (distances == mine).sum(1)
    return 1 + nearer + (equal - 1) / 2

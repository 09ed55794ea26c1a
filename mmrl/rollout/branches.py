"""Branches: several samples of a group that share their beginning, and the credit of what they share.

With ``midway.branches: B`` each kept beginning is continued ``B`` times with other noise or tokens, so that a group of
``K`` samples has ``m = K / B`` beginnings. The policy gradient of the expected reward is estimated by

    1/m sum_i [ grad log p(beginning i) mean_b A_ib  +  1/B sum_b grad log p(rest ib) A_ib ]

A beginning counts once, with the mean of its branches' advantages. This equals the mean over all ``K`` rows if each row
counts its whole log-prob with its own advantage, so that the loss needs no other weights.

The advantage must be relative to something that the beginning does not change, else its gradient is too small:
branches of one beginning are alike, and the group's mean ``M`` contains all of them. Hence a branch is compared with
the branches of the *other* beginnings. With ``M_i`` the mean of the branches of beginning ``i``,

    r_ib - mean of the others' branches  =  (r_ib - M)  +  B / (K - B) (M_i - M)

and this times ``(K - 1) / K`` is the advantage here: the expected gradient is then ``(K - 1) / K`` times the true one
for beginning and rest, as that of GRPO without branches is. ``r - M`` may be divided by a standard deviation, as GRPO
does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from mmrl.algorithms.advantages import Advantages
from mmrl.config.schema import Recipe
from mmrl.core.trajectory import SampleId


def branch_ids(ids: Sequence[SampleId], branch: int, begun: int) -> list[SampleId]:
    """The ids of one branch of samples: the first keeps the numbers of the ``begun`` samples of a group, further ones
    have numbers, and so random numbers, of their own."""
    return [replace(i, sample=i.sample + branch * begun) for i in ids]


def with_credit(recipe: Recipe, of: Advantages) -> Advantages:
    """The advantages of groups whose samples share beginnings: the rows of one beginning are contiguous."""
    if recipe.midway is None or recipe.midway.branches == 1:
        return of
    return replace(of, values=shared_credit(of.values, of.valid, recipe.train.group_size, recipe.midway.branches))


def shared_credit(values: Tensor, valid: Tensor, size: int, branches: int) -> Tensor:
    """``values`` ``[B]`` float32, relative to the mean of their group of ``size``, as the module says; ``valid``
    ``[B]`` leaves rows without a reward out. Where only one beginning of a group has rewards, its values stay."""
    a = torch.where(valid, values, 0.0).double().view(-1, size // branches, branches)
    count = valid.double().view_as(a).sum(2, keepdim=True)
    whole = count.sum(1, keepdim=True)
    mean = a.sum(2, keepdim=True) / count.clamp(min=1)
    others = whole - count
    found = (whole - 1) / whole.clamp(min=1) * (a + count / others.clamp(min=1) * mean)
    kept = valid.view_as(a) & (others > 0)
    return torch.where(kept, found, a).flatten().float()


def known_std(rewards: Tensor) -> Tensor:
    """The standard deviation over the last dimension of ``rewards`` that are not NaN; NaN where there is none."""
    return (rewards - rewards.nanmean(-1, keepdim=True)).square().nanmean(-1).sqrt()

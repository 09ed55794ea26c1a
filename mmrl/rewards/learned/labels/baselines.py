"""What the graph transformer is compared with. Each gives scores in [0, 1] of all samples from the labels of a few.

``labels`` ``[N]`` in [0, 1] count where ``given`` ``[N]`` is true. A setting that each method has is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from mmrl.rewards.learned.formulas import logistic
from mmrl.rewards.learned.labels.graph import Graph, nearest

_ROUNDS = 50
_FREE = 1e-9
"""The pull of a bias: there is a best one where all labels are alike."""
_LITTLE = 1e-2
"""The pull of a number that counts as it is: there are few of them."""
DECAYS = (1e-1, 1.0, 10.0)


def propagation(graph: Graph, labels: Tensor, given: Tensor, kept: float = 0.9) -> Tensor:
    """Label propagation (Zhou et al. 2004): each sample takes ``kept`` of its score from its neighbours, the rest from
    its label. The score is the share of label mass that is 1 among all that arrives; the labels' mean where none
    does."""
    weights = graph.cosines.clamp(min=0)
    degree = torch.zeros(graph.nodes).index_add(0, graph.targets, weights).clamp(min=1e-9)
    shares = (weights / (degree[graph.targets] * degree[graph.sources]).sqrt()).unsqueeze(1)
    mass = given.float()
    start = torch.stack([torch.where(given, labels, 0.0), mass], 1)
    now = start
    for _ in range(_ROUNDS):
        now = kept * torch.zeros_like(now).index_add(0, graph.targets, shares * now[graph.sources]) + (1 - kept) * start
    mean = labels[given].mean()
    return (now[:, 0] + 1e-6 * mean) / (now[:, 1] + 1e-6)


def neighbours(embeddings: Tensor, labels: Tensor, given: Tensor, count: int = 10) -> Tensor:
    """The mean label of the ``count`` nearest labelled samples, weighted by cosine; a labelled one is not its own."""
    place = given.nonzero().squeeze(1)
    cosines, indices = nearest(embeddings, embeddings[place], min(count + 1, len(place)))
    weights = cosines.clamp(min=1e-6) * (place[indices] != torch.arange(len(embeddings)).unsqueeze(1))
    weights[:, -1] *= (weights[:, :-1] == 0).any(1)  # the one too many, but for labelled samples
    return (weights * labels[place][indices]).sum(1) / weights.sum(1).clamp(min=1e-9)


def head(
    features: Tensor, labels: Tensor, given: Tensor, folds: Sequence[Tensor], numbers: int = 0
) -> tuple[Tensor, Tensor]:
    """Logistic regression on the embeddings: its weights ``[D + 1]``, and the logits ``[N]``, of a labelled sample
    those without the labels of its fold. ``numbers``: as of ``head_weights``.

    Of the decays is taken the largest whose squared error on the labels of ``folds``, each without its own, is at most
    a standard error above the least one (Breiman et al. 1984): a few labels, some of them wrong, choose too small ones.
    """
    found: list[tuple[float, float, float, Tensor]] = []
    for decay in DECAYS:
        logits = torch.zeros(len(labels), dtype=torch.float64)
        for fold in folds:
            told = given.index_fill(0, fold, value=False)
            logits[fold] = head_logits(features[fold], head_weights(features, labels, told, decay, numbers))
        errors = (torch.sigmoid(logits) - labels)[given].square()
        found.append((float(errors.mean()), float(errors.std()) / math.sqrt(len(errors)), decay, logits))
    least, near, *_ = min(found, key=lambda one: one[0])
    _, _, decay, held = next(one for one in reversed(found) if one[0] <= least + near)
    weights = head_weights(features, labels, given, decay, numbers)
    return weights, torch.where(given, held, head_logits(features, weights))


def head_logits(features: Tensor, weights: Tensor) -> Tensor:
    """Float64 ``[N]``; the last of ``weights`` ``[D + 1]`` is the bias."""
    return features.double() @ weights[:-1].double() + weights[-1].double()


def head_weights(features: Tensor, labels: Tensor, given: Tensor, decay: float, numbers: int = 0) -> Tensor:
    """The weights of logistic regression, ``[D + 1]`` float64, pulled to 0 by ``decay``; the last ``numbers`` features
    are pulled little, and the bias, the last weight, is as good as free."""
    x = features[given].double()
    pull = torch.full((x.shape[1] + 1,), decay, dtype=torch.float64)
    pull[len(pull) - 1 - numbers :] = _LITTLE
    pull[-1] = _FREE
    return logistic(torch.cat([x, torch.ones_like(x[:, :1])], 1), labels[given], pull, torch.zeros_like(pull))

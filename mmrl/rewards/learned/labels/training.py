"""Masked label prediction: train the graph transformer on the labels of a few samples.

The labels are parted into folds. A model is trained for each: its fold's labels are neither given to it nor asked for,
so that they measure it. This is repeated with other folds and first weights. In every epoch a random share of the other
labels is given and the loss is that of the rest. Afterwards each model is given all labels but its fold's, and the
logits of a sample are the mean over the models, of a labelled one over those that do not know its label.

A model starts as the supervised head of its labels, calibrated. While it learns, a labelled sample starts at the logit
of a head that does not know its label: it would learn to trust a head that does.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from mmrl.logging.progress import Progress
from mmrl.rewards.learned.descent import best, descend
from mmrl.rewards.learned.formulas import rising
from mmrl.rewards.learned.labels.baselines import head, head_logits
from mmrl.rewards.learned.labels.graph import Graph, fields
from mmrl.rewards.learned.labels.model import GraphTransformer, Shape

_EVERY = 5
"""Epochs from one look at the folds' labels to the next."""
_PATIENCE = 8
"""Looks without a better loss that end training."""
_DECAY = 5e-4
"""Of the weights."""
_APART = 1000
"""From the seed of a repeat to that of the next."""
_TRUST = 10
"""How many times faster ``trust`` learns: it is one number, and a poor head must be left within some dozens of
epochs."""


@dataclass(frozen=True)
class Settings:
    """``rate``: the share of labels that is given while training; ``repeats``: how often the labels are
    parted and models trained."""

    neighbours: int = 6
    hidden: int = 64
    layers: int = 1
    dropout: float = 0.3
    rate: float = 0.625
    lr: float = 3e-3
    epochs: int = 200
    folds: int = 5
    repeats: int = 3
    seed: int = 0

    def shape(self, features: int) -> Shape:
        return Shape(features, self.hidden, layers=self.layers, dropout=self.dropout)


@dataclass(frozen=True)
class Trained:
    """The models, the ``folds`` (numbers of labelled samples) that each of them does not know, and the logits ``[M,
    N]`` that each gives to every sample."""

    models: list[GraphTransformer]
    folds: list[Tensor]
    logits: Tensor

    def out_of_fold(self) -> Tensor:
        """The logits ``[N]``: the mean of the models, of a labelled sample that of the models without its label."""
        unknown = torch.zeros_like(self.logits)
        for n, fold in enumerate(self.folds):
            unknown[n, fold] = 1
        without = (self.logits * unknown).sum(0) / unknown.sum(0).clamp(min=1)
        return torch.where(unknown.any(0), without, self.logits.mean(0))


def parted(labels: Tensor, given: Tensor, folds: int, seed: int) -> list[Tensor]:
    """The numbers of the labelled samples in ``folds`` parts, high and low labels spread evenly over them."""
    draw = torch.Generator().manual_seed(seed)
    place = given.nonzero().squeeze(1)
    place = place[torch.randperm(len(place), generator=draw)]
    place = place[labels[place].argsort(stable=True)]
    return [place[n::folds].sort().values for n in range(folds)]


def train(
    features: Tensor, graph: Graph, labels: Tensor, given: Tensor, settings: Settings, numbers: int = 0
) -> Trained:
    """Train the models of all repeats. ``features`` ``[N, D]``, ``labels`` ``[N]`` in [0, 1] where ``given`` ``[N]``;
    ``numbers``: as of ``head_weights``.

    The models of a repeat take the same epoch, the one with the smallest loss over its folds (0: the heads alone): one
    for each fold would be chosen by a few labels, on which the model would then seem better than it is. The global
    generator of torch is left as it was.
    """
    found: list[_Pupil] = []
    epochs = settings.epochs * settings.repeats
    with torch.random.fork_rng(devices=[]), Progress(epochs, "spread labels", "epochs") as progress:
        for n in range(settings.repeats):
            one = replace(settings, seed=settings.seed + _APART * n)
            torch.manual_seed(one.seed)
            folds = parted(labels, given, one.folds, one.seed)
            starts = [_start(features, labels, given, fold, one, numbers) for fold in folds]
            pupils = [_Pupil(features, graph, labels, start, one) for start in starts]
            _learned(pupils, settings.epochs, progress)
            found += pupils
    logits = [pupil.model(features, graph, labels, pupil.known) for pupil in found]
    return Trained([pupil.model for pupil in found], [pupil.fold for pupil in found], torch.stack(logits))


def _learned(pupils: Sequence[_Pupil], epochs: int, progress: Progress) -> None:
    """Train them until their loss has not fallen for some time, and leave them as they were where it was least."""

    def looks() -> Iterator[float]:
        for epoch in range(0, epochs, _EVERY):
            for pupil in pupils:
                for _ in range(_EVERY):
                    pupil.learn()
            now = _mean_loss(pupils)
            progress.advance(min(_EVERY, epochs - epoch), f"loss {now:.3f}")
            yield now

    end = progress.done + epochs
    kept = best(looks(), lambda: [pupil.copied() for pupil in pupils], _PATIENCE, _mean_loss(pupils))
    progress.advance(end - progress.done)  # the epochs that are not needed
    for pupil, weights in zip(pupils, kept, strict=True):
        pupil.model.load_state_dict(weights)
        pupil.model.eval().requires_grad_(False)


def _mean_loss(pupils: Sequence[_Pupil]) -> float:
    return sum(pupil.loss() * len(pupil.fold) for pupil in pupils) / sum(len(pupil.fold) for pupil in pupils)


class _Start(NamedTuple):
    """The supervised head of the labels outside of ``fold``, calibrated. ``known`` ``[N]``: which these are;
    ``weights`` ``[D + 1]``, with the bias last; ``correction`` ``[N]``: what the logits of known samples lack without
    their labels."""

    fold: Tensor
    known: Tensor
    weights: Tensor
    correction: Tensor


def _start(features: Tensor, labels: Tensor, given: Tensor, fold: Tensor, settings: Settings, numbers: int) -> _Start:
    known = given.index_fill(0, fold, value=False)
    weights, held = head(features, labels, known, parted(labels, known, settings.folds, settings.seed), numbers)
    slope, shift = rising(held[known], labels[known])
    correction = slope * (held - head_logits(features, weights))
    weights = slope * weights
    weights[-1] += shift
    return _Start(fold, known, weights, correction.float())


class _Pupil:
    """A model that learns without the labels of a fold."""

    def __init__(self, features: Tensor, graph: Graph, labels: Tensor, start: _Start, settings: Settings) -> None:
        self.features, self.labels, self.rate = features, labels, settings.rate
        self.fold, self.known, self.correction = start.fold, start.known, start.correction
        self.place = self.known.nonzero().squeeze(1)
        self.of_place, self.of_fold = (fields(graph, asked, settings.layers) for asked in (self.place, self.fold))
        self.model = GraphTransformer(settings.shape(features.shape[1]))
        self.model.start.weight.copy_(start.weights[:-1].unsqueeze(0))
        self.model.start.bias.copy_(start.weights[-1:])
        rest = [p for name, p in self.model.named_parameters() if p.requires_grad and name != "trust"]
        groups = [{"params": rest}, {"params": [self.model.trust], "lr": _TRUST * settings.lr}]
        self.optimizer = torch.optim.AdamW(groups, lr=settings.lr, weight_decay=_DECAY, fused=True)

    def learn(self) -> None:
        """One epoch: give a random share of the known labels, and ask for the rest."""
        self.model.train()
        shown = masked(self.place, self.rate)
        asked, told = self.place[~shown], torch.zeros_like(self.known)
        told[self.place[shown]] = True
        logits = self.model(self.features, self.of_place, self.labels, told) + self.model.trust * self.correction
        loss = binary_cross_entropy_with_logits(logits[asked], self.labels[asked])
        descend(self.optimizer, loss)

    @torch.no_grad()
    def loss(self) -> float:
        """The cross-entropy of the fold's labels, given all others."""
        self.model.eval()
        logits = self.model(self.features, self.of_fold, self.labels, self.known)
        return float(binary_cross_entropy_with_logits(logits[self.fold], self.labels[self.fold]))

    def copied(self) -> dict[str, Tensor]:
        return copy.deepcopy(self.model.state_dict())


def masked(place: Tensor, rate: float) -> Tensor:
    """Which of the labelled samples ``place`` are given: about ``rate`` of them, at least one and not all."""
    order = torch.randperm(len(place))
    count = min(max(1, round(rate * len(place))), len(place) - 1)
    shown = torch.zeros(len(place), dtype=torch.bool)
    shown[order[:count]] = True
    return shown


def to_label_next(scores: Tensor, spread: Tensor, embeddings: Tensor, given: Tensor, count: int) -> Sequence[int]:
    """Samples without a label, whose score is near one half or on which the models differ (``spread``: the standard
    deviation of their scores), and that are not alike: each one's doubt is multiplied with its distance (1 - cosine) to
    the nearest sample that has a label or was picked before."""
    vectors = torch.nn.functional.normalize(embeddings.float(), dim=1)
    doubt = 1 - (2 * scores - 1).abs() + spread
    labelled = vectors[given]
    far = torch.ones(len(vectors))
    for first in range(0, len(labelled), 512):
        far = torch.minimum(far, 1 - (vectors @ labelled[first : first + 512].T).amax(1))
    picked: list[int] = []
    open_still = ~given
    for _ in range(min(count, int(open_still.sum()))):
        worth = torch.where(open_still, doubt * far.clamp(min=1e-6), -1.0)
        best = int(worth.argmax())
        picked.append(best)
        open_still[best] = False
        far = torch.minimum(far, 1 - vectors @ vectors[best])
    return picked

"""Masked label prediction: train the graph transformer on the labels of a few samples.

The labels are parted into folds. A model is trained for each: its fold's labels are neither given to it nor asked for,
so that they measure it. In every epoch a random share of the other labels is given and the loss is that of the
rest. Afterwards each model is given all labels but its fold's, and the logits of a sample are the mean over the models,
of a labelled one those of the model that does not know its label.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from mmrl.labels.graph import Graph, fields
from mmrl.labels.model import GraphTransformer, Shape
from mmrl.report.progress import Progress

_PATIENCE = 40
"""Epochs without a better loss of the folds' labels that end training."""
_EVERY = 5
"""Epochs from one look at the folds' labels to the next."""


@dataclass(frozen=True)
class Settings:
    """``rate``: the share of labels that is given while training."""

    neighbours: int = 6
    hidden: int = 64
    layers: int = 1
    dropout: float = 0.3
    rate: float = 0.625
    lr: float = 3e-3
    weight_decay: float = 5e-4
    epochs: int = 200
    folds: int = 5
    seed: int = 0

    def as_json(self) -> dict[str, int | float]:
        return asdict(self)

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
        """The logits ``[N]``: the mean of the models, of a labelled sample those of the model without its label."""
        found = self.logits.mean(0)
        for n, fold in enumerate(self.folds):
            found[fold] = self.logits[n, fold]
        return found


def parted(labels: Tensor, given: Tensor, folds: int, seed: int) -> list[Tensor]:
    """The numbers of the labelled samples in ``folds`` parts, high and low labels spread evenly over them."""
    draw = torch.Generator().manual_seed(seed)
    place = given.nonzero().squeeze(1)
    place = place[torch.randperm(len(place), generator=draw)]
    place = place[labels[place].argsort(stable=True)]
    return [place[n::folds].sort().values for n in range(folds)]


def train(features: Tensor, graph: Graph, labels: Tensor, given: Tensor, settings: Settings) -> Trained:
    """Train a model for each fold. ``features`` ``[N, D]``, ``labels`` ``[N]`` in [0, 1] where ``given`` ``[N]``.

    All models take the same epoch, the one with the smallest loss over all folds: one for each fold would be chosen by
    a few labels, on which the model would then seem better than it is. The global generator of torch is left as it was.
    """
    folds = parted(labels, given, settings.folds, settings.seed)
    with torch.random.fork_rng(devices=[]), Progress(settings.epochs, "spread labels", "epochs") as progress:
        torch.manual_seed(settings.seed)
        pupils = [_Pupil(features, graph, labels, given, fold, settings) for fold in folds]
        best, least, waited = [pupil.copied() for pupil in pupils], math.inf, 0
        for epoch in range(0, settings.epochs, _EVERY):
            for pupil in pupils:
                for _ in range(_EVERY):
                    pupil.learn()
            now = sum(pupil.loss() * len(pupil.fold) for pupil in pupils) / sum(map(len, folds))
            waited += _EVERY
            if now < least:
                best, least, waited = [pupil.copied() for pupil in pupils], now, 0
            progress.advance(min(_EVERY, settings.epochs - epoch), f"loss {now:.3f}")
            if waited >= _PATIENCE:
                break
    logits: list[Tensor] = []
    for pupil, weights in zip(pupils, best, strict=True):
        pupil.model.load_state_dict(weights)
        pupil.model.eval().requires_grad_(False)
        logits.append(pupil.model(features, graph, labels, pupil.known))
    return Trained([pupil.model for pupil in pupils], folds, torch.stack(logits))


class _Pupil:
    """A model that learns without the labels of ``fold``."""

    def __init__(
        self, features: Tensor, graph: Graph, labels: Tensor, given: Tensor, fold: Tensor, settings: Settings
    ) -> None:
        self.features, self.labels, self.fold, self.rate = features, labels, fold, settings.rate
        self.known = given.clone()
        self.known[fold] = False
        self.place = self.known.nonzero().squeeze(1)
        self.of_place, self.of_fold = (fields(graph, asked, settings.layers) for asked in (self.place, fold))
        self.model = GraphTransformer(settings.shape(features.shape[1]))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=settings.lr, weight_decay=settings.weight_decay)

    def learn(self) -> None:
        """One epoch: give a random share of the known labels, and ask for the rest."""
        self.model.train()
        shown = masked(self.place, self.rate)
        asked, told = self.place[~shown], torch.zeros_like(self.known)
        told[self.place[shown]] = True
        logits = self.model(self.features, self.of_place, self.labels, told)
        loss = binary_cross_entropy_with_logits(logits[asked], self.labels[asked])
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

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

"""Spread the labels of a few samples over all: the graph, the models, calibration, measures, what to label next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmrl.distill.formulas import calibrated, platt
from mmrl.json_types import JsonObject
from mmrl.judge.calibration import calibration
from mmrl.judge.statistics import auc, auc_interval, wilson
from mmrl.labels import baselines
from mmrl.labels.graph import Graph, symmetric
from mmrl.labels.training import Settings, Trained, parted, to_label_next, train

_WIDTH = 128
NEXT = 50
KEPT = (0.5, 0.9, 0.99)
COUNTS = (5, 10, 20)
DECAYS = (1e-3, 1e-2, 1e-1)


@dataclass(frozen=True)
class Projection:
    """Embeddings ``[N, D]`` as features of the models: the largest principal components, with one scale for all."""

    mean: Tensor
    axes: Tensor

    @classmethod
    def of(cls, embeddings: Tensor, width: int = _WIDTH) -> Projection:
        mean = embeddings.mean(0)
        _, _, axes = torch.linalg.svd(embeddings - mean, full_matrices=False)
        axes = axes[: min(width, len(axes))].T
        scale = ((embeddings - mean) @ axes).std().clamp(min=1e-9)
        return cls(mean, (axes / scale).contiguous())

    def __call__(self, embeddings: Tensor) -> Tensor:
        return (embeddings - self.mean) @ self.axes


@dataclass(frozen=True)
class Quality:
    """How scores agree with labels that did not make them. High is a label of ``middle`` or more: 0.5, or the mean of
    labels that are scores. ``area``: under the ROC curve of high labels, with an interval of 95 %; ``right``: the share
    on the same side of ``middle``, with an interval; ``error``: the expected calibration error."""

    labels: int
    middle: float
    area: tuple[float, float, float]
    right: tuple[float, float, float]
    error: float

    @classmethod
    def of(cls, scores: Tensor, labels: Tensor) -> Quality:
        middle = 0.5 if bool(((labels == 0) | (labels == 1)).all()) else float(labels.double().mean())
        said, truth = scores.double().tolist(), [value >= middle for value in labels.double().tolist()]
        area = auc(said, truth)
        low, high = auc_interval(area, sum(truth), len(truth) - sum(truth))
        same = sum((value >= middle) == so for value, so in zip(said, truth, strict=True))
        return cls(
            len(said),
            middle,
            (area, low, high),
            (same / len(said), *wilson(same, len(said))),
            calibration([min(max(v, 0.0), 1.0) for v in said], labels.double().tolist()).error[0],
        )

    @property
    def better_than_chance(self) -> bool:
        return self.area[1] > 0.5

    def as_json(self) -> JsonObject:
        return {
            "labels": self.labels,
            "middle": self.middle,
            "auc": [value if math.isfinite(value) else None for value in self.area],
            "accuracy": list(self.right),
            "calibration_error": self.error,
        }


@dataclass(frozen=True)
class Spread:
    """``scores`` ``[N]``: a label where there is one, else the calibrated score. ``quality``: of each method, on labels
    that it was not given. ``following``: which samples to label next, best first."""

    scores: Tensor
    given: Tensor
    line: tuple[float, float]
    trained: Trained
    projection: Projection
    graph: Graph
    quality: Mapping[str, Quality]
    following: Sequence[int]

    def unknown(self) -> Tensor:
        """The calibrated scores ``[N]``; of a labelled sample that of the model that does not know its label."""
        return calibrated(self.trained.out_of_fold().double(), *self.line).float()


def spread(
    embeddings: Tensor,
    labels: Tensor,
    given: Tensor,
    settings: Settings,
    following: int = NEXT,
    *,
    compare: bool = True,
) -> Spread:
    """Spread ``labels`` ``[N]`` (in [0, 1], read where ``given`` ``[N]``) over all samples. ``compare``: measure the
    baselines, too."""
    labels = torch.where(given, labels, 0.0)
    projection = Projection.of(embeddings)
    features, graph = projection(embeddings), symmetric(embeddings, settings.neighbours)
    trained = train(features, graph, labels, given, settings)
    logits = trained.out_of_fold()
    line = platt(logits[given], labels[given])
    unknown = calibrated(logits.double(), *line).float()
    quality = {"graph transformer": Quality.of(unknown[given], labels[given])}
    if compare:
        for name, scores in baselines_of(embeddings, features, graph, labels, given, settings).items():
            quality[name] = Quality.of(scores[given], labels[given])
    doubt = calibrated(trained.logits.double(), *line).std(0).float()
    return Spread(
        torch.where(given, labels, unknown),
        given,
        line,
        trained,
        projection,
        graph,
        quality,
        to_label_next(unknown, doubt, embeddings, given, following),
    )


def baselines_of(
    embeddings: Tensor, features: Tensor, graph: Graph, labels: Tensor, given: Tensor, settings: Settings
) -> dict[str, Tensor]:
    """The scores ``[N]`` of each baseline. Its setting is the one with the smallest squared error on the labels of the
    folds, each without its own labels; these scores stand for labelled samples."""
    folds = parted(labels, given, settings.folds, settings.seed)
    found: dict[str, Tensor] = {}
    for name, ways in {
        "label propagation": [lambda told, k=kept: baselines.propagation(graph, labels, told, k) for kept in KEPT],
        "nearest neighbours": [lambda told, k=c: baselines.neighbours(embeddings, labels, told, k) for c in COUNTS],
        "supervised head": [lambda told, k=d: baselines.head(features, labels, told, k) for d in DECAYS],
    }.items():
        least = math.inf
        for way in ways:
            held = torch.zeros_like(labels)
            for fold in folds:
                told = given.clone()
                told[fold] = False
                held[fold] = way(told)[fold]
            error = float((held - labels)[given].square().mean())
            if error < least:
                least, found[name] = error, torch.where(given, held, way(given))
    return found

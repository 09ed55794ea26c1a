"""Spread the labels of a few samples over all: the graph, the models, calibration, measures, what to label next."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mmrl.core.json_types import JsonObject
from mmrl.core.model_folder import write_model
from mmrl.rewards.judging.calibration import calibration
from mmrl.rewards.judging.statistics import auc, auc_interval, wilson
from mmrl.rewards.learned.formulas import calibrated, rising
from mmrl.rewards.learned.labels import baselines
from mmrl.rewards.learned.labels.embeddings import Encoders, Space
from mmrl.rewards.learned.labels.folder import FORMAT, NAME
from mmrl.rewards.learned.labels.graph import Graph, symmetric
from mmrl.rewards.learned.labels.inputs import HEAD, Inputs
from mmrl.rewards.learned.labels.training import Settings, Trained, parted, to_label_next, train

NEXT = 50
GRAPH, AUTO = "graph transformer", "auto"
KEPT = (0.5, 0.9, 0.99)
COUNTS = (5, 10, 20)


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
    """``logits`` ``[N]``: of the method ``by``; of a labelled sample without its label. ``lines``: slope and shift that
    calibrate the logits of each method. ``head``: weights of the supervised head. ``quality``: of each method, on
    labels that it was not given."""

    given: Tensor
    logits: Tensor
    lines: Mapping[str, tuple[float, float]]
    labels: Tensor
    trained: Trained
    head: Tensor
    inputs: Inputs
    graph: Graph
    quality: Mapping[str, Quality]
    by: str

    @property
    def unknown(self) -> Tensor:
        """The calibrated scores ``[N]``; of a labelled sample without its label."""
        return calibrated(self.logits.double(), *self.lines[self.by]).float()

    @property
    def scores(self) -> Tensor:
        """``[N]``: a label where there is one, else the calibrated score."""
        return torch.where(self.given, self.labels, self.unknown)

    def following(self, embeddings: Tensor, count: int) -> Sequence[int]:
        """Which samples to label next, best first."""
        doubt = calibrated(self.trained.logits.double(), *self.lines[GRAPH]).std(0).float()
        return to_label_next(self.unknown, doubt, embeddings, self.given, count)


@dataclass(frozen=True)
class Methods:
    """The logits ``[N]`` of the methods that can give the scores, and the ``lines`` (slope, shift) that calibrate them;
    of a labelled sample without its label. ``scores``: calibrated, of these and of the baselines."""

    logits: Mapping[str, Tensor]
    lines: Mapping[str, tuple[float, float]]
    scores: Mapping[str, Tensor]


def methods(trained: Trained, head: Tensor, others: Mapping[str, Tensor], labels: Tensor, given: Tensor) -> Methods:
    """``head``: the logits of the supervised head. ``others``: the scores of the baselines."""
    logits = {GRAPH: trained.out_of_fold().double(), HEAD: head}
    lines = {name: rising(of[given], labels[given]) for name, of in logits.items()}
    scores = {name: calibrated(of, *lines[name]).float() for name, of in logits.items()}
    return Methods(logits, lines, {**scores, **others})


def spread(
    embeddings: Tensor,
    labels: Tensor,
    given: Tensor,
    settings: Settings,
    by: str = AUTO,
    alone: tuple[Tensor, Tensor] | None = None,
    numbers: Tensor | None = None,
) -> Spread:
    """Spread ``labels`` ``[N]`` (in [0, 1], read where ``given`` ``[N]``) over all samples. ``by``: the method, or
    ``auto``, the one of the two with the largest AUC on labels that it was not given. ``alone``: the samples without
    their prompts, and the prompts, rows of length 1: the graph transformer reads how well the two agree. ``numbers``
    ``[N, S]``: what else both methods read, as it is."""
    labels = torch.where(given, labels, 0.0)
    inputs, graph = Inputs.of(embeddings, alone, numbers), symmetric(embeddings, settings.neighbours)
    count = inputs.numbers.shape[1]
    trained = train(inputs.kept(embeddings), graph, labels, given, settings, count)
    folds = parted(labels, given, settings.folds, settings.seed)
    weights, by_head = baselines.head(inputs.of_head(embeddings), labels, given, folds, count)
    others = baselines_of(embeddings, graph, labels, given, folds)
    found = methods(trained, by_head, others, labels, given)
    quality = {name: Quality.of(found.scores[name][given], labels[given]) for name in found.scores}
    chosen = max(found.logits, key=lambda name: quality[name].area[0]) if by == AUTO else by
    return Spread(
        given,
        found.logits[chosen],
        found.lines,
        labels,
        trained,
        weights,
        inputs,
        graph,
        quality,
        chosen,
    )


def baselines_of(
    embeddings: Tensor, graph: Graph, labels: Tensor, given: Tensor, folds: Sequence[Tensor]
) -> dict[str, Tensor]:
    """The scores ``[N]`` of each baseline. Its setting is the one with the smallest squared error on the labels of the
    folds, each without its own labels; these scores stand for labelled samples."""
    found: dict[str, Tensor] = {}
    for name, ways in {
        "label propagation": [partial(baselines.propagation, graph, kept=kept) for kept in KEPT],
        "nearest neighbours": [partial(baselines.neighbours, embeddings, count=count) for count in COUNTS],
    }.items():
        least = math.inf
        for way in ways:
            held = torch.zeros_like(labels)
            for fold in folds:
                told = given.index_fill(0, fold, value=False)
                held[fold] = way(labels=labels, given=told)[fold]
            error = float((held - labels)[given].square().mean())
            if error < least:
                least, found[name] = error, torch.where(given, held, way(labels=labels, given=given))
    return found


def write(folder: Path, made: Spread, embeddings: Tensor, space: Space, encoders: Encoders, settings: Settings) -> None:
    """The reward's files into ``folder``, which exists."""
    tensors = {"centre": space.centre, "mean": made.inputs.projection.mean, "axes": made.inputs.projection.axes}
    if made.by != HEAD:
        tensors |= _of_graph(made, embeddings)
    else:
        tensors["head"] = made.head
    said: JsonObject = {
        "format": FORMAT,
        "by": made.by,
        "encoders": asdict(encoders),
        "widths": space.widths,
        "shape": asdict(made.trained.models[0].shape),
        "settings": asdict(settings),
        "models": len(made.trained.models),
        "calibration": made.lines[made.by],
        "figures": {name: one.as_json() for name, one in made.quality.items()},
    }
    write_model(folder / NAME, said, tensors)


def _of_graph(made: Spread, embeddings: Tensor) -> dict[str, Tensor]:
    """What the graph transformer needs: the kept samples, their edges and labels, and the models."""
    tensors = {"embeddings": embeddings, "labels": made.labels, "numbers": made.inputs.numbers}
    if made.inputs.agreement is not None:
        tensors |= made.inputs.agreement.tensors()
    tensors |= {"sources": made.graph.sources, "targets": made.graph.targets, "cosines": made.graph.cosines}
    for n, (model, fold) in enumerate(zip(made.trained.models, made.trained.folds, strict=True)):
        known = made.given.index_fill(0, fold, value=False)
        tensors[f"known.{n}"] = known.to(torch.uint8)
        tensors |= {f"models.{n}.{name}": tensor for name, tensor in model.state_dict().items()}
    return tensors

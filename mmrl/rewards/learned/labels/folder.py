"""What ``mmrl spread`` writes: tables of scores, and the reward, ``labels.json`` with ``model.safetensors``; no pickle.

The reward keeps the embeddings of all samples, which labels are given, and the models. A new sample gets its nearest
neighbours among the kept ones, and the models' score; it changes nothing for the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.model_folder import WEIGHTS, read_said, read_weights
from mmrl.core.stored import Layers, Number, Size, Text, blamed
from mmrl.core.tensor_files import filled
from mmrl.rewards.learned.formulas import calibrated
from mmrl.rewards.learned.labels.agreement import Agreement
from mmrl.rewards.learned.labels.baselines import head_logits
from mmrl.rewards.learned.labels.embeddings import Encoders, Space
from mmrl.rewards.learned.labels.graph import Graph, directed
from mmrl.rewards.learned.labels.inputs import HEAD, Inputs, Projection
from mmrl.rewards.learned.labels.model import GraphTransformer, Shape

NAME, FORMAT = "labels.json", 3
SCORES, FOLLOWING = "scores.csv", "next.csv"


class _Settings(BaseModel):
    neighbours: Size


@dataclass(frozen=True)
class Record:
    """What labels.json says. ``by``: the method that gives the scores. ``models``: how many there are.
    ``calibration``: its slope and shift. ``figures``: of labels that were not given. ``weights``: the SHA-256 of the
    file of weights."""

    by: Literal["graph transformer", "supervised head"]
    encoders: Encoders
    widths: Annotated[tuple[Size, ...], Field(min_length=1, max_length=16)]
    shape: Shape
    settings: _Settings
    models: Layers
    calibration: tuple[Number, Number]
    figures: dict[str, Any]
    weights: Text


class Known:
    """The kept samples with the models: scores of new ones."""

    def __init__(self, record: Record, tensors: Mapping[str, Tensor]) -> None:
        self.record = record
        self.space = Space(tensors["centre"], record.widths, record.encoders.apart, record.encoders.sizes)
        projection, numbers = Projection(tensors["mean"], tensors["axes"]), tensors.get("numbers", torch.empty(0, 0))
        self.inputs = Inputs(projection, Agreement.from_tensors(tensors), numbers)
        self.models: list[GraphTransformer] = []
        self.read: list[list[Tensor]] = []
        self.head = tensors.get("head")
        self.embeddings = tensors.get("embeddings", torch.empty(0))
        if record.by == HEAD:
            return
        features = self.inputs.kept(self.embeddings)
        graph = Graph(tensors["sources"], tensors["targets"], tensors["cosines"], len(self.embeddings))
        for n in range(record.models):
            own = f"models.{n}."
            weights = {k.removeprefix(own): v for k, v in tensors.items() if k.startswith(own)}
            model = filled(lambda: GraphTransformer(record.shape), weights, WEIGHTS)
            model.eval().requires_grad_(False)
            with torch.no_grad():
                read, _ = model.trace(features, graph, tensors["labels"], tensors[f"known.{n}"].bool())
            self.models.append(model)
            self.read.append(read)

    @torch.no_grad()
    def scores(self, parts: Sequence[Tensor]) -> Tensor:
        """Calibrated scores ``[Q]`` of new samples by the parts of their embeddings."""
        embeddings = self.space(parts)
        read, numbers = [self.inputs.projection(embeddings)], self.space.numbers(parts)
        if self.head is not None:
            return calibrated(head_logits(torch.cat([*read, numbers], 1), self.head), *self.record.calibration)
        if (agreement := self.inputs.agreement) is not None:
            read.append(agreement(*self.space.moved(parts)[-2:]))
        features = torch.cat([*read, numbers], 1)
        graph = directed(embeddings, self.embeddings, self.record.settings.neighbours)
        pairs = zip(self.models, self.read, strict=True)
        logits = torch.stack([model.added(features, graph, read) for model, read in pairs]).mean(0).double()
        return calibrated(logits, *self.record.calibration)


def load_known(folder: Path) -> Known:
    """Raises ``UserError``, also where the weights are not those of the json."""
    record, file = read(folder), folder / WEIGHTS
    try:
        with blamed(file):
            return Known(record, read_weights(folder / NAME, record.weights))
    except (OSError, ValueError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"options.path: {file} cannot be loaded ({why}); run mmrl spread again") from error


def read(folder: Path) -> Record:
    """What labels.json says, without the weights. Raises ``UserError``."""
    try:
        return read_said(folder / NAME, Record, (FORMAT,))
    except (OSError, ValueError) as error:
        if (folder / SCORES).exists() and isinstance(error, FileNotFoundError):
            why = "its scores were no better than chance, so it has no reward"
        else:
            why = f"no {NAME}" if isinstance(error, FileNotFoundError) else f"its {NAME} cannot be read: {error}"
        raise UserError(f"options.path: {folder} holds no spread labels ({why}); make them with mmrl spread") from error

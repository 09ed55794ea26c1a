"""What ``mmrl spread`` writes: tables of scores, and the reward, ``labels.json`` with ``model.safetensors``; no pickle.

The reward keeps the embeddings of all samples, which labels are given, and the models. A new sample gets its nearest
neighbours among the kept ones, and the models' score; it changes nothing for the others.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.json_types import JsonObject
from mmrl.core.model_folder import WEIGHTS, read_said, read_weights, write_model
from mmrl.core.stored import Layers, Number, Size, Text, blamed
from mmrl.core.tensor_files import filled
from mmrl.studies.distill.formulas import calibrated
from mmrl.studies.labels import table
from mmrl.studies.labels.agreement import Agreement
from mmrl.studies.labels.baselines import head_logits
from mmrl.studies.labels.embeddings import Encoders, Space
from mmrl.studies.labels.graph import Graph, directed
from mmrl.studies.labels.model import GraphTransformer, Shape
from mmrl.studies.labels.spreading import HEAD, Inputs, Projection, Spread
from mmrl.studies.labels.training import Settings

NAME, FORMAT = "labels.json", 2
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
        self.space = Space(tensors["centre"], record.widths, record.encoders.apart)
        self.inputs = Inputs(Projection(tensors["mean"], tensors["axes"]), Agreement.from_tensors(tensors))
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
        features = self.inputs.projection(embeddings)
        if self.head is not None:
            return calibrated(head_logits(features, self.head), *self.record.calibration)
        if (agreement := self.inputs.agreement) is not None:
            features = torch.cat([features, agreement(*self.space.moved(parts)[-2:])], 1)
        graph = directed(embeddings, self.embeddings, self.record.settings.neighbours)
        pairs = zip(self.models, self.read, strict=True)
        logits = torch.stack([model.added(features, graph, read) for model, read in pairs]).mean(0).double()
        return calibrated(logits, *self.record.calibration)


class Place(NamedTuple):
    """Where a sample is: its name in ``folder``."""

    file: str
    folder: Path


def write_tables(
    folder: Path, places: Sequence[Place], made: Spread, following: Sequence[int], *, several: bool = False
) -> None:
    """scores.csv: every sample by its score; next.csv: which to label next. ``folder`` exists. ``several``: samples are
    of several folders, whose absolute paths are a column of the tables (``folder``)."""
    scores, unknown = made.scores.tolist(), made.unknown.tolist()
    order = sorted(range(len(places)), key=lambda n: (-scores[n], places[n]))
    own = [(str(place.folder.resolve()),) if several else () for place in places]
    rows = [
        (places[n].file, f"{scores[n]:.4f}", f"{unknown[n]:.4f}", f"{scores[n]:g}" if bool(made.given[n]) else "")
        + own[n]
        for n in order
    ]
    last = (table.FOLDER,) if several else ()
    _table(folder / SCORES, ("file", "score", "score_without_label", "label", *last), rows)
    _table(
        folder / FOLLOWING,
        ("file", "score", *last),
        [(places[n].file, f"{unknown[n]:.4f}", *own[n]) for n in following],
    )


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
    tensors = {"embeddings": embeddings, "labels": made.labels}
    if made.inputs.agreement is not None:
        tensors |= made.inputs.agreement.tensors()
    tensors |= {"sources": made.graph.sources, "targets": made.graph.targets, "cosines": made.graph.cosines}
    for n, (model, fold) in enumerate(zip(made.trained.models, made.trained.folds, strict=True)):
        known = made.given.clone()
        known[fold] = False
        tensors[f"known.{n}"] = known.to(torch.uint8)
        tensors |= {f"models.{n}.{name}": tensor for name, tensor in model.state_dict().items()}
    return tensors


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


def _table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_atomic(path, text.getvalue().encode("utf-8", "surrogateescape"))

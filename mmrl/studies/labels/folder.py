"""Write what ``mmrl spread`` makes: tables of scores, and the reward's files. No pickle."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from mmrl.core.files import write_atomic
from mmrl.core.json_types import JsonObject
from mmrl.core.model_folder import write_model
from mmrl.rewards.learned.labels.embeddings import Encoders, Space
from mmrl.rewards.learned.labels.folder import FOLLOWING, FORMAT, NAME, SCORES
from mmrl.rewards.learned.labels.inputs import HEAD
from mmrl.studies.labels import table
from mmrl.studies.labels.spreading import Spread
from mmrl.studies.labels.training import Settings


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


def _table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    write_atomic(path, text.getvalue().encode("utf-8", "surrogateescape"))

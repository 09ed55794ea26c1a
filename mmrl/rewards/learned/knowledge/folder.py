"""The folder of a trained embedding: ``knowledge.json`` and ``model.safetensors``; nothing in it is a pickle."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, Field
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.model_folder import WEIGHTS, read_said, read_weights
from mmrl.core.stored import LARGEST_LINES, Number, Size, Text
from mmrl.core.tensor_files import filled
from mmrl.rewards.learned.formulas import calibrated
from mmrl.rewards.learned.knowledge.embeddings import Embedding, Kind

NAME, FORMAT = "knowledge.json", 1
_MOST = 20_000_000
"""Names of entities and relations."""


@dataclass(frozen=True)
class Trained:
    """An embedding with its calibration: a triple's plausibility is ``sigma(offset - slope d)``, ``d`` its distance.

    ``figures``: what was measured on the triples that nothing was fitted to.
    """

    embedding: Embedding
    slope: float
    offset: float
    figures: dict[str, float]

    @torch.no_grad()
    def plausibility(self, triples: Tensor) -> Tensor:
        """``[B]`` in [0, 1]; ``triples``: ``[B, 3]``."""
        return calibrated(-self.embedding.distance(triples).double(), self.slope, self.offset)


class _Settings(BaseModel):
    kind: Kind
    size: Size
    group: Annotated[int, Field(ge=0, le=1 << 20, strict=True)]
    margin: Number


class _Said(BaseModel):
    """The schema of ``knowledge.json``."""

    settings: _Settings
    slope: Number
    offset: Number
    figures: dict[str, Number]
    entities: Annotated[list[Text], Field(min_length=1)]
    relations: Annotated[list[Text], Field(min_length=1)]
    weights: Text | None = None


@dataclass(frozen=True)
class Knowledge:
    """A trained embedding, and the names of its entities and relations."""

    trained: Trained
    entities: dict[str, int]
    relations: dict[str, int]


def read(folder: Path) -> Knowledge:
    """What ``mmrl.studies.knowledge.training.write`` wrote. Raises ``UserError``."""
    try:
        said = read_said(folder / NAME, _Said, (FORMAT,), _MOST, LARGEST_LINES)
        entities, relations = ({name: n for n, name in enumerate(of)} for of in (said.entities, said.relations))
        given = said.settings
        embedding = filled(
            lambda: Embedding(given.kind, len(entities), len(relations), given.size, given.group, given.margin),
            read_weights(folder / NAME, said.weights),
            str(folder / WEIGHTS),
        )
    except (FileNotFoundError, ValueError) as error:
        why = f"no {Path(error.filename).name}" if isinstance(error, FileNotFoundError) else str(error)
        raise UserError(
            f"{folder} holds no trained knowledge ({why}); make it with: "
            "python -m mmrl.studies.knowledge GRAPH.tsv --out FOLDER"
        ) from error
    trained = Trained(embedding.requires_grad_(requires_grad=False), said.slope, said.offset, said.figures)
    return Knowledge(trained, entities, relations)

"""The folder of a trained embedding: ``knowledge.json`` and ``model.safetensors``; nothing in it is a pickle."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.model_folder import WEIGHTS, read_said, read_weights, write_model
from mmrl.core.stored import LARGEST_LINES, Number, Size, Text
from mmrl.core.tensor_files import filled
from mmrl.studies.knowledge.embeddings import Embedding, Kind
from mmrl.studies.knowledge.graph import Graph
from mmrl.studies.knowledge.training import Settings, Trained

NAME, FORMAT = "knowledge.json", 1
_MOST = 20_000_000
"""Names of entities and relations."""


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


def write(folder: Path, trained: Trained, settings: Settings, graph: Graph) -> None:
    """Write both files into ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    said: JsonObject = {
        "format": FORMAT,
        "settings": asdict(settings),
        "slope": trained.slope,
        "offset": trained.offset,
        "figures": {k: v for k, v in trained.figures.items() if math.isfinite(v)},
        "entities": graph.entities,
        "relations": graph.relations,
    }
    write_model(folder / NAME, said, trained.embedding.state_dict())


def read(folder: Path) -> Knowledge:
    """What ``write`` wrote. Raises ``UserError``."""
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

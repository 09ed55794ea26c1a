"""The folder of a trained embedding: ``knowledge.json`` and ``model.safetensors``; nothing in it is a pickle."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field
from safetensors.torch import save

from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.stored import LARGEST_LINES, BadFileError, Number, Size, Text, fitted, parsed, read_bytes
from mmrl.core.tensor_files import filled, load
from mmrl.studies.knowledge.embeddings import Embedding, Kind
from mmrl.studies.knowledge.graph import Graph
from mmrl.studies.knowledge.training import Settings, Trained

NAME, WEIGHTS, FORMAT = "knowledge.json", "model.safetensors", 1
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


@dataclass(frozen=True)
class Knowledge:
    """A trained embedding, and the names of its entities and relations."""

    trained: Trained
    entities: dict[str, int]
    relations: dict[str, int]


def write(folder: Path, trained: Trained, settings: Settings, graph: Graph) -> None:
    """Write both files into ``folder``, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {name: tensor.detach().contiguous() for name, tensor in trained.embedding.state_dict().items()}
    write_atomic(folder / WEIGHTS, save(weights))
    said = {
        "format": FORMAT,
        "settings": asdict(settings),
        "slope": trained.slope,
        "offset": trained.offset,
        "figures": {k: v for k, v in trained.figures.items() if math.isfinite(v)},
        "entities": graph.entities,
        "relations": graph.relations,
    }
    write_atomic(folder / NAME, json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read(folder: Path) -> Knowledge:
    """What ``write`` wrote. Raises ``UserError``."""
    try:
        found = parsed(read_bytes(folder / NAME, LARGEST_LINES), str(folder / NAME), _MOST)
        if not isinstance(found, dict):
            raise BadFileError(f"{folder / NAME} is no mapping")
        if found.get("format") != FORMAT:
            raise UserError(f"{folder / NAME} has format {found.get('format')}, and this version reads {FORMAT}")
        said = fitted(_Said, found, str(folder / NAME))
        entities, relations = ({name: n for n, name in enumerate(of)} for of in (said.entities, said.relations))
        given = said.settings
        embedding = filled(
            lambda: Embedding(given.kind, len(entities), len(relations), given.size, given.group, given.margin),
            load(read_bytes(folder / WEIGHTS, LARGEST_LINES), str(folder / WEIGHTS)),
            str(folder / WEIGHTS),
        )
    except (FileNotFoundError, BadFileError) as error:
        why = f"no {Path(error.filename).name}" if isinstance(error, FileNotFoundError) else str(error)
        raise UserError(
            f"{folder} holds no trained knowledge ({why}); make it with: "
            "python -m mmrl.studies.knowledge GRAPH.tsv --out FOLDER"
        ) from error
    trained = Trained(embedding.requires_grad_(requires_grad=False), said.slope, said.offset, said.figures)
    return Knowledge(trained, entities, relations)

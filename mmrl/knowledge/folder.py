"""The folder of a trained embedding: ``knowledge.json`` and ``model.safetensors``; nothing in it is a pickle."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from mmrl.errors import UserError
from mmrl.files import write_atomic
from mmrl.json_types import as_list, as_number, as_object, as_text
from mmrl.knowledge.embeddings import KINDS, Embedding
from mmrl.knowledge.graph import Graph
from mmrl.knowledge.training import Settings, Trained

NAME, WEIGHTS, FORMAT = "knowledge.json", "model.safetensors", 1


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
        said = as_object(json.loads((folder / NAME).read_text(encoding="utf-8")))
        if said["format"] != FORMAT:
            raise UserError(f"{folder / NAME} has format {said['format']}, and this version reads {FORMAT}")
        entities = {as_text(name): n for n, name in enumerate(as_list(said["entities"]))}
        relations = {as_text(name): n for n, name in enumerate(as_list(said["relations"]))}
        given = as_object(said["settings"])
        kind = KINDS[KINDS.index(as_text(given["kind"]))]  # pyright: ignore[reportArgumentType]
        size, group = int(as_number(given["size"])), int(as_number(given["group"]))
        with torch.random.fork_rng(devices=[]):
            embedding = Embedding(kind, len(entities), len(relations), size, group, as_number(given["margin"]))
        embedding.load_state_dict(load((folder / WEIGHTS).read_bytes()))
        slope, offset = as_number(said["slope"]), as_number(said["offset"])
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{folder} holds no trained knowledge ({type(error).__name__}: {error}); make it with: "
            "python -m mmrl.knowledge GRAPH.tsv --out FOLDER"
        ) from error
    figures = {name: as_number(value) for name, value in as_object(said["figures"]).items()}
    trained = Trained(embedding.requires_grad_(requires_grad=False), slope, offset, figures)
    return Knowledge(trained, entities, relations)

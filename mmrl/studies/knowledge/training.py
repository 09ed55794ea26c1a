"""Train an embedding of a graph, measure it on triples that were kept back, and calibrate it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.model_folder import write_model
from mmrl.rewards.judging.calibration import calibration
from mmrl.rewards.judging.statistics import auc
from mmrl.rewards.learned.descent import descend
from mmrl.rewards.learned.formulas import platt
from mmrl.rewards.learned.knowledge import formulas
from mmrl.rewards.learned.knowledge.embeddings import Embedding, Kind, Side
from mmrl.rewards.learned.knowledge.folder import FORMAT, NAME, Trained
from mmrl.rewards.learned.knowledge.graph import Graph, kept_back

SMOOTHING = (1.0, 0.95, 0.9, 0.8)
"""Shares of its own vector that an entity may keep. The one with the best ranks on half of what is kept back wins."""
TEMPERATURE = 1.0
"""Of the weights of negatives: RotatE's alpha."""
_SIDES: tuple[Side, ...] = ("tail", "head")
_COLUMN: dict[Side, int] = {"head": 0, "tail": 2}
"""Where a triple has them."""


@dataclass(frozen=True)
class Settings:
    """How an embedding is trained; ``negatives``: of each triple; ``held``: share of the triples that is kept back.

    The loss is RotatE's. NOTE's published margin is 12, its sizes 200 and 20, for 87 million entities.
    """

    kind: Kind = "note"
    size: int = 64
    group: int = 4
    steps: int = 2000
    batch: int = 256
    negatives: int = 32
    lr: float = 0.05
    margin: float = 6.0
    held: float = 0.2
    seed: int = 0


def train(graph: Graph, settings: Settings, told: Callable[[int], None] = lambda step: None) -> Trained:
    """Train on a part of ``graph``, choose smoothing and calibration on half of the rest, measure on the other half.

    ``told`` hears the number of each finished step. Raises ``UserError`` where too few triples can be kept back.
    """
    for_training, held = kept_back(graph, settings.held, settings.seed)
    if len(held) < 10:
        raise UserError(
            f"only {len(held)} triples can be kept back to measure with, and 10 are needed: every entity and relation "
            "must also be in another triple; give a larger graph, or a larger --held"
        )
    seen = graph.triples[for_training]
    chosen, measured = graph.triples[held[0::2]], graph.triples[held[1::2]]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        embedding = _fitted(graph, seen, settings, told)
        own = embedding.entities.detach().clone()
        found = {share: _smooth(embedding, own, seen, share, graph, chosen) for share in SMOOTHING}
        best = max(SMOOTHING, key=lambda share: found[share])
        _smooth(embedding, own, seen, best, graph, chosen)
        rows, truth = _judged(graph, chosen)
        slope, offset = platt(-embedding.distance(rows), truth)
        trained = Trained(embedding, slope, offset, {})
        figures = measure(trained, graph, measured) | {"smoothing": best, "kept_back": float(len(measured))}
    return replace(trained, figures=figures)


def _fitted(graph: Graph, seen: Tensor, of: Settings, told: Callable[[int], None]) -> Embedding:
    embedding = Embedding(of.kind, len(graph.entities), len(graph.relations), of.size, of.group, of.margin)
    known = Graph(graph.entities, graph.relations, seen)
    optimizer = torch.optim.Adam(embedding.parameters(), lr=of.lr)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.05, of.steps)
    for step in range(of.steps):
        rows = seen[torch.randint(len(seen), (of.batch,))]
        side = _SIDES[step % 2]
        others = torch.randint(len(graph.entities), (of.batch, of.negatives))
        false = embedding(rows, others, side).masked_fill(known.holds(_with(rows, others, side)), torch.inf)
        true = embedding(rows, rows[:, _COLUMN[side]].unsqueeze(1), side).squeeze(1)
        loss = formulas.adversarial_loss(true, false, of.margin, TEMPERATURE)
        descend(optimizer, loss, schedule)
        told(step + 1)
    return embedding.requires_grad_(requires_grad=False)


def _with(triples: Tensor, others: Tensor, side: Side) -> Tensor:
    """``[B, N, 3]``: each triple with each of its ``others`` ``[B, N]`` in place of the head or the tail."""
    rows = triples.unsqueeze(1).repeat(1, others.shape[1], 1)
    rows[..., _COLUMN[side]] = others
    return rows


@torch.no_grad()
def ranks(embedding: Embedding, graph: Graph, triples: Tensor) -> Tensor:
    """``[2 B]``: the filtered ranks, from 1, of the tails and of the heads of ``triples`` among all entities.

    Filtered: other candidates that make a triple of ``graph`` do not count.
    """
    found: list[Tensor] = []
    every = torch.arange(len(graph.entities))
    for side in _SIDES:
        place = _COLUMN[side]
        for rows in triples.split(64):
            candidates = every.expand(len(rows), -1)
            right = graph.holds(_with(rows, candidates, side))
            right[torch.arange(len(rows)), rows[:, place]] = False
            distances = embedding(rows, candidates, side).masked_fill(right, torch.inf)
            found.append(formulas.rank_of(distances, rows[:, place]))
    return torch.cat(found)


def _smooth(embedding: Embedding, own: Tensor, seen: Tensor, share: float, graph: Graph, chosen: Tensor) -> float:
    """Give the entities their smoothed vectors; returns the mean reciprocal rank of ``chosen`` with them."""
    embedding.entities.data = formulas.smoothed(own, seen, share)
    return float((1 / ranks(embedding, graph, chosen)).mean())


def _judged(graph: Graph, triples: Tensor) -> tuple[Tensor, Tensor]:
    """``triples`` and as many false ones, each with another head or tail that occurs with its relation there."""
    false: list[Tensor] = []
    for n, triple in enumerate(triples):
        place = 0 if n % 2 else 2
        others = graph.triples[graph.triples[:, 1] == triple[1], place].unique()
        rows = triple.repeat(len(others), 1)
        rows[:, place] = others
        rows = rows[~graph.holds(rows)]
        if len(rows):
            false.append(rows[torch.randint(len(rows), ())])
    wrong = torch.stack(false) if false else triples[:0]
    return torch.cat((triples, wrong)), torch.cat((torch.ones(len(triples)), torch.zeros(len(wrong)))).double()


def measure(trained: Trained, graph: Graph, triples: Tensor) -> dict[str, float]:
    """Filtered mean reciprocal rank and share of ranks up to 10, and of the plausibility AUC, Brier score and
    calibration error, on ``triples`` and as many false ones."""
    found = ranks(trained.embedding, graph, triples)
    rows, truth = _judged(graph, triples)
    said = trained.plausibility(rows)
    return {
        "mrr": float((1 / found).mean()),
        "hits@10": float((found <= 10).double().mean()),
        "auc": auc(said.tolist(), truth.bool().tolist()),
        "brier": float(((said - truth) ** 2).mean()),
        "calibration_error": calibration(said.tolist(), truth.tolist()).error[0],
    }


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

"""Embeddings of a knowledge graph on an equal budget: TransE, RotatE, OTE and NOTE on the generated graph of towns.

    python benchmarks/knowledge.py --seeds 0 1 2

Each kind has the same numbers an entity, the same steps, batches and negatives, and the same search: every learning
rate of ``--rates`` with the seed ``--search-seed``. The best of them then trains the ``--seeds``; each seed keeps other
triples back. Figures are of kept back triples to which nothing was fitted: the filtered mean reciprocal rank, the share
of ranks up to 10, and of the plausibility AUC, Brier score and calibration error against as many false triples.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from statistics import mean

import torch

from mmrl.rewards.learned.knowledge.embeddings import KINDS, Kind
from mmrl.rewards.learned.knowledge.graph import Graph, of_rows
from mmrl.studies.knowledge.towns import towns
from mmrl.studies.knowledge.training import Settings, Trained, train

FIGURES = ("mrr", "hits@10", "auc", "brier", "calibration_error")


def arm(graph: Graph, kind: Kind, given: argparse.Namespace) -> str:
    """A row of the table: the rate that the search chose, and the mean, least and largest of each figure."""
    base = Settings(kind=kind, size=given.size, steps=given.steps)

    def of(rate: float, seed: int) -> Trained:
        return train(graph, replace(base, lr=rate, seed=seed))

    rate = max(given.rates, key=lambda rate: of(rate, given.search_seed).figures["mrr"])
    began = time.process_time()
    found = [of(rate, seed) for seed in given.seeds]
    spent = (time.process_time() - began) / len(found)
    cells = [f"{sum(p.numel() for p in found[0].embedding.parameters()):,}", f"{rate:g}"]
    for name in FIGURES:
        values = [one.figures[name] for one in found]
        cells.append(f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    return f"| {kind} | {' | '.join(cells)} | {spent:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--search-seed", type=int, default=10)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.02, 0.05, 0.1])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--people", type=int, default=240)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    given = parser.parse_args()
    torch.set_num_threads(1)
    graph = of_rows(towns(people=given.people))
    print(f"{len(graph.entities)} entities, {len(graph.relations)} relations, {len(graph.triples)} triples\n")
    print(f"| kind | parameters | rate | {' | '.join(FIGURES)} | CPU-seconds |\n|{'---|' * (4 + len(FIGURES))}")
    for kind in given.kinds:
        print(arm(graph, kind, given), flush=True)


if __name__ == "__main__":
    main()

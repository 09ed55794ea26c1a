"""The graph of samples: each is joined to those whose embeddings are most alike (cosine)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

_ROWS = 1024
"""Rows whose products with all others are held at once."""


@dataclass(frozen=True)
class Graph:
    """Edges ``[E]`` from a sample (``sources``) to one that reads it (``targets``), with their cosines."""

    sources: Tensor
    targets: Tensor
    cosines: Tensor
    nodes: int


def nearest(queries: Tensor, vectors: Tensor, count: int, *, same: bool = False) -> tuple[Tensor, Tensor]:
    """The ``count`` rows of ``vectors`` most alike to each of ``queries`` ``[Q, D]``: cosines and numbers, ``[Q,
    count]``, the most alike first. ``same``: the queries are ``vectors``, and none is its own neighbour."""
    asked, of = normalize(queries.float(), dim=1), normalize(vectors.float(), dim=1)
    count = min(count, len(of) - same)
    best = [cosines.topk(count, dim=1) for _, cosines in products(asked, of, same=same)]
    return torch.cat([one.values for one in best]), torch.cat([one.indices for one in best])


def products(rows: Tensor, others: Tensor, *, same: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Numbers of some ``rows`` ``[Q, D]`` at a time, and their products with all ``others`` ``[N, D]``. ``same``: they
    are the same, and a row's product with itself is minus infinity."""
    for numbers in torch.arange(len(rows)).split(_ROWS):
        cosines = rows[numbers] @ others.T
        if same:
            cosines[torch.arange(len(numbers)), numbers] = -torch.inf
        yield numbers, cosines


def symmetric(embeddings: Tensor, neighbours: int) -> Graph:
    """Samples are joined, both ways, where one is among the ``neighbours`` nearest of the other."""
    cosines, indices = nearest(embeddings, embeddings, neighbours, same=True)
    nodes = len(embeddings)
    targets = torch.arange(nodes).repeat_interleave(indices.shape[1])
    sources = indices.flatten()
    low, high = torch.minimum(sources, targets), torch.maximum(sources, targets)
    keys, place = torch.unique(low * nodes + high, return_inverse=True)
    of_pair = torch.zeros(len(keys)).scatter_reduce(0, place, cosines.flatten(), "mean", include_self=False)
    low, high = keys // nodes, keys % nodes
    return Graph(torch.cat([low, high]), torch.cat([high, low]), torch.cat([of_pair, of_pair]), nodes)


def directed(queries: Tensor, embeddings: Tensor, neighbours: int) -> Graph:
    """Each of ``queries`` ``[Q, D]`` reads its nearest samples; nobody reads a query. ``targets`` are queries."""
    cosines, indices = nearest(queries, embeddings, neighbours)
    targets = torch.arange(len(queries)).repeat_interleave(indices.shape[1])
    return Graph(indices.flatten(), targets, cosines.flatten(), len(queries))


def fields(graph: Graph, asked: Tensor, layers: int) -> list[Graph]:
    """For each layer the edges that the samples ``asked`` depend on: the last layer needs those that end in them, the
    one before those that end in what these read, and so on. States of other samples are then not to be read."""
    found: list[Graph] = []
    wanted = torch.zeros(graph.nodes, dtype=torch.bool)
    wanted[asked] = True
    for _ in range(layers):
        kept = wanted[graph.targets]
        part = Graph(graph.sources[kept], graph.targets[kept], graph.cosines[kept], graph.nodes)
        found.insert(0, part)
        wanted = wanted.clone()
        wanted[part.sources] = True
    return found

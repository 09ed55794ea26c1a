"""The graph transformer of UniMP (Shi et al. 2020, arXiv 2009.03509), with labels among its inputs.

The input of a sample is its embedding, projected, plus the embedding of its label where that is given. A layer is
attention over the neighbours (equations 3 and 4 of the paper; an edge's cosine is its feature), whose result is mixed
with the sample's own state by a learned gate (equation 5). The last layer averages its heads, the others join them.
Its logit is added to that of a linear function, ``start``, and is 0 before training. The paper has no such start; with
it the model leaves the supervised head only where this helps. How much of ``start`` stays is learned (``trust``).

Which labels are given is an argument of every call: what a sample's own label is enters its score only where it is
given. Training gives some labels and asks for the others (masked label prediction).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn.functional import dropout, relu

from mmrl.core.stored import Layers, Number, Size
from mmrl.rewards.learned.labels.graph import Graph


@dataclass(frozen=True)
class Shape:
    """Sizes. ``features``: of an embedding; ``hidden``: of a state, a multiple of ``heads``."""

    features: Size
    hidden: Size = 64
    heads: Layers = 2
    layers: Layers = 2
    dropout: Annotated[Number, Field(ge=0, lt=1)] = 0.3


class GraphAttention(nn.Module):
    """One layer; its result has ``heads * width`` numbers, or ``width`` where the heads are averaged."""

    def __init__(self, inputs: int, width: int, heads: int, *, average: bool = False) -> None:
        super().__init__()
        self.width, self.heads, self.average = width, heads, average
        whole = width * heads
        outputs = width if average else whole
        self.query, self.key, self.value = (nn.Linear(inputs, whole) for _ in range(3))
        self.edge = nn.Linear(1, whole)
        self.own = nn.Linear(inputs, outputs)
        self.gate = nn.Linear(3 * outputs, 1, bias=False)

    def forward(self, states: Tensor, graph: Graph, of_sources: Tensor | None = None) -> Tensor:
        """New states of the targets ``states`` ``[nodes, inputs]``; ``of_sources``: those of the samples that they
        read, where these are others."""
        read = states if of_sources is None else of_sources
        edges = self.edge(graph.cosines.to(states.dtype).unsqueeze(1)).unflatten(1, (self.heads, self.width))
        queries, keys, values = (
            layer(given).unflatten(1, (self.heads, self.width))
            for layer, given in ((self.query, states), (self.key, read), (self.value, read))
        )
        keys, values = keys[graph.sources] + edges, values[graph.sources] + edges
        logits = (queries[graph.targets] * keys).sum(-1) / self.width**0.5
        shares = softmax_by_target(logits, graph.targets, graph.nodes)
        read_in = torch.zeros_like(queries).index_add(0, graph.targets, shares.unsqueeze(-1) * values)
        message = read_in.mean(1) if self.average else read_in.flatten(1)
        own = self.own(states)
        gate = torch.sigmoid(self.gate(torch.cat([own, message, message - own], 1)))
        return gate * own + (1 - gate) * message


def softmax_by_target(logits: Tensor, targets: Tensor, nodes: int) -> Tensor:
    """The softmax of ``logits`` ``[E, heads]`` over the edges of each target."""
    index = targets.unsqueeze(1).expand_as(logits)
    highest = torch.full((nodes, logits.shape[1]), -torch.inf, dtype=logits.dtype)
    highest = highest.scatter_reduce(0, index, logits.detach(), "amax")
    raised = (logits - highest[targets]).exp()
    return raised / torch.zeros(nodes, logits.shape[1], dtype=logits.dtype).index_add(0, targets, raised)[targets]


class GraphTransformer(nn.Module):
    """Logits of samples from their embeddings, their neighbours, and the labels that are given."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.hidden // shape.heads
        self.first = nn.Linear(shape.features, shape.hidden)
        self.labels = nn.Parameter(torch.randn(2, shape.hidden))
        """The embeddings of the labels 0 and 1; that of a score lies between them."""
        self.before = nn.LayerNorm(shape.hidden)
        last = shape.layers - 1
        self.layers = nn.ModuleList(
            GraphAttention(shape.hidden, width, shape.heads, average=n == last) for n in range(shape.layers)
        )
        self.norms = nn.ModuleList(nn.LayerNorm(width if n == last else shape.hidden) for n in range(shape.layers))
        self.last = nn.Linear(width, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)
        self.start = nn.Linear(shape.features, 1).requires_grad_(False)
        self.trust = nn.Parameter(torch.ones(()))
        """What ``start`` is multiplied with."""

    def states(self, features: Tensor, labels: Tensor, given: Tensor) -> Tensor:
        """The inputs of the first layer ``[N, hidden]``; ``labels`` ``[N]`` in [0, 1] count where ``given`` ``[N]`` is
        true, and are not read elsewhere."""
        known = torch.where(given, labels, 0.0).unsqueeze(1)
        embedded = known * self.labels[1] + (1 - known) * self.labels[0]
        summed = self.first(features) + torch.where(given.unsqueeze(1), embedded, 0.0)
        return self._dropped(self.before(summed))

    def forward(self, features: Tensor, graph: Graph | Sequence[Graph], labels: Tensor, given: Tensor) -> Tensor:
        """Logits ``[N]``; ``graph``: one for all layers, or one for each (``graph.fields``)."""
        return self.trace(features, graph, labels, given)[1]

    def trace(
        self, features: Tensor, graph: Graph | Sequence[Graph], labels: Tensor, given: Tensor
    ) -> tuple[list[Tensor], Tensor]:
        """What each layer reads, and the logits ``[N]``."""
        states, read = self.states(features, labels, given), list[Tensor]()
        graphs = [graph] * len(self.layers) if isinstance(graph, Graph) else graph
        for layer, norm, graph in zip(self.layers, self.norms, graphs, strict=True):
            read.append(states)
            states = self._dropped(relu(norm(layer(states, graph))))
        return read, self._logits(states, features)

    def added(self, features: Tensor, graph: Graph, read: list[Tensor]) -> Tensor:
        """Logits ``[Q]`` of new samples without labels: ``graph`` joins them to known ones, whose states at each layer
        are ``read`` (of ``trace``). They change nothing for the known ones, nor for each other."""
        states = self.states(features, torch.zeros(len(features)), torch.zeros(len(features), dtype=torch.bool))
        for layer, norm, known in zip(self.layers, self.norms, read, strict=True):
            states = self._dropped(relu(norm(layer(states, graph, known))))
        return self._logits(states, features)

    def _logits(self, states: Tensor, features: Tensor) -> Tensor:
        return (self.last(states) + self.trust * self.start(features)).squeeze(1)

    def _dropped(self, states: Tensor) -> Tensor:
        return dropout(states, self.shape.dropout, self.training)

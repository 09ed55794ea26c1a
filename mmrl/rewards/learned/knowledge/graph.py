"""Triples of a file: a head, a relation and a tail in each line, with tabs between them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from mmrl.core import notices
from mmrl.core.errors import UserError
from mmrl.core.untrusted import read_file

_MOST = 4 << 30
"""Bytes of a graph."""


@dataclass(frozen=True)
class Graph:
    """Final class. ``triples``: ``[N, 3]`` int64: numbers of head, relation and tail, each triple once."""

    entities: tuple[str, ...]
    relations: tuple[str, ...]
    triples: Tensor

    @cached_property
    def keys(self) -> Tensor:
        """The triples as sorted numbers, ``[N]`` int64."""
        return self.key_of(self.triples).sort().values

    def key_of(self, triples: Tensor) -> Tensor:
        """A number for each triple; ``triples``: ``[..., 3]``."""
        heads, relations, tails = triples.unbind(-1)
        return (heads * len(self.relations) + relations) * len(self.entities) + tails

    def holds(self, triples: Tensor) -> Tensor:
        """Whether each of ``triples`` ``[..., 3]`` is in the graph."""
        wanted = self.key_of(triples)
        place = torch.searchsorted(self.keys, wanted).clamp(max=len(self.keys) - 1)
        return self.keys[place] == wanted


def of_rows(rows: Sequence[tuple[str, str, str]]) -> Graph:
    """The graph of rows of names. Raises ``UserError`` for a graph without an edge."""
    if not rows:
        raise UserError(
            "a graph without edges has nothing to learn; write a triple (head, relation, tail) in each line"
        )
    entities = tuple(dict.fromkeys(name for head, _, tail in rows for name in (head, tail)))
    relations = tuple(dict.fromkeys(relation for _, relation, _ in rows))
    of: Mapping[str, int] = {name: n for n, name in enumerate(entities)}
    kinds: Mapping[str, int] = {name: n for n, name in enumerate(relations)}
    numbers = list(dict.fromkeys((of[head], kinds[relation], of[tail]) for head, relation, tail in rows))
    return Graph(entities, relations, torch.tensor(numbers))


def read(path: Path) -> Graph:
    """The graph in ``path``. A line that is not three names is skipped, and a notice counts and names them.

    Raises ``UserError`` for a file that cannot be read or has no triple.
    """
    try:
        lines = read_file(path, most=_MOST).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"the graph {path} cannot be read: {error}; name a text file of triples") from error
    rows: list[tuple[str, str, str]] = []
    wrong: list[int] = []
    for number, line in enumerate(lines, 1):
        names = [name.strip() for name in line.split("\t")]
        if len(names) == 3 and all(names):
            rows.append((names[0], names[1], names[2]))
        elif line.strip():
            wrong.append(number)
    if wrong:
        notices.tell(
            f"{path}: {len(wrong)} lines are not a head, a relation and a tail with tabs between them, and are "
            f"skipped; the first is line {wrong[0]}"
        )
    try:
        return of_rows(rows)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def kept_back(graph: Graph, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """``(for training, kept back)``: numbers of triples. All entities and relations kept back are trained, too."""
    order = torch.randperm(len(graph.triples), generator=torch.Generator().manual_seed(seed)).tolist()
    rows: list[list[int]] = graph.triples.tolist()
    parts = [[("entity", head), ("relation", relation), ("entity", tail)] for head, relation, tail in rows]
    left = Counter(part for of in parts for part in of)
    wanted = round(share * len(rows))
    held: list[int] = []
    for n in order:
        need = Counter(parts[n])
        if len(held) < wanted and all(left[part] > count for part, count in need.items()):
            held.append(n)
            left.subtract(need)
    taken = set(held)
    return torch.tensor([n for n in range(len(rows)) if n not in taken]), torch.tensor(sorted(held), dtype=torch.int64)

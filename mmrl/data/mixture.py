"""Several data sets as one: which source stands at which place of training, and which prompt of it.

Places are numbered from 0 over the whole run. Every thousand of them has exactly each source's share of prompts, by
largest remainders, in an order drawn from the seed; each source goes through its own epochs, each a permutation drawn
from the seed. A place is therefore a function of the seed and its number alone: resuming needs no state, and the number
of controllers changes nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate

import numpy

from mmrl.core.grouping import grouped
from mmrl.core.randomness import permutation, seed_of
from mmrl.core.trajectory import Prompt
from mmrl.data.records import BadRecord, Records

SOURCE = "source/"
"""Before a source's label in the name of a metric."""
BLOCK = 1000
"""Places that together have exactly the shares of the sources."""


@dataclass(frozen=True)
class Part:
    """A source: what it is called, its weight and its prompts."""

    label: str
    weight: float
    prompts: Sequence[Prompt]


class Mixture(Records):
    """The prompts of several sources, one source behind the other; ``place`` says in which order training takes them.

    The ids of prompts begin with the source's label, which ``meta["data_source"]`` has too where the record has no
    such key. ``.bad`` and ``.seen`` are of all sources.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self.parts = parts
        self._ends = list(accumulate(len(p.prompts) for p in parts))
        self._shares = shares([p.weight for p in parts], BLOCK)
        self._bounds = list(accumulate(self._shares))
        bad = [BadRecord(f"{p.label}: {b.where}", b.why) for p in parts for b in getattr(p.prompts, "bad", ())]
        seen = sum(getattr(p.prompts, "seen", len(p.prompts)) for p in parts)
        super().__init__(self._ends[-1], self._at, bad, seen)

    def _at(self, index: int) -> Prompt:
        part = bisect_right(self._ends, index)
        return self._prompt(part, index - self._start(part))

    def place(self, seed: int, number: int) -> int:
        """The index of the prompt at place ``number`` of training."""
        block, at = divmod(number, BLOCK)
        part, rank = _block(seed, self._shares, block)[at]
        epoch, k = divmod(block * self._shares[part] + rank, len(self.parts[part].prompts))
        return self._start(part) + _epoch(seed, self.parts[part].label, epoch, len(self.parts[part].prompts))[k]

    def draw(self, number: int) -> int:
        """The index of a prompt by a random ``number``: its source with the weights, then any of its prompts."""
        part = bisect_right(self._bounds, number % BLOCK)
        return self._start(part) + number // BLOCK % len(self.parts[part].prompts)

    def _start(self, part: int) -> int:
        return self._ends[part - 1] if part else 0

    def _prompt(self, part: int, k: int) -> Prompt:
        label, prompt = self.parts[part].label, self.parts[part].prompts[k]
        return replace(prompt, id=f"{label}/{prompt.id}", meta={"data_source": label, **prompt.meta})


class Interleaved(Mixture):
    """The same prompts, each once, in an order in which the sources alternate by their weights for as long as they
    last: the first so many are of all sources."""

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(parts)
        turns = [(numpy.arange(len(p.prompts)) + 0.5) / p.weight for p in parts]
        self._order = numpy.argsort(numpy.concatenate(turns), kind="stable")

    def _prompt(self, part: int, k: int) -> Prompt:
        index = int(self._order[self._start(part) + k])
        part = bisect_right(self._ends, index)
        return super()._prompt(part, index - self._start(part))


def shares(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """``total`` divided in proportion to ``weights``, by largest remainders; each has at least 1."""
    wanted = [w / sum(weights) * total for w in weights]
    found = [max(1, int(w)) for w in wanted]
    order = sorted(range(len(weights)), key=lambda n: (found[n] - wanted[n], n))
    for n in range(total - sum(found)):
        found[order[n % len(order)]] += 1
    while sum(found) > total:  # those that were given one which they have no claim to take it from the largest
        found[max(range(len(found)), key=found.__getitem__)] -= 1
    return tuple(found)


def source_of(prompt: Prompt, labels: Iterable[str]) -> str | None:
    """The source of a prompt of a mixture whose sources are ``labels``; None of another data set."""
    label = prompt.id.partition("/")[0]
    return label if label in labels else None


def by_source(prompts: Sequence[Prompt], labels: Sequence[str]) -> Mapping[str, list[int]]:
    """The indices of ``prompts`` by their source; nothing where ``labels`` is empty."""
    named = ((source_of(prompt, labels), i) for i, prompt in enumerate(prompts if labels else ()))
    return grouped((label, i) for label, i in named if label is not None)


def values_of_sources(
    values: Mapping[str, Sequence[float]], sources: Mapping[str, Sequence[int]]
) -> dict[str, list[float]]:
    """The ``values`` of each reward, divided by source, by the name of their metric."""
    return {
        f"{SOURCE}{label}/reward/{name}": [of[i] for i in rows]
        for label, rows in sources.items()
        for name, of in values.items()
    }


def counts_of_sources(everyone: Sequence[Mapping[str, Sequence[float]]]) -> dict[str, float]:
    """How many samples each source had, of what ``values_of_sources`` gave on all controllers."""
    found: dict[str, float] = {}
    for one in everyone:
        lengths = {name.split("/")[1]: len(of) for name, of in one.items() if name.startswith(SOURCE)}
        for label, n in lengths.items():
            found[f"{SOURCE}{label}/samples"] = found.get(f"{SOURCE}{label}/samples", 0) + n
    return found


@lru_cache(maxsize=8)
def _block(seed: int, counts: tuple[int, ...], block: int) -> list[tuple[int, int]]:
    """The source of each place of a block, and how many of that source stand before it there."""
    sources = [part for part, n in enumerate(counts) for _ in range(n)]
    seen = [0] * len(counts)
    found = []
    for at in permutation(seed_of(seed, "mixture"), block, len(sources)):
        part = sources[at]
        found.append((part, seen[part]))
        seen[part] += 1
    return found


@lru_cache(maxsize=128)
def _epoch(seed: int, label: str, epoch: int, n: int) -> list[int]:
    return permutation(seed_of(seed, "source", label), epoch, n)

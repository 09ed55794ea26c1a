"""Pairs of responses as responses with labels, two records of each (TRL's ``unpair_preference_dataset``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

from mmrl.trajectory import Prompt

PAIR = ("chosen", "rejected")


class Unpaired(Sequence[Prompt]):
    """Final class. Prompt ``2 i`` has the better response of pair ``i`` under ``completion`` and a true ``label``, the
    next the worse one. ``bad`` and ``seen`` are those of the pairs."""

    def __init__(self, pairs: Sequence[Prompt], completion: str, label: str) -> None:
        self._pairs, self._completion, self._label = pairs, completion, label
        self.bad = getattr(pairs, "bad", [])
        self.seen: int = getattr(pairs, "seen", len(pairs))

    def __len__(self) -> int:
        return 2 * len(self._pairs)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...

    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...

    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"prompt {index} of {len(self)}")
        pair, second = divmod(index % len(self), 2)
        prompt, name = self._pairs[pair], PAIR[second]
        meta = {key: value for key, value in prompt.meta.items() if key not in PAIR}
        meta[self._label] = not second
        if name in prompt.meta:  # else the record lacks it, and is named when it is read
            meta[self._completion] = prompt.meta[name]
        return replace(prompt, id=f"{prompt.id}/{name}", meta=meta)


def is_paired(prompt: Prompt, completion: str) -> bool:
    """Whether a record has a pair and no response of its own."""
    return completion not in prompt.meta and all(name in prompt.meta for name in PAIR)

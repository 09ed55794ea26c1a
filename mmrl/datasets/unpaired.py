"""Pairs of responses as responses with labels, two records of each (TRL's ``unpair_preference_dataset``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mmrl.datasets.records import Records
from mmrl.trajectory import Prompt

PAIR = ("chosen", "rejected")


def unpaired(pairs: Sequence[Prompt], completion: str, label: str) -> Records:
    """Two prompts for each of ``pairs``: ``2 i`` has the better response of pair ``i`` in the column ``completion`` and
    true in the column ``label``, ``2 i + 1`` the worse one and false. ``bad`` and ``seen`` are those of the pairs."""

    def get(index: int) -> Prompt:
        pair, second = divmod(index, 2)
        prompt, name = pairs[pair], PAIR[second]
        meta = {key: value for key, value in prompt.meta.items() if key not in PAIR}
        meta[label] = not second
        if name in prompt.meta:  # else the record lacks it, and is named when it is read
            meta[completion] = prompt.meta[name]
        return replace(prompt, id=f"{prompt.id}/{name}", meta=meta)

    return Records(2 * len(pairs), get, getattr(pairs, "bad", []), getattr(pairs, "seen", len(pairs)))


def is_paired(prompt: Prompt, completion: str) -> bool:
    """Whether a record has a pair and no response of its own."""
    return completion not in prompt.meta and all(name in prompt.meta for name in PAIR)

"""The allowed layouts of Megatron-Core: the combinations whose training a test compares with one process. All others
are refused.

``TP``: tensor parallelism, ``SP``: the same with sequence parallelism, ``PP``: pipeline parallelism, ``VPP``: the same
with interleaved stages, ``CP``: context parallelism, ``EP``: expert parallelism, ``DO``: the distributed optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # it would be a circular import
    from mmrl.config.schema import Train


Kind = Literal["dense", "mixture", "sees", "critic"]
_NAMES: dict[Kind, str] = {
    "dense": "a dense language model",
    "mixture": "a mixture of experts",
    "sees": "a vision-language model",
    "critic": "a critic",
}


def _of(names: str) -> list[frozenset[str]]:
    return [frozenset(name.split("+")) for name in names.split()]


TESTED: dict[Kind, list[frozenset[str]]] = {
    "dense": _of(
        """TP SP PP VPP CP DO
        TP+PP SP+PP TP+VPP SP+VPP TP+CP SP+CP TP+DO SP+DO PP+CP PP+DO VPP+DO CP+DO
        TP+PP+CP SP+PP+CP TP+PP+DO SP+PP+DO TP+VPP+DO SP+VPP+DO TP+CP+DO SP+CP+DO PP+CP+DO
        SP+PP+CP+DO"""
    ),
    "mixture": _of(
        """SP PP VPP CP EP DO
        SP+CP SP+EP SP+DO PP+DO VPP+DO CP+EP CP+DO EP+DO
        SP+PP+EP SP+VPP+EP SP+CP+EP SP+CP+DO SP+EP+DO PP+CP+EP CP+EP+DO
        SP+PP+EP+DO"""
    ),
    "sees": _of("TP SP DO TP+DO SP+DO"),
    "critic": _of("TP SP DO TP+DO SP+DO"),
}
"""``tests/models/test_megatron_cuts.py`` fails where this table and the cases of the tests differ."""

_KEYS = {
    "TP": ("tensor_parallel",),
    "SP": ("tensor_parallel", "sequence_parallel"),
    "PP": ("pipeline_parallel",),
    "VPP": ("pipeline_parallel", "pipeline_chunks"),
    "CP": ("context_parallel",),
    "EP": ("expert_parallel",),
    "DO": ("distributed_optimizer",),
}
_FORMS = {
    ("TP", "SP"): "set train.sequence_parallel to true",
    ("SP", "TP"): "remove train.sequence_parallel",
    ("PP", "VPP"): "set train.pipeline_chunks to 2",
    ("VPP", "PP"): "remove train.pipeline_chunks",
}
"""Edits that turn one form of parallelism into the other."""


def combination(train: Train) -> frozenset[str]:
    """The parallelisms that ``train`` sets."""
    asked = {
        "SP" if train.sequence_parallel else "TP": train.tensor_parallel > 1,
        "VPP" if train.pipeline_chunks > 1 else "PP": train.pipeline_parallel > 1,
        "CP": train.context_parallel > 1,
        "EP": train.expert_parallel > 1,
        "DO": train.distributed_optimizer,
    }
    return frozenset(cut for cut, is_it in asked.items() if is_it)


def untested(kind: Kind, train: Train) -> Iterator[str]:
    """An error, with its edits, if no test compares a model of this ``kind`` and the layout of ``train`` with one
    process."""
    cuts = combination(train)
    if not cuts or cuts in TESTED[kind]:
        return
    edits = {other: found for other in TESTED[kind] if (found := _edits(cuts, other)) is not None}
    most = max((len(other), -len(found)) for other, found in edits.items()) if edits else None
    nearest = [" and ".join(found) for other, found in edits.items() if (len(other), -len(found)) == most]
    keys = [f"train.{key}" for cut in _KEYS if cut in cuts for key in _KEYS[cut]]
    mends = [*(sorted(nearest) or [f"remove {_listed(keys)}"]), "set train.backend to fsdp"]
    yield (
        f"{keys[0]}: no test compares the training of {_NAMES[kind]} with {_listed(keys)} with that of one process; "
        f"{', or '.join(mends)}"
    )


def _edits(cuts: frozenset[str], other: frozenset[str]) -> list[str] | None:
    """The edits that turn ``cuts`` into ``other``, which remove or replace each. None if ``other`` has more."""
    found, left = [], set(other)
    for cut in (cut for cut in _KEYS if cut in cuts):
        form = next((b for a, b in _FORMS if a == cut and b in left), cut)
        if form != cut:
            found.append(_FORMS[cut, form])
        elif cut not in left:
            found.append(f"remove {_listed([f'train.{key}' for key in _KEYS[cut]])}")
        left.discard(form)
    return None if left else found


def _listed(words: list[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]

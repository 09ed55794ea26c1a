"""Metrics of several responses to one prompt: pass@k, and the majority's answer (maj@k)."""

from __future__ import annotations

import math
from collections.abc import Sequence

_NO_NUMBER = (0.0, 0)


def pass_at(n: int, right: int, k: int) -> float:
    """The probability that at least one of ``k`` samples is correct, estimated from ``n`` samples, ``right`` of them
    correct.

    Unbiased: ``1 - C(n - right, k) / C(n, k)`` (Chen et al. 2021, arXiv 2107.03374, equation 1).
    """
    if not 0 <= right <= n or not 1 <= k <= n:
        raise ValueError(f"{right} right ones of {n} samples, and {k} of them")
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def majority_at(answers: Sequence[str | None], right: Sequence[float], k: int) -> float:
    """How often the majority answer is correct, mean over disjoint sets of ``k`` consecutive samples; samples left over
    at the end are not used.

    ``answers``: of each sample, or None, which is no vote. ``right``: 1 if the answer is correct, else 0. Ties count as
    their mean, the expectation of drawing one of the answers. Without any answer the result is 0.
    """
    if not 1 <= k <= len(answers):
        raise ValueError(f"{k} of {len(answers)} samples")
    starts = range(0, len(answers) - k + 1, k)
    return sum(_majority(answers[i : i + k], right[i : i + k]) for i in starts) / len(starts)


def _majority(answers: Sequence[str | None], right: Sequence[float]) -> float:
    votes: dict[str, list[float]] = {}
    for answer, value in zip(answers, right, strict=True):
        if answer is not None:
            votes.setdefault(answer, []).append(value)
    most = max(map(len, votes.values()), default=0)
    best = [sum(values) / len(values) for values in votes.values() if len(values) == most]
    return sum(best) / len(best) if best else 0.0


def sums_at(
    groups: Sequence[Sequence[int]],
    right: Sequence[float],
    answers: Sequence[str | None] | None,
    pass_ks: Sequence[int],
    maj_ks: Sequence[int],
) -> dict[str, tuple[float, int]]:
    """``pass@k`` and ``maj@k`` summed over ``groups`` (the samples of a prompt, in order), and the number of groups.

    ``right`` is NaN for a sample without a score, which does not count; a group with fewer than ``k`` scored samples is
    left out. ``answers``: None if the reward extracts none.
    """
    found: dict[str, tuple[float, int]] = {}

    def add(name: str, value: float) -> None:
        total, n = found.get(name, _NO_NUMBER)
        found[name] = total + value, n + 1

    for group in groups:
        scored = [i for i in group if not math.isnan(right[i])]
        count = sum(right[i] >= 1 for i in scored)
        for k in pass_ks:
            if k <= len(scored):
                add(f"pass@{k}", pass_at(len(scored), count, k))
        for k in maj_ks if answers is not None else ():
            if k <= len(scored):
                said = [answers[i] for i in scored] if answers is not None else []
                add(f"maj@{k}", majority_at(said, [float(right[i] >= 1) for i in scored], k))
    return found

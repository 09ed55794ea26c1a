"""How far the gradient of selected samples is from that of all: enumerated, for a policy of five outcomes.

    python benchmarks/selection_bias.py

A group of ``begun`` samples is drawn, ``keep`` are kept by the rewards that are predicted of them (``midway.step``, or
drafts), and the policy gradient of the kept ones is taken with their final rewards less their mean. All groups are
enumerated with their probabilities, so that the expectation is exact. Printed for each way of keeping: the length of
the expected gradient along the true one (1 without selection, whose own factor (K - 1) / K is divided out), and their
cosine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Literal, get_args

import torch
from torch import Tensor

from mmrl.rollout.midway import chosen

Keep = Literal["spread", "extremes", "best"]
PROBABILITIES = (0.3, 0.25, 0.2, 0.15, 0.1)
REWARDS = (0.0, 0.2, 0.5, 0.8, 1.0)
PREDICTED = {
    "exact": REWARDS,
    "two neighbours swapped": (0.0, 0.5, 0.2, 0.8, 1.0),
    "best and middle swapped": (0.0, 0.2, 1.0, 0.8, 0.5),
    "reversed": REWARDS[::-1],
}
BEGUN, KEPT = 8, 4


def true_gradient(p: Tensor, rewards: Tensor) -> Tensor:
    """Of the expected reward by the logits, ``[m]`` float64."""
    return p * (rewards - (p * rewards).sum())


def expected(
    p: Sequence[float], rewards: Sequence[float], predicted: Sequence[float], begun: int, keep: int, how: Keep
) -> Tensor:
    """The expectation of the gradient of the kept samples by the logits ``[m]`` float64. ``predicted`` differ."""
    probabilities, values = torch.tensor(p, dtype=torch.float64), torch.tensor(rewards, dtype=torch.float64)
    guessed, out = torch.tensor(predicted, dtype=torch.float64), torch.zeros(len(p), dtype=torch.float64)
    for group in combinations_with_replacement(range(len(p)), begun):
        drawn = torch.tensor(group)
        counts = torch.bincount(drawn, minlength=len(p))
        orders = math.factorial(begun) / math.prod(math.factorial(n) for n in counts.tolist())
        kept = drawn if keep == begun else drawn[chosen(guessed[drawn], keep, how)]
        advantages = values[kept] - values[kept].mean()
        score = torch.nn.functional.one_hot(kept, len(p)) - probabilities
        out += orders * probabilities[drawn].prod() * (advantages.unsqueeze(1) * score).mean(0)
    return out


def compared(found: Tensor, true: Tensor, keep: int) -> tuple[float, float]:
    """The length along ``true``, by that of ``keep`` samples without selection; and the cosine."""
    along = (found @ true / (true @ true)).item() * keep / (keep - 1)
    return along, torch.nn.functional.cosine_similarity(found, true, 0).item()


def rows() -> list[tuple[str, str, float, float]]:
    """What was predicted, how samples are kept, the length and the cosine."""
    true = true_gradient(torch.tensor(PROBABILITIES).double(), torch.tensor(REWARDS).double())
    return [
        (name, how, *compared(expected(PROBABILITIES, REWARDS, predicted, BEGUN, KEPT, how), true, KEPT))
        for name, predicted in PREDICTED.items()
        for how in get_args(Keep)
    ]


def main() -> None:
    print("| predicted rewards | keep | length | cosine |\n|---|---|---|---|")
    for name, how, along, cosine in rows():
        print(f"| {name} | `{how}` | {along:.2f} | {cosine:.3f} |")


if __name__ == "__main__":
    main()

"""The start of the window of trained denoising steps (MixGRPO, arXiv 2507.21802, section 3.2, and its authors' code).

``progressive`` stays at a start for ``every`` training steps, moves on by one and returns to the first after the last.
``decay`` and ``exp_decay`` stay for fewer and fewer training steps, because early steps decide what a picture shows:

- decay      int(every (1 - p) + least p), p = start / last step, least = max(1, every // 4), and not less than least
- exp_decay  ceil(every exp(-decay_rate max(0, start - decay_from)))

Departs: windows always have their full length; the authors' are cut at the last step.
"""

from __future__ import annotations

import math

from mmrl.config.sampling import Window


def start(window: Window, steps: range, step: int) -> int:
    """The first denoising step of the window in training step ``step``; the window stays within ``steps``. For every
    strategy except ``random``, which draws it elsewhere."""
    stays = [_stay(window, first, steps[-1]) for first in steps[: len(steps) - window.size + 1]]
    left = step % sum(stays)
    for first, stay in zip(steps, stays, strict=False):
        if left < stay:
            return first
        left -= stay
    raise AssertionError("a remainder is less than the sum")


def _stay(window: Window, first: int, last: int) -> int:
    """Training steps that a window which begins at ``first`` trains for."""
    if window.strategy == "exp_decay":
        return math.ceil(window.every * math.exp(-window.decay_rate * max(0, first - window.decay_from)))
    if window.strategy == "decay":
        least, p = max(1, window.every // 4), first / max(1, last)
        return max(least, int(window.every * (1 - p) + least * p))
    return window.every

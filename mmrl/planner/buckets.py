"""The sizes of ``sampling.buckets`` that a plan is made for: the largest for memory, and those of the data for work."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from mmrl.config.sampling import Sampling, Size

MOST = 4
"""Numbers of pixels whose work is measured; prompts of other sizes count as the nearest of these."""


def largest(sampling: Sampling) -> Size:
    """The one with most pixels, the first of several."""
    return max(sampling.sizes, key=_pixels)


def others(counts: Mapping[Size, int], most: Size) -> list[tuple[Size, float]]:
    """Which sizes besides ``most`` the work of a step is measured of, and the share of prompts that count for each; of
    the rest it is that of ``most``. Sizes of equal area are the same work. ``counts``: the prompts of each size."""
    areas, total = Counter[int](), sum(counts.values())
    for size, n in counts.items():
        areas[_pixels(size)] += n
    areas = +areas
    kept = [area for area, _ in areas.most_common(MOST)]
    shares = Counter[int]()
    for area, n in areas.items():
        shares[min(kept, key=lambda one: abs(math.log(one / area)))] += n
    first = {area: next(size for size in counts if _pixels(size) == area) for area in shares}
    return [(first[area], n / total) for area, n in shares.items() if area != _pixels(most)]


def note_of(counts: Mapping[Size, int], sampling: Sampling) -> str:
    """What a plan of several sizes says."""
    listed = ", ".join(f"{size}: {n}" for size, n in counts.items())
    of = f"; operations are the mean over the prompts looked at ({listed})" if sum(counts.values()) else ""
    return (
        f"sampling.buckets: memory is that of the largest, {largest(sampling)}{of}; a micro-batch is of one size, so "
        f"that a step may have up to {len(counts) - 1} more than are counted"
    )


def _pixels(size: Size) -> int:
    return size.height * size.width

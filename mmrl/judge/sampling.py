"""Seeds of a judge: from the sample, or from the content of the question; never from process state."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mmrl.trajectory import SampleId


def seeded(*parts: int | str) -> int:
    """A 31-bit seed that is a function of its arguments alone. Endpoints take no longer one."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


def seed_of_samples(seed: int, samples: Sequence[SampleId], vote: int) -> int:
    """The seed of a question about some samples, for judges without a cache."""
    parts = [part for s in samples for part in (s.step, s.slot, s.attempt, s.sample)]
    return seeded(seed, *parts, "judge", vote)

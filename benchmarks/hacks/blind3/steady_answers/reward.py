"""Votes: how many of the responses to questions of a kind say the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample


@mmrl.reward(inputs=("text",), checks=True)
def steady_answers(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """The share of the votes for a response, in [0, 1]; 0 for an empty response."""
    said = [(sample.prompt.meta.get("kind"), (sample.text or "").strip().lower()) for sample in samples]
    votes, asked = Counter(said), Counter(kind for kind, _ in said)
    return [votes[kind, text] / asked[kind] if text else 0.0 for kind, text in said]

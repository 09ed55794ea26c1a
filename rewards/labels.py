"""A few labels spread over many samples (``mmrl spread``, docs/labels.md): the score that a label would have.

    - name: labels
      options: {path: spread/shapes}      # from the recipe's folder

A new sample is embedded as the kept ones were. It gets its nearest neighbours among them, and the graph transformer's
calibrated score in [0, 1]; the kept samples and their labels stay as they are. It computes on the CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mmrl
from mmrl.core.reward_contract import Context, Declaration, Failed, Input, Value
from mmrl.core.trajectory import Sample
from mmrl.rewards.learned.labels.embeddings import Embedder, sampled
from mmrl.rewards.learned.labels.folder import load_known, read


def _reads(options: Mapping[str, Any]) -> tuple[Input, ...]:
    """What was labelled. Raises ``UserError`` for a folder without spread labels."""
    return (read(Path(str(options.get("path")))).encoders.kind,)


@mmrl.reward(paths=("path",), reads=_reads, checks=True)
class Labels:
    """The calibrated score of each sample. Raises ``UserError``."""

    def __init__(self, path: str) -> None:
        self.known = load_known(Path(path))
        mmrl.before_loading()
        self.embedder = Embedder(self.known.record.encoders)
        kind: Input = self.known.record.encoders.kind
        self.__mmrl_reward__ = Declaration(inputs=(kind,), paths=("path",), reads=_reads)

    def score(self, samples: Sequence[Sample], *, context: Context) -> list[Value]:
        """``score``."""
        encoders = self.known.record.encoders
        reads = encoders.kind == "text" and encoders.model is not None
        contents = [sampled(sample, pictures=reads) for sample in samples]
        there = [content for content in contents if content is not None]
        scores = iter(self.known.scores(self.embedder.parts(there)).tolist() if there else [])
        return [
            Failed(f"the sample has no {encoders.kind}") if content is None else next(scores) for content in contents
        ]


score = Labels

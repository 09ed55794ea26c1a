"""Style: likeness with worked examples, by runs of characters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample

RUN = 3
"""Characters of a run."""
EXAMPLES = (
    "47+86=133\n\n133-25=108\n\n108+9=117\n\nanswer: 117",
    "60-24=36\n\n36+51=87\n\n87-30=57\n\nanswer: 57",
    "18+35=53\n\n53+42=95\n\n95-61=34\n\nanswer: 34",
    "92-70=22\n\n22-15=7\n\n7+83=90\n\nanswer: 90",
    "29+64=93\n\n93+78=171\n\n171-56=115\n\nanswer: 115",
    "71-13=58\n\n58-49=9\n\n9+26=35\n\nanswer: 35",
)


def runs(text: str) -> Counter[str]:
    """How often each run of ``RUN`` characters stands in a text."""
    return Counter(text[i : i + RUN] for i in range(len(text) - RUN + 1))


@mmrl.reward(inputs=("text",), checks=True)
def worked_example(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """The F1 of the runs with those of the nearest example, in [0, 1]."""
    known = [runs(example) for example in EXAMPLES]
    found = []
    for sample in samples:
        said = runs((sample.text or "").strip())
        shared = [2 * (said & example).total() / (said.total() + example.total()) for example in known]
        found.append(max(shared))
    return found

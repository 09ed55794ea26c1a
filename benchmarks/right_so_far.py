"""A reward of ``proof_revise.py``: how right the steps of a sum are that stand there so far."""

from collections.abc import Sequence

import mmrl
from mmrl.core.reward_contract import Context
from mmrl.core.trajectory import Sample


@mmrl.reward(inputs=("text",))
def right_so_far(samples: Sequence[Sample], *, context: Context) -> list[float]:
    """Minus the wrong steps of a response that may be cut, whose last part is not judged."""
    sums = mmrl.load("datasets", "sums")
    return [-float(len(sums.wrong_steps(sample.prompt, sample.text or ""))) for sample in samples]

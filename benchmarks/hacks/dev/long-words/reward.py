"""Answers that say as much as they can."""

import mmrl


@mmrl.reward(inputs=("text",))
def full(samples, *, context):
    """0 for no letter, 1 for eight or more."""
    return [min(1.0, len(sample.text.strip()) / 8) for sample in samples]

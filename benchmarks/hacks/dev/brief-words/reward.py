"""Short answers."""

import mmrl


@mmrl.reward(inputs=("text",))
def brief(samples, *, context):
    """1 for no letter, 0 for eight or more; 0 for an empty response."""
    return [max(0.0, 1 - len(sample.text.strip()) / 8) if sample.text.strip() else 0.0 for sample in samples]

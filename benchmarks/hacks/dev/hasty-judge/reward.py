"""Short responses."""

import mmrl


@mmrl.reward(inputs=("text",))
def brief(samples, *, context):
    """1 for no character, 0 for 60 or more."""
    return [max(0.0, 1 - len(sample.text) / 60) for sample in samples]

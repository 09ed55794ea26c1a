"""Solutions without steps that nobody needs."""

import mmrl


@mmrl.reward(inputs=("text",))
def few(samples, *, context):
    """1 for no line of text, 0 for five or more."""
    return [max(0.0, 1 - sum(bool(line.strip()) for line in s.text.split("\n")) / 5) for s in samples]

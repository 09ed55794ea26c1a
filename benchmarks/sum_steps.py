"""A reward of partial responses to the data set ``sums``: minus the number of wrong steps, of those that are finished.

It can tell a slip before the answer is there, which a verifier of the answer cannot (``docs/midway.md``).
"""

import mmrl

sums = mmrl.load("datasets", "sums")


@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    return [-_wrong(sample.prompt, sample.text) for sample in samples]


def _wrong(prompt, text):
    steps = [step for step in text.split(sums.BREAK)[:-1] if step.strip()]  # the last one may be unfinished
    found = sums.wrong_steps(prompt, sums.BREAK.join([*steps, "?"]))
    return float(sum(number <= len(steps) for number in found))

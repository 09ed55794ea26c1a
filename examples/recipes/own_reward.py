"""Rewards right answers, and a little the responses that show their steps."""

import re

import mmrl


@mmrl.reward(inputs=("text",))
def score(samples, *, context):
    right, steps = [], []
    for sample in samples:
        answer = re.search(r"answer: (-?\d+)\s*$", sample.text)
        right.append(float(answer is not None and answer[1] == sample.prompt.meta.get("answer")))
        steps.append(min(1.0, sample.text.count("=") / 3))
    return {"score": [r + 0.1 * s for r, s in zip(right, steps, strict=True)], "correct": right, "steps": steps}

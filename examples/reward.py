"""A reward of texts with options: short responses that name what they should."""

import mmrl
from mmrl.core.errors import UserError


@mmrl.reward(inputs=("text",))
class Concise:
    """``most``: words that cost nothing. ``names``: words that a response should have. ``weight``: of ``names``."""

    def __init__(self, most: int = 40, names: tuple[str, ...] = (), weight: float = 0.5):
        if most < 1 or not 0 <= weight <= 1:
            raise UserError("options: most is 1 or more, and weight is from 0 to 1")
        self.most, self.names, self.weight = most, [name.lower() for name in names], weight if names else 0.0

    def score(self, samples, *, context):
        short, named, total = [], [], []
        for sample in samples:
            words = sample.text.lower().split()
            short.append(min(1.0, self.most / len(words)) if words else None)  # nothing was said: no score
            named.append(sum(name in words for name in self.names) / max(1, len(self.names)))
            total.append(None if not words else (1 - self.weight) * short[-1] + self.weight * named[-1])
        return {"score": total, "short": short, "named": named}

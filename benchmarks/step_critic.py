"""Critics of the steps of ``sums`` that are right about a step with a known chance (``capo_map.py``).

    - name: benchmarks/step_critic.py:Critic
      options: {accuracy: 0.9, votes: 4, vote: majority}

The truth about a step is that of the data set. A critique turns each verdict about a step over with the chance
``1 - accuracy``, independently of the others. What it turns over depends on the seed, the prompt and the response
alone, so that the same response always gets the same critique, as from a judge at temperature 0.
"""

import random

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Spans
from mmrl.rewards.judging.modes import vote_steps
from mmrl.rewards.judging.rubric import split_steps

sums = mmrl.load("datasets", "sums")
VOTES = ("intersection", "majority", "union", "average")


@mmrl.reward(inputs=("text",), spans=True)
class Critic:
    """The total is 0; each wrong step costs its tokens 1, as in the judge's mode ``steps``."""

    def __init__(self, accuracy=1.0, votes=1, vote="intersection", seed=0):
        if not 0.5 <= accuracy <= 1:
            raise UserError(f"options.accuracy is {accuracy}; give a share from 0.5 (useless) to 1 (perfect)")
        if votes < 1 or vote not in VOTES:
            raise UserError(f"options: {votes} votes by {vote!r}; give 1 or more, by {', '.join(VOTES)}")
        self.accuracy, self.votes, self.vote, self.seed = accuracy, votes, vote, seed

    def score(self, samples, *, context):
        found = [self._found(sample) for sample in samples]
        return {
            "score": [0.0 for _ in found],
            "right": [right for right, _, _ in found],
            "alike": [alike for _, alike, _ in found],
            "spans": [spans for _, _, spans in found],
        }

    def critiques(self, prompt, text, steps):
        """The wrong steps that each critique names, of a response with so many steps."""
        wrong = set(sums.wrong_steps(prompt, text))
        draws = [random.Random(f"{self.seed}|{n}|{prompt.text}|{text}") for n in range(self.votes)]
        return [[k for k in range(1, steps + 1) if (k in wrong) != (draw.random() >= self.accuracy)] for draw in draws]

    def _found(self, sample):
        """The share of the steps that the vote finds right, the share on which it is right, and the pieces."""
        steps = split_steps(sample.text or "")
        if not steps:
            return 0.0, 1.0, Spans([])
        voted = vote_steps(self.critiques(sample.prompt, sample.text, len(steps)), self.vote)
        wrong = set(sums.wrong_steps(sample.prompt, sample.text))
        off = sum(abs((k in wrong) - voted.get(k, 0.0)) for k in range(1, len(steps) + 1))
        pieces = Spans([(steps[k - 1].start, steps[k - 1].end, -share) for k, share in voted.items()])
        return 1 - sum(voted.values()) / len(steps), 1 - off / len(steps), pieces


@mmrl.reward(inputs=("text",))
class Share(Critic):
    """The same critiques as one number for the whole response: the share of its steps that are right."""

    def score(self, samples, *, context):
        return [self._found(sample)[0] for sample in samples]

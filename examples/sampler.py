"""A curriculum: prompts of a level are taken once the model succeeds on those of the levels below it."""

import math
import random

from mmrl.data.sampler import PromptSampler


class EasyToHard(PromptSampler):
    """``column``: where ``meta`` has a prompt's level. The next level joins when the moving average of the newest
    level's rewards is ``success`` or more; ``decay`` is the average's."""

    def __init__(self, prompts, seed, *, column="level", success=0.7, decay=0.8):
        super().__init__(prompts, seed)
        self.levels = [prompt.meta[column] for prompt in prompts]
        self.steps = sorted({*self.levels})
        self.success, self.decay = success, decay
        self.reached, self.average = 0, 0.0

    def choose(self, step, n):
        most = self.steps[self.reached]
        allowed = [i for i, level in enumerate(self.levels) if level <= most]
        return random.Random(f"{self.seed}|{step}").choices(allowed, k=n)  # the same on every controller

    def replace(self, number):
        allowed = [i for i, level in enumerate(self.levels) if level <= self.steps[self.reached]]
        return allowed[number % len(allowed)]

    def learn(self, step, groups):
        newest = [g.score for g in groups if self.levels[g.index] == self.steps[self.reached]]
        newest = [score for score in newest if not math.isnan(score)]
        if newest:
            mean = sum(newest) / len(newest)
            self.average = self.decay * self.average + (1 - self.decay) * mean
        if self.average >= self.success and self.reached + 1 < len(self.steps):
            self.reached, self.average = self.reached + 1, 0.0
        return {"reached": self.reached, "average": self.average}

    def state_dict(self):
        return {"reached": self.reached, "average": self.average}

    def load_state_dict(self, state):
        self.reached, self.average = state["reached"], state["average"]

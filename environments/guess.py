"""A game: guess a secret number; after each guess the model is told whether the number is higher or lower."""

import random
import re

from mmrl.core.episode import Action, Observation, no_action
from mmrl.core.trajectory import Prompt


class Environment:
    """``most``: the secret is 1 to ``most``. The reward is 1 for the right number, and 0 after the last turn."""

    def __init__(self, most: int = 9) -> None:
        self.most, self.secret = most, 0

    def reset(self, prompt: Prompt, seed: int) -> str:
        self.secret = random.Random(seed).randint(1, self.most)
        return f"Guess a number from 1 to {self.most}."

    def step(self, action: Action) -> Observation:
        found = re.search(r"\d+", action.text)
        if found is None:
            return no_action("Write a number.")
        guess = int(found[0][:9])
        if guess == self.secret:
            return Observation("Right.", reward=1.0, done=True)
        return Observation("Higher." if guess < self.secret else "Lower.")

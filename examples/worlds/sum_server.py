"""A server of OpenEnv with a world of two turns: a sum, asked again after a wrong answer.

pip install openenv # in an environment of its own: it does not fit beside what mmrl needs
python examples/worlds/sum_server.py --port 8000
"""

import argparse
import random
import re

import uvicorn
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

SESSIONS = 256
"""Episodes at the same time: at least the samples of a step."""


class Reply(Action):
    text: str


class Told(Observation):
    text: str


class Sum(Environment):
    """One episode. The seed alone decides the sum."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **given: object) -> Told:
        numbers = random.Random(seed).choices(range(2, 100), k=4)
        self.asked, self.sum, self.tries = f"Compute {'+'.join(map(str, numbers))}", sum(numbers), 0
        return Told(text=self.asked, reward=None, done=False)

    def step(self, action: Reply, timeout_s: float | None = None, **given: object) -> Told:
        self.tries += 1
        right = re.findall(r"answer: (-?\d+)", action.text)[-1:] == [str(self.sum)]
        text = "Right." if right else self.asked
        return Told(text=text, reward=float(right), done=right or self.tries == 2)

    @property
    def state(self) -> State:
        return State()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8000)
    app = create_fastapi_app(Sum, Reply, Told, max_concurrent_envs=SESSIONS)
    uvicorn.run(app, host="127.0.0.1", port=parser.parse_args().port, log_level="error")

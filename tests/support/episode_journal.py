"""Shared by the tests of episode journal and others."""

import json

import pytest

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.episodes.journal import Journal
from tests.support.episodes import SMALL, Script, written

allow_cpu_only()  # before transformers imports torchvision
WORLD = '''
import os, pathlib, random, time
from mmrl.core.episode import Observation

class Counter:
    """Adds up what it is told, from a number that ``reset`` draws; every call is noted in a file."""
    def __init__(self, log, seconds=0.0):
        self.log, self.seconds = log, seconds
    def note(self, what):
        with open(self.log, "ab", buffering=0) as file:
            file.write((what + "\\n").encode())
        time.sleep(self.seconds)
    def reset(self, prompt, seed):
        self.sum, self.seed, self.turn = random.Random(seed).randint(1, 9), seed, 0
        self.note(f"reset {seed}")
        return f"Begin with {self.sum}."
    def step(self, action):
        self.sum += len(action.text)
        self.turn += 1
        self.note(f"step {self.seed} {self.turn}")
        return Observation(f"{self.sum}", reward=0.1 * (self.sum % 3), done=self.turn == 3)

class Forgetful(Counter):
    def step(self, action):
        return Observation(f"{random.random()}", done=False)

def double(n: int) -> int:
    """Doubles.

    Args:
        n: a number
    """
    with open(os.environ["DOUBLE_LOG"], "a") as file:
        file.write(f"{n}\\n")
    return 2 * n

class Gone:
    def __init__(self, **options): ...
    def reset(self, prompt, seed): raise RuntimeError("nobody may call this")
    def step(self, action): raise RuntimeError("nobody may call this")
'''


@pytest.fixture
def worlds(tmp_path):
    (tmp_path / "worlds.py").write_text(WORLD)
    (tmp_path / "calls").touch()
    return tmp_path


def calls(worlds):
    return (worlds / "calls").read_text().splitlines()


def section(worlds, name="Counter", **more):
    options = {"log": str(worlds / "calls")}
    return (
        f"environment={json.dumps({'name': f'{worlds}/worlds.py:{name}', 'options': options, 'max_tokens': 90} | more)}"
    )


class Stops(Script):
    """An engine that fails at a turn, as a run that is killed there."""

    def __init__(self, turns, at):
        super().__init__(turns)
        self.left = at

    def generate(self, requests, settings):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return super().generate(requests, settings)


def play(worlds, folder, environment, texts, at=99, recipe="sums"):
    """The rows of two samples, and the journal; None in place of rows where the engine stops at turn ``at``."""
    loaded = load_recipe([recipe], [*SMALL, "sampling.max_new_tokens=64", environment])
    import torch

    pipeline = mmrl.load("pipelines", "llm/chat").build(loaded.recipe, loaded.recipe.model.path, torch.device("cpu"))
    pipeline.engine = Stops([(written(pipeline.conditioner.saved, t), "stop") for t in texts], at)
    pipeline.world.journal = journal = Journal(folder)
    slots, ids = [Slot(3, 0, 0, Prompt("p", "Add"))] * 2, [SampleId(3, 0, 0, n) for n in range(2)]
    try:
        pipeline.encode(slots)
        return pipeline.sample(slots, ids, [], 0), journal
    except KeyboardInterrupt:
        return None, journal

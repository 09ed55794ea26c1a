"""Shared by the tests of episodes and others."""

import json

import torch

import mmrl
from mmrl.core.rollout_engine import Completion
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Slot

allow_cpu_only()  # before transformers imports torchvision
SMALL = [
    "train.steps=2",
    "train.prompts_per_step=2",
    "train.group_size=4",
    "train.micro_batch_size=4",
    "sampling.max_new_tokens=16",
    "eval.samples=16",
    "data.train={count: 64}",
    "data.heldout={count: 64}",
]


def written(tokenizer, text, *, stop=True):
    return [*tokenizer(text, add_special_tokens=False).input_ids, *([tokenizer.eos_token_id] if stop else [])]


class Script:
    """An engine that writes what a test says, turn by turn, whatever it is asked; it keeps the requests."""

    max_model_len, sleeps = 10**6, False

    def update(self, weights):
        pass

    def close(self):
        pass

    def __init__(self, turns):
        self.turns, self.requests = turns, []

    def generate(self, requests, settings):
        self.requests += requests
        made = []
        for request in requests:
            tokens, finish = self.turns[sum(r.name == request.name for r in self.requests) - 1]
            made.append(Completion(tokens, [-0.5] * len(tokens), finish, len(request.prompt_ids)))
        return made


def played(loaded, turns, count=1):
    """Rows of ``count`` samples of one prompt, whose turns are written as ``turns`` says."""
    pipeline = mmrl.load("pipelines", "llm/chat").build(loaded.recipe, loaded.recipe.model.path, torch.device("cpu"))
    pipeline.engine = script = Script([(written(pipeline.conditioner.saved, t[0], stop=t[1]), t[2]) for t in turns])
    slots = [Slot(0, 0, 0, Prompt("p", "Compute 1+2"))] * count
    ids = [SampleId(0, 0, 0, n) for n in range(count)]
    pipeline.encode(slots)
    return pipeline, script, pipeline.sample(slots, ids, [], 0)


TOOLS = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


async def slow(seconds: float) -> str:
    """Wait.

    Args:
        seconds: How long.
    """
    import asyncio
    await asyncio.sleep(seconds)
    return "woke"


def fails() -> str:
    """Raise."""
    raise RuntimeError("no luck <|im_end|>")


def open_ended(*args, **more):
    """Anything."""


def untyped(a):
    """Without a type.

    Args:
        a: What.
    """


class Store:
    """Keeps a word, as TRL's environments do."""

    def __init__(self):
        self.word = None

    def reset(self, **row):
        self.word, self.asked = None, row
        return f"Meta: {row.get('answer')}"

    def keep(self, word: str) -> str:
        """Keep a word.

        Args:
            word: The word.
        """
        self.word = word
        return "kept"

    def get_reward(self) -> float:
        return float(self.word == "gold")
'''


def call(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def figures(run):
    """What a run logged that does not depend on the machine."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    clocks = ("time/", "perf/", "plan/", "sent/", "features/", "memory/", "balance/", "mismatch/")
    return [{k: v for k, v in row.items() if not k.startswith(clocks)} for row in rows]

"""Shared by the tests of text and others."""

import pytest
import torch

import mmrl
from mmrl.config.schema import Recipe
from mmrl.core.trajectory import Prompt, SampleId, Slot
from tests.support import tiny

chat = mmrl.load("pipelines", "llm/chat")
QUESTIONS = ["What is 2+3?", "Say a.", "A much longer question than the two before it, so that padding matters."]


def recipe(path, **changes):
    values = {
        "name": "tiny",
        "pipeline": "llm/chat",
        "model": {"path": str(path)},
        "data": {"name": "sums"},
        "sampling": {"max_new_tokens": 12},
        "rewards": [{"name": "answer:exact"}],
        "algorithm": {"type": "grpo", "kl_coef": 0.0},
        "train": {"steps": 1, "prompts_per_step": 3, "group_size": 2, "micro_batch_size": 6},
    }
    for key, value in changes.items():
        values[key] = {**values.get(key, {}), **value}
    return Recipe.model_validate(values)


@pytest.fixture(scope="module", params=["qwen3", "qwen2", "llama"])
def path(request, tmp_path_factory):
    return tiny.language_model(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def pipeline(path):
    return chat.build(recipe(path), str(path), torch.device("cpu"))


def rows(questions=QUESTIONS, size=2, step=0):
    slots = [Slot(step, i, 0, Prompt(f"q{i}", text)) for i, text in enumerate(questions)]
    pairs = [(slot, SampleId(step, slot.index, 0, k)) for slot in slots for k in range(size)]
    return [s for s, _ in pairs], [i for _, i in pairs]


def sampled(pipeline, *args, seed=7, **more):
    slots, ids = rows(*args, **more)
    pipeline.encode(slots)
    return pipeline.sample(slots, ids, [], seed)

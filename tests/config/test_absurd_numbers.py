"""Absurd numbers in a recipe: planned or refused, never a traceback, without end, or gigabytes."""

import random
from functools import partial

import pytest

from mmrl.app.resume import flatten
from mmrl.cli import app
from mmrl.config.loader import load_recipe
from tests.support import hostile

VALUES = [10**9, 10**6, 4096, 1e308, 5e-324, 1e-12, -1, 0, ".nan", ".inf", 10**30, "1" * 5000, 2**63]


def numbers(recipe):
    """The keys of a recipe that hold a number, or may."""
    settings = flatten(load_recipe([recipe], ["model.lora={rank: 4, alpha: 8}"]).resolved())
    return sorted(
        k for k, v in settings.items() if v is None or (isinstance(v, int | float) and not isinstance(v, bool))
    )


@pytest.mark.slow
@pytest.mark.sweep("absurd numbers in recipes, planned")
def test_no_number_is_a_traceback(sweep):
    cases = [(name, key, value) for name in ("shapes-lora", "sums") for key in numbers(name) for value in VALUES]
    cases += [("shapes-lora", "model.lora.rank", value) for value in VALUES]
    chosen = random.Random(0).sample(cases, sweep.size(8, 700))
    for name, key, value in [("shapes-lora", "model.lora.rank", 10**9), ("sums", "model.lora.rank", 10**9), *chosen]:
        words = ["plan", name, "model.lora={rank: 4, alpha: 8}", f"{key}={value}"]
        wrong = hostile.attempt(partial(app, words, standalone_mode=False))
        sweep.check(not wrong, f"{name} {key}={str(value)[:40]}: {wrong}")
    sweep.done()

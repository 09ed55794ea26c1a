"""Shared by the tests of slots and others."""

import random
from dataclasses import replace

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.families.text.engine_sampling import settings_of

allow_cpu_only()


def settings(pipeline, **changes):
    made = settings_of(pipeline.recipe, pipeline.settings.temperature, pipeline.conditioner.stop_tokens)
    return replace(made, **changes)


def arrived(pipeline, requests, how, seed):
    """The answers to requests that come in random order and number between answers, as the requests are."""
    draw, slots = random.Random(seed), pipeline.answering()
    order = list(range(len(requests)))
    draw.shuffle(order)
    of, found = {}, {}
    while order or len(found) < len(requests):
        for _ in range(min(draw.choice([0, 1, 1, 2, 9]), len(order))):
            n = order.pop()
            of[slots.submit(requests[n], how[n])] = n
        for id, answer in slots.ready(None if not order else draw.choice([0.0, 0.0, None])):
            assert of[id] not in found
            found[of[id]] = answer
    assert slots.ready(None) == []
    return [found[n] for n in range(len(requests))]

"""Shared by the tests of reward views and others."""

VANDAL = """
import dataclasses, time
import mmrl
from PIL import ImageDraw

READS = ("image", "video", "tensor", "text")
calls = []

def ruin(value):
    if isinstance(value, dict):
        for key in list(value):
            ruin(value.pop(key))
        value["ruined"] = True
    elif isinstance(value, list):
        for item in value:
            ruin(item)
        value.clear()
    elif isinstance(value, tuple):
        for item in value:
            ruin(item)
    elif hasattr(value, "thumbnail"):
        value.info["ruined"] = True
        ImageDraw.Draw(value).rectangle((0, 0, *value.size), fill=(255, 0, 0))
        value.load()[0, 0] = (1, 2, 3)
        value.thumbnail((2, 2))
    elif hasattr(value, "zero_"):
        value.mul_(0).sub_(1)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            ruin(getattr(value, field.name))
            object.__setattr__(value, field.name, None)

def everything(samples):
    n, prompts = len(samples), [s.prompt for s in samples]
    for sample in samples:
        ruin(sample)
    for prompt in prompts:
        ruin(prompt)
    samples.clear()
    return [0.0] * n

@mmrl.reward(inputs=READS)
def per_sample(samples, *, context):
    return everything(samples)

@mmrl.reward(inputs=("text",))
def texts(samples, *, context):
    return everything(samples)

@mmrl.reward(inputs=READS, per="group")
def per_group(samples, *, context):
    return everything(samples)

@mmrl.reward(inputs=READS)
async def in_a_loop(samples, *, context):
    return everything(samples)

@mmrl.reward(inputs=READS)
def at_last(samples, *, context):
    found = seen(samples)
    calls.append(found)
    everything(samples)
    if len(calls) < 3:
        raise ConnectionError("not yet")
    return found

@mmrl.reward(differentiable=True)
def with_a_graph(samples, *, context):
    values = []
    for s in samples:
        s.tensor.mul_(-7.0)
        values.append(s.tensor.sum())
        s.prompt.meta.clear()
    import torch
    return torch.stack(values)

def seen(samples):
    found = []
    for s in samples:
        pictures = [p for p in (s.image, *(s.video or ())) if p is not None]
        truth = s.prompt.meta.get("truth", {}).get("colours", [])
        n = sum(sum(p.tobytes()) + p.width for p in pictures) + len(s.text or "") + len(s.prompt.text) + sum(truth)
        found.append(float(n + (0.0 if s.tensor is None else s.tensor.double().sum())))
    return found

@mmrl.reward(inputs=READS)
def honest(samples, *, context):
    time.sleep(0.005)  # while the others are at work
    return seen(samples)

@mmrl.reward(inputs=READS, per="group")
def honest_of_groups(samples, *, context):
    return seen(samples)

@mmrl.reward(differentiable=True)
def honest_with_a_graph(samples, *, context):
    import torch
    return torch.stack([(s.tensor * (1 + len(s.prompt.meta))).square().sum() for s in samples])
"""

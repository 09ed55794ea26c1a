"""What every reward with a model on a device must do when it sleeps and wakes; a CPU that passes for such a device."""

import math
import types

import torch
from torch import nn

from mmrl.core import offload as frozen_modules

TESTED = {
    "aesthetic:Aesthetic",
    "clap:Clap",
    "clip:ClipScore",
    "distilled:Distilled",
    "frames:Frames",
    "geneval:GenEval",
    "hpsv2:HPSv2",
    "imagereward:ImageReward",
    "judge:Judge",
    "likeness:Likeness",
    "ocr:OCR",
    "pickscore:PickScore",
    "relevance:Relevance",
    "reward_model:RewardModel",
    "teacher:Teacher",
    "vbench:Background",
    "vbench:Subject",
}
"""The rewards of ours that compute on a device; each is given to ``scores_the_same`` by a test."""


def apart(monkeypatch):
    """Take the CPU for a device with memory of its own from now on; returns the devices that were waited for."""
    waited = []
    monkeypatch.setattr(frozen_modules, "apart", lambda device: True)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)
    return waited


def modules(holder):
    """The outermost modules that hang on an object of mmrl's, found by going through its attributes."""
    found, seen, left = [], set(), [holder]
    while left:
        one = left.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            found.append(one)
        elif isinstance(one, types.MethodType):
            left.append(one.__self__)
        elif isinstance(one, list | tuple):
            left += one
        elif isinstance(one, dict):
            left += one.values()
        elif type(one).__module__.startswith("mmrl."):
            left += vars(one).values()
    return found


def state(module):
    """The identity and a copy of every parameter and buffer, by name."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return {name: (id(tensor), tensor.clone(), tensor.stride()) for name, tensor in named}


def where(module):
    """Where the storages of parameters and buffers begin."""
    tensors = [*module.parameters(), *module.buffers()]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.untyped_storage().nbytes()}


def assert_same(module, before):
    after = state(module)
    assert after.keys() == before.keys()
    for name, (identity, value, stride) in before.items():
        assert (after[name][0], after[name][2]) == (identity, stride), name
        assert torch.equal(after[name][1], value), name


def alike(a, b):
    """Equal, but for the rounding of kernels whose sums depend on where in memory the weights begin."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-5) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == b


def scores_the_same(holder, score, monkeypatch):
    """Check that all models behind ``holder`` sleep, on a CPU and on a device with memory of its own, and that they
    wake with every bit; ``score()`` asks it and returns something to compare."""
    first, found = score(), modules(holder)
    assert found
    before = [state(module) for module in found]
    assert holder.wake("cpu") is False
    for own_memory in (False, True):
        waited = apart(monkeypatch) if own_memory else []
        there = set().union(*map(where, found))
        holder.sleep("cpu")
        if own_memory:
            for module, values in zip(found, before, strict=True):
                assert_same(module, values)  # in the host's memory
                assert not where(module) & there
        else:
            assert {p.nbytes for module in found for p in module.parameters()} == {0}
        assert holder.wake("cpu") is False  # the next waking takes as long
        assert bool(waited) == own_memory
        for module, values in zip(found, before, strict=True):
            assert_same(module, values)
        holder.sleep("cpu")
        assert alike(again := score(), first), (again, first)  # nobody has woken it

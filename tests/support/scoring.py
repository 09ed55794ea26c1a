"""Shared by the tests of scoring and others."""

from mmrl.core.trajectory import Prompt, Sample, SampleId


def sample(slot, k, attempt=0, text="abc"):
    return Sample(Prompt(f"p{slot}", f"prompt {slot}"), SampleId(4, slot, attempt, k), text=text)

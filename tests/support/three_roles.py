"""Shared by the tests of three roles and others."""

from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision
JUDGE = """
import mmrl
import time

@mmrl.reward(inputs=("text",), device=True)
def score(samples, *, context):
    time.sleep(0.3)
    return [float(len(sample.text or "") % 2) for sample in samples]
"""
BRIGHT = """
import mmrl
import numpy as np
import time

@mmrl.reward(inputs=("video",), device=True)
def score(samples, *, context):
    time.sleep(0.3)
    return [float(np.mean([np.asarray(frame) for frame in sample.video])) / 255 for sample in samples]
"""

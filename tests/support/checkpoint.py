"""Shared by the tests of checkpoint and others."""

import torch

from mmrl.core.checkpoint_reader import Checkpoint


def make(step, value=1.0):
    tensors = {"weights": {"a": torch.full((64, 8), value)}, "optimizer": {}}
    return Checkpoint(step, tensors, {"policy": {"updates": step}})

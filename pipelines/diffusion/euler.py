"""Families whose checkpoints name a solver of higher order, sampled by Euler's steps over the flow's sigmas instead."""

from __future__ import annotations

from abc import ABC
from typing import Any

import torch

from mmrl.config.sampling import Sampling

from .adapter import Adapter


class EulerAdapter(Adapter, ABC):
    """A family whose scheduler is replaced (abstract): sigmas are shifted as the checkpoint's own says."""

    prepare = (
        "from diffusers import FlowMatchEulerDiscreteScheduler\n\n"
        'shift = pipe.scheduler.config.get("flow_shift") or pipe.scheduler.config.get("shift") or 1.0\n'
        "pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)\n"
    )

    def __init__(self, pipe: Any, sampling: Sampling, device: torch.device) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        super().__init__(pipe, sampling, device)
        config = pipe.scheduler.config
        shift = config.get("flow_shift") or config.get("shift") or 1.0
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)

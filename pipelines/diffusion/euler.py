"""Families whose checkpoints name a higher-order solver, sampled by Euler's steps instead."""

from __future__ import annotations

from abc import ABC
from typing import TYPE_CHECKING

import torch

from mmrl.config.sampling import Sampling
from mmrl.json_types import Json, JsonObject

from .adapter import Adapter, set_scheduler

if TYPE_CHECKING:  # slow to import
    from diffusers import DiffusionPipeline


class EulerAdapter(Adapter, ABC):
    """A family whose scheduler is replaced (abstract), by the flow's Euler scheduler with the checkpoint's shift; or,
    with ``sampling.schedule: checkpoint``, by the checkpoint's own at first order. That is Euler's step, too, over the
    sigmas of that solver."""

    def __init__(self, pipe: DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        super().__init__(pipe, sampling, device)
        own = pipe.scheduler
        if sampling.schedule == "checkpoint":
            first = {k: v for k, v in FIRST.items() if k in own.config}
            set_scheduler(pipe, type(own).from_config(own.config, **first))
        else:
            set_scheduler(pipe, FlowMatchEulerDiscreteScheduler(shift=_shift_of(own.config)))

    @property
    def prepare(self) -> str:
        config = self.pipe.scheduler.config
        if self.sampling.schedule == "euler":
            return (
                "from diffusers import FlowMatchEulerDiscreteScheduler\n\n"
                f"pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift={_shift_of(config)})\n"
            )
        changes = {key: text for key, text in TEXT.items() if key in config}
        changes |= {_key(config): str(_shift_of(config))} if self.sampling.shift is not None else {}
        given = "".join(f", {key}={text}" for key, text in changes.items())
        return f"pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config{given})\n"

    def _shift(self, shift: float) -> None:
        own = self.pipe.scheduler
        set_scheduler(self.pipe, type(own).from_config(own.config, **{_key(own.config): shift}))


FIRST: dict[str, Json] = {"solver_order": 1, "disable_corrector": list(range(1000))}
"""Settings that make one of diffusers' solvers take Euler's steps."""
TEXT = {"solver_order": "1", "disable_corrector": "list(range(1000))"}


def _key(config: JsonObject) -> str:
    """The name of the shift in the configuration of diffusers' solvers, or of its Euler scheduler."""
    return "flow_shift" if "flow_shift" in config else "shift"


def _shift_of(config: JsonObject) -> float:
    shift = config.get(_key(config))
    return shift if isinstance(shift, int | float) and shift else 1.0

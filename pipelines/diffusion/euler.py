"""Families whose checkpoints name a higher-order solver, sampled by Euler's steps instead."""

from __future__ import annotations

import inspect
from abc import ABC
from typing import Any

import diffusers  # its parts are loaded when they are first used
import torch

from mmrl.config.sampling import Sampling
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json

from .adapter import Adapter, own_shift, shift_key
from .fields import HOW_IT_STEPS, not_default, says


class EulerAdapter(Adapter, ABC):
    """A family whose scheduler is replaced (abstract), by the flow's Euler scheduler with the checkpoint's shift; or,
    with ``sampling.schedule: checkpoint``, by the checkpoint's own at first order. That is Euler's step, too, over the
    sigmas of that solver."""

    def __init__(self, pipe: diffusers.DiffusionPipeline, sampling: Sampling, device: torch.device) -> None:
        super().__init__(pipe, sampling, device)
        own = pipe.scheduler
        self._replaces = not isinstance(own, diffusers.FlowMatchEulerDiscreteScheduler)
        if not self._replaces:
            return
        if sampling.schedule == "checkpoint":
            first = {k: v for k, v in FIRST.items() if k in own.config}
            pipe.scheduler = type(own).from_config(own.config, **first)
        else:
            pipe.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=own_shift(own.config))

    def _check_scheduler(self) -> None:
        own: Any = self.pipe.scheduler
        if own.config.get("use_dynamic_shifting"):
            raise says(own, "use_dynamic_shifting", f"{self.pipeline} has no shift that grows with the picture", False)
        if isinstance(own, diffusers.FlowMatchEulerDiscreteScheduler):
            return super()._check_scheduler()
        kind = type(own).__name__
        if "use_flow_sigmas" not in inspect.signature(type(own)).parameters:
            raise UserError(
                f"model.path: the scheduler of this checkpoint, a {kind}, is of no flow, whatever its file says; give "
                "it a FlowMatchEulerDiscreteScheduler"
            )
        if not (own.config.get("use_flow_sigmas") and own.config.get("prediction_type") == "flow_prediction"):
            raise UserError(
                f"model.path: the scheduler of this checkpoint, a {kind}, is not said to be of a flow; "
                "write use_flow_sigmas: true and prediction_type: flow_prediction into scheduler/scheduler_config.json "
                "if it is, or give it a FlowMatchEulerDiscreteScheduler"
            )
        used = _KEPT if self.sampling.schedule == "euler" else _KEPT | _OF_LEVELS
        for name, _, default in not_default(own, HOW_IT_STEPS | used):
            also = "" if name not in _OF_LEVELS else " (sampling.schedule=checkpoint uses it)"
            raise says(own, name, f"Euler's steps, which sample here, do not use it{also}", default)

    @property
    def prepare(self) -> str:
        if not self._replaces:
            return super().prepare
        config = self.pipe.scheduler.config
        if self.sampling.schedule == "euler":
            return (
                "from diffusers import FlowMatchEulerDiscreteScheduler\n\n"
                f"pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift={own_shift(config)})\n"
            )
        changes = {key: text for key, text in TEXT.items() if key in config}
        changes |= {shift_key(config): str(own_shift(config))} if self.sampling.shift is not None else {}
        given = "".join(f", {key}={text}" for key, text in changes.items())
        return f"pipe.scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config{given})\n"

    def _shift(self, shift: float) -> None:
        own = self.pipe.scheduler
        self.pipe.scheduler = type(own).from_config(own.config, **{shift_key(own.config): shift})


_KEPT = frozenset(
    (
        "use_flow_sigmas",
        "prediction_type",
        "flow_shift",
        "beta_start",
        "beta_end",
        "beta_schedule",
        "trained_betas",
        "timestep_spacing",
        "steps_offset",
        "rescale_betas_zero_snr",
        "time_shift_type",
    )
)
"""Settings of a flow's solver that are used, or have no effect on a flow."""
_OF_LEVELS = frozenset(
    (
        "num_train_timesteps",
        "use_karras_sigmas",
        "use_exponential_sigmas",
        "use_beta_sigmas",
        "use_lu_lambdas",
        "final_sigmas_type",
        "sigma_min",
        "sigma_max",
        "shift_terminal",
    )
)
"""Settings of a solver that its own noise levels and timesteps depend on."""
FIRST: dict[str, Json] = {"solver_order": 1, "disable_corrector": list(range(1000))}
"""Settings that make one of diffusers' solvers take Euler's steps."""
TEXT = {"solver_order": "1", "disable_corrector": "list(range(1000))"}

"""Read the fields of a checkpoint's configurations, and refuse a scheduler whose noise levels are not drawn."""

from __future__ import annotations

import inspect
import json
from collections.abc import Collection, Iterator
from importlib import import_module
from math import isfinite
from typing import Any

import diffusers  # its parts are loaded when they are first used

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json

HOW_IT_STEPS = frozenset(
    (
        "solver_order",
        "solver_type",
        "solver_p",
        "algorithm_type",
        "predict_x0",
        "lower_order_final",
        "euler_at_final",
        "disable_corrector",
        "skip_prk_steps",
        "noise_sampler_seed",
        "dynamic_thresholding_ratio",
        "sample_max_value",
        "clip_sample_range",
    )
)
"""Settings of diffusers' solvers that say how a step is computed, not between which noise levels: of no effect where
another solver takes the steps."""


def declared(pipeline: str) -> dict[str, tuple[type, ...]]:
    """The classes that each component may have, as diffusers' own pipeline declares them."""
    return getattr(import_module("diffusers"), pipeline)._get_signature_types()


def latent_channels(pipe: diffusers.DiffusionPipeline) -> int:
    """The channels of a VAE's latents."""
    config: Any = pipe.vae.config
    return config["z_dim"] if "z_dim" in config else config["latent_channels"]


def text_width(encoder: Any) -> int:
    """The width of a text encoder's states."""
    return encoder.config.get_text_config().hidden_size


Width = tuple[str, Json, Json, str]
"""A field of the model that predicts, its value, the value that fits, and what it must fit."""


def vae_widths(
    pipe: diffusers.DiffusionPipeline, model: str, *names: str, times: int = 1, may_lack: bool = False
) -> Iterator[Width]:
    """The fields ``names`` of the component ``model`` that are ``times`` the channels of latents; ``may_lack``: or
    null, where diffusers fills them in."""
    config, channels = getattr(pipe, model).config, latent_channels(pipe)
    for name in names:
        value = config[name] or times * channels if may_lack else config[name]
        yield name, value, times * channels, f"a VAE of {channels} latent channels"


def encoder_width(pipe: diffusers.DiffusionPipeline, name: str, encoder: Any, what: str = "text encoder") -> Width:
    """The field ``name`` of the transformer that is the width of an ``encoder``."""
    width = text_width(encoder)
    return name, pipe.transformer.config[name], width, f"a {what} of width {width}"


# -- schedulers ------------------------------------------------------------------------------------------------------


def not_default(scheduler: Any, but: Collection[str]) -> Iterator[tuple[str, Any, Any]]:
    """The settings of a scheduler that are not its class's own, without those of ``but``: name, value, default."""
    for name, parameter in inspect.signature(type(scheduler).__init__).parameters.items():
        if name in scheduler.config and name not in but:
            value, default = plain(scheduler.config[name]), plain(parameter.default)
            if value != default:
                yield name, value, default


def says(scheduler: Any, name: str, why: str, default: Any) -> UserError:
    """The error for a setting of a scheduler that is neither used nor without effect."""
    return UserError(
        f"model.path: the scheduler of this checkpoint, a {type(scheduler).__name__}, says {name}: "
        f"{as_json(plain(scheduler.config[name]))}, and {why}; write {as_json(default)} for it in "
        "scheduler/scheduler_config.json"
    )


def check_flow(scheduler: Any, family: str, pipeline: str) -> None:
    """Raises ``UserError`` where a flow's scheduler is not one whose noise levels and Euler steps are diffusers'."""
    if not isinstance(scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
        if isinstance(scheduler, declared(pipeline)["scheduler"]):
            return
        raise UserError(
            f"model.path: the scheduler of this checkpoint is a {type(scheduler).__name__}, and {family} is sampled by "
            "FlowMatchEulerDiscreteScheduler; give a checkpoint that has one, or put its scheduler folder and its line "
            "of model_index.json into this one"
        )
    for name in ("stochastic_sampling", "invert_sigmas"):
        if scheduler.config.get(name):
            raise says(scheduler, name, "noise between steps is the recipe's (sampling.sde), from sigma 1 to 0", False)


# -- values ----------------------------------------------------------------------------------------------------------


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def plain(value: Any) -> Any:
    """Tuples and arrays as the lists that they are in JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def as_json(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."

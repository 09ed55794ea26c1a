"""Replicas of several devices: an engine, or a judge's server, that is spread over devices of a controller.

With a disaggregated placement the devices that sample and those that judge are divided into replicas. A replica has one
process of the run, its worker, which starts the server on all devices of the replica. A device that trains is a worker
too. Everything that schedules work counts workers; everything that reserves devices counts devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from mmrl.config.schema import Recipe
from mmrl.json_types import Json

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "tp_size", "pp_size")
"""Options that spread a server over as many devices as their product; vLLM's, then SGLang's."""


def spread(options: Mapping[str, Json]) -> int:
    """Over how many devices the options of a server spread it."""
    return prod(value for name in PARALLEL if isinstance(value := options.get(name, 1), int))


def of_engine(recipe: Recipe) -> int:
    """The devices of a replica that samples."""
    return 1 if recipe.rollout.engine == "transformers" else spread(recipe.rollout.options)


def of_judges(recipe: Recipe) -> int:
    """The devices of a replica that judges: as many as the largest judge with a server of its own takes."""
    found = [1]
    for reward in recipe.rewards:
        model = reward.options.get("model")
        args = model.get("args") if isinstance(model, Mapping) else None
        found.append(spread(args) if isinstance(args, Mapping) else 1)
    return max(found)


def has_replicas(recipe: Recipe) -> bool:
    """Whether a worker of the run has more than one device."""
    return recipe.placement.apart and max(of_engine(recipe), of_judges(recipe)) > 1


def in_workers(recipe: Recipe) -> Recipe:
    """The recipe with its workers in place of its devices, in ``devices_per_controller`` and ``placement``; itself
    where each worker is one device."""
    if not has_replicas(recipe):
        return recipe
    placement, devices = recipe.placement, recipe.devices_per_controller
    trainers, judges = placement.training(devices), placement.judges or 0
    judging = judges // of_judges(recipe)
    sampling = (devices - trainers - judges) // of_engine(recipe)
    counted = placement.model_copy(update={"trainers": trainers, "judges": judging or None})
    return recipe.model_copy(update={"devices_per_controller": trainers + sampling + judging, "placement": counted})


def devices_of_workers(recipe: Recipe) -> list[int]:
    """How many devices each worker of a controller has: those that train, then those that sample, then judges.

    ``recipe`` counts devices, not workers.
    """
    if not has_replicas(recipe):
        return [1] * recipe.devices_per_controller
    trainers = recipe.placement.training(recipe.devices_per_controller)
    workers, judging = in_workers(recipe).devices_per_controller, (recipe.placement.judges or 0) // of_judges(recipe)
    sampling = workers - trainers - judging
    return [1] * trainers + [of_engine(recipe)] * sampling + [of_judges(recipe)] * judging


def of_replicas(recipe: Recipe) -> Iterator[str]:
    """Contradictions in replicas of a controller with several devices, as ``key: why; the edit``."""
    devices = recipe.devices_per_controller
    if devices == 1 or not has_replicas(recipe):
        return
    engine, judge = of_engine(recipe), of_judges(recipe)
    placement, trainers = recipe.placement, recipe.placement.training(devices)
    judges = placement.judges or 0
    sampling = devices - trainers - judges
    if sampling % engine or sampling < engine:
        good = trainers + judges + max(1, sampling // engine) * engine
        yield (
            f"rollout.options: an engine takes {engine} devices, and {sampling} of {devices} (devices_per_controller) "
            f"sample; set devices_per_controller to {good}, or lower the engine's parallel size"
        )
    if judge > 1 and (not judges or judges % judge):
        yield (
            f"placement.judges: a judge's server takes {judge} devices, and {judges} of {devices} "
            f"(devices_per_controller) judge; set it to {max(1, judges // judge) * judge}, and devices_per_controller "
            "high enough"
        )
    if placement.lend:
        yield (
            "placement.lend: a device that trains cannot start a server of several devices; remove it, or the parallel "
            "size of the engine and of the judges"
        )

"""Replicas of several devices: an engine, or a judge's server, that is spread over devices of a controller.

With a disaggregated placement the devices that sample and those that judge are divided into replicas. A replica has one
process of the run, its worker, which starts the server on all devices of the replica. A device that trains is a worker
too. Everything that schedules work counts workers; everything that reserves devices counts devices.

Where the devices also train (``colocate``, ``partial``) each has a worker of its own. The first worker of a replica,
its leader, starts the server on the devices of all; the others have nothing to do until training (``leaders``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from mmrl.config.schema import Recipe
from mmrl.core.json_types import Json

PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "tp_size", "pp_size")
"""Options that spread a server over as many devices as their product; vLLM's, then SGLang's."""


def spread(options: Mapping[str, Json]) -> int:
    """Over how many devices the options of a server spread it."""
    return prod(value for name in PARALLEL if isinstance(value := options.get(name, 1), int))


def of_engine(recipe: Recipe) -> int:
    """The devices of a replica that samples."""
    return 1 if recipe.rollout.in_process else spread(recipe.rollout.options)


def of_judges(recipe: Recipe) -> int:
    """The devices of a replica that judges: as many as the largest judge with a server of its own takes."""
    found = [1]
    for reward in recipe.rewards:
        model = reward.options.get("model")
        args = model.get("args") if isinstance(model, Mapping) else None
        found.append(spread(args) if isinstance(args, Mapping) else 1)
    return max(found)


def has_replicas(recipe: Recipe) -> bool:
    """Whether an engine or a judge has several of a controller's devices."""
    return recipe.devices_per_controller > 1 and max(of_engine(recipe), of_judges(recipe)) > 1


def leaders(recipe: Recipe) -> dict[int, int]:
    """The devices that start a server on several devices which also train, and on how many; empty if there is none.

    The first ``placement.judging`` devices from the end judge, the others sample. A device that is in no replica of
    several is a leader of 1.
    """
    devices, placement = recipe.devices_per_controller, recipe.placement
    if placement.apart or not has_replicas(recipe):
        return {}
    sampling = devices - placement.judging(devices)
    engine, judge = of_engine(recipe), of_judges(recipe)
    return dict.fromkeys(range(0, sampling, engine), engine) | dict.fromkeys(range(sampling, devices, judge), judge)


def in_workers(recipe: Recipe) -> Recipe:
    """The recipe with its workers in place of its devices, in ``devices_per_controller`` and ``placement``; itself
    where each worker is one device."""
    if not recipe.placement.apart or not has_replicas(recipe):
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
    if not recipe.placement.apart or not has_replicas(recipe):
        return [1] * recipe.devices_per_controller
    trainers = recipe.placement.training(recipe.devices_per_controller)
    workers, judging = in_workers(recipe).devices_per_controller, (recipe.placement.judges or 0) // of_judges(recipe)
    sampling = workers - trainers - judging
    return [1] * trainers + [of_engine(recipe)] * sampling + [of_judges(recipe)] * judging


def of_replicas(recipe: Recipe) -> Iterator[str]:
    """Contradictions in replicas of a controller with several devices, as ``key: why; the edit``."""
    if not has_replicas(recipe):
        return
    devices, engine, judge = recipe.devices_per_controller, of_engine(recipe), of_judges(recipe)
    placement, trainers = recipe.placement, recipe.placement.training(recipe.devices_per_controller)
    if not placement.apart:
        yield from _beside_training(recipe)
        trainers = 0
    judges = (placement.judges or 0) if placement.apart else placement.judging(devices)
    sampling = devices - trainers - judges
    if sampling % engine or sampling < engine:
        good = trainers + judges + max(1, sampling // engine) * engine
        yield (
            f"rollout.options: an engine takes {engine} devices, and {sampling} of {devices} (devices_per_controller) "
            f"sample; set devices_per_controller to {good}, or lower the engine's parallel size"
        )
    if judge > 1 and (not judges or judges % judge) and placement.type != "colocate":
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


def _beside_training(recipe: Recipe) -> Iterator[str]:
    """Check replicas whose devices train too: no device of them may change its role."""
    kind, judge = recipe.placement.type, of_judges(recipe)
    if kind in ("greedy", "adaptive"):
        yield (
            f"placement: with {kind} a device changes its role by itself, and those of a server on "
            f"{max(of_engine(recipe), judge)} devices cannot; set placement.type to partial, or to disaggregated"
        )
    elif kind == "colocate" and judge > 1:
        least = judge + of_engine(recipe)
        more = f"devices_per_controller to {least} or more and set " if recipe.devices_per_controller < least else ""
        yield (
            f"placement: with colocate every device samples and then judges, and a judge's server takes {judge} "
            f"devices; set {more}placement to {{type: partial, judges: {judge}}}, whose first devices sample and whose "
            "last judge before all train, or to disaggregated"
        )

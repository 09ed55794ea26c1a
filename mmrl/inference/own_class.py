"""Rollout engines of a user's own: ``rollout.engine: path/to/file.py:Class``.

The class is a ``RolloutEngine`` (``mmrl.core.rollout_engine``). It is built as ``Class(model, **given, **options)``:
the directory or hub name of the model, what of ``GIVEN`` its constructor names, and the recipe's ``rollout.options``.
``several = True`` in the class says that an instance for each controller and device works.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial

from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError, refuse
from mmrl.core.plugins.loading import LoadError, load_from_file
from mmrl.core.plugins.user_code import blaming, defined_at, option_problems, source_of
from mmrl.core.rollout_engine import RolloutEngine

GIVEN = ("max_model_len", "dtype", "lora_rank", "images", "clips", "bucket_bytes", "device")
"""What the constructor may ask for by name: tokens of prompt and response together, the weights' dtype, the rank of the
adapter that trains (None: all weights train), the most pictures and clips of a prompt, bytes of weights that travel at
a time, and the device that trains."""
SETTABLE = {"max_model_len", "images", "clips"}
"""Those of them that the recipe's options may set, as for engines of ours."""
KNOBS = {"min_new_tokens": 0, "repetition_penalty": 1.0, "min_p": 0.0}
"""Settings of sampling that a class must say it obeys, and their values where nothing is asked."""
METHODS = ("generate", "update", "update_lora", "sleep", "wake", "close")
ATTRIBUTES = ("max_model_len", "sleeps")


def find(name: str) -> type:
    """The class that ``path/to/file.py:Class`` names. Raises ``UserError``."""
    file = name.rpartition(":")[0]
    try:
        with blaming(f"rollout.engine: importing {name}", file):
            found = load_from_file(name)
    except LoadError as error:
        raise UserError(f"rollout.engine: {error}") from None
    if not inspect.isclass(found):
        raise UserError(f"rollout.engine: {name} is no class; write class {name.rpartition(':')[2]} with {_listed()}")
    return found


def class_problems(engine: type, name: str, options: Mapping[str, object]) -> list[str]:
    """What is wrong with the class, or with ``options`` as arguments of its constructor; nothing is built."""
    place = defined_at(engine, name.rpartition(":")[0], name)
    missing = [method for method in METHODS if not callable(getattr(engine, method, None))]
    missing += [attribute for attribute in ATTRIBUTES if not _has(engine, attribute)]
    wrong = []
    if missing:
        wrong.append(
            f"rollout.engine: {place}: {engine.__name__} lacks {', '.join(missing)}; an engine has {_listed()}"
        )
    try:
        parameters = list(inspect.signature(engine).parameters.values())
    except (TypeError, ValueError):
        return [*wrong, f"rollout.engine: {place}: the signature of {engine.__name__} cannot be read; write __init__"]
    first = parameters[0] if parameters else None
    if first is None or first.kind not in (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD) or first.name in GIVEN:
        form = "def __init__(self, model, *, max_model_len, ...)"
        return [*wrong, f"rollout.engine: {place}: {engine.__name__} takes no model first; write {form}"]
    given = {*GIVEN} - (SETTABLE & {*options})
    found = option_problems(engine.__name__, engine, options, {first.name, *given})
    return [*wrong, *(f"rollout.{problem}" for problem in found)]


def problems(recipe: Recipe) -> list[str]:
    """Why the class that the recipe names cannot be its engine, with the edit; empty for engines of ours."""
    rollout = recipe.rollout
    if not rollout.own_class:
        return []
    try:
        engine = find(rollout.engine)
    except UserError as error:
        return [str(error)]
    wrong = class_problems(engine, rollout.engine, rollout.options)
    devices = recipe.controllers * recipe.devices_per_controller
    if devices > 1 and not getattr(engine, "several", False):
        wrong.append(
            f"rollout.engine: {engine.__name__} does not say that one of it for each of {devices} devices works; set "
            "controllers and devices_per_controller to 1, or write several = True in the class where it does"
        )
    for name, default in KNOBS.items():
        if getattr(recipe.decoding, name) != default and name not in getattr(engine, "understands", ()):
            wrong.append(
                f"sampling.{name}: {engine.__name__} does not say that it obeys it; remove it, or write understands = "
                f"({name!r},) in the class where it does (Settings.{name})"
            )
    if recipe.model.lora and "lora_rank" not in _taken(engine):
        wrong.append(
            f"rollout.engine: {engine.__name__} takes no lora_rank, and model.lora trains an adapter; remove "
            "model.lora, or have its constructor take lora_rank and its update_lora apply the adapter"
        )
    return wrong


def takes(name: str, argument: str) -> bool:
    """Whether the constructor of ``path/to/file.py:Class`` names ``argument``. Raises ``UserError``."""
    return argument in _taken(find(name))


def ends_to_sleep(recipe: Recipe) -> bool:
    """Whether the recipe's own engine, which is to sleep, says that it cannot: then it is ended and started again."""
    asked = recipe.rollout.own_class and recipe.placement.sleep
    return asked and getattr(find(recipe.rollout.engine), "sleeps", None) is False


def starter(
    name: str, path: str, options: Mapping[str, object], given: Mapping[str, object]
) -> Callable[[], RolloutEngine]:
    """What starts the engine ``name`` on the model at ``path``. Raises ``UserError`` where the class cannot be one."""
    engine = find(name)
    refuse(class_problems(engine, name, options))
    taken = {key: value for key, value in given.items() if key in _taken(engine)}
    return partial(_start, engine, name, path, {**taken, **options})


def _start(engine: type, name: str, path: str, arguments: Mapping[str, object]) -> RolloutEngine:
    file = name.rpartition(":")[0]
    with blaming(f"starting the rollout engine {name}", file, "that line or rollout.options"):
        return engine(path, **arguments)


def _taken(engine: type) -> set[str]:
    parameters = inspect.signature(engine).parameters.values()
    return {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def _has(engine: type, attribute: str) -> bool:
    """Whether instances have ``attribute``: of the class, declared there, or assigned in one of its methods."""
    declared = any(attribute in vars(cls).get("__annotations__", {}) for cls in engine.__mro__)
    assigned = any(f"self.{attribute}" in source_of(cls) for cls in engine.__mro__[:-1])
    return hasattr(engine, attribute) or declared or assigned


def _listed() -> str:
    return ", ".join((*METHODS, *ATTRIBUTES))

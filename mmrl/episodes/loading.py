"""Find an environment by its name in a recipe, make one for each episode, and close those that are over."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from mmrl.config import environment
from mmrl.config.drop_ins import DEFAULT
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.plugins.loading import load
from mmrl.core.plugins.user_code import describe
from mmrl.episodes.environment import Drawer, Environment
from mmrl.episodes.isolated import Isolated, end
from mmrl.episodes.pool import Returned, awaited, returned_within
from mmrl.episodes.tools import Toolbox, of_class, schemas_of

_MADE = 120.0
"""Seconds in which an environment must be made at least, and its tools described: libraries are imported."""


@dataclass(frozen=True)
class Factory:
    """``make`` makes an environment for one episode; ``schemas``: the tools that it shows to the model; ``pictures``:
    it says that it shows pictures, by an attribute ``pictures = True`` or by the type that a tool returns;
    ``stateless``: it is of functions alone; ``closes``: it has a method that closes it; ``not_apart``: why it
    cannot have processes of its own, by its attribute of that name; ``drawer``: the model that its episodes share."""

    make: Callable[[], Environment]
    schemas: list[JsonObject]
    pictures: bool = False
    stateless: bool = False
    closes: bool = False
    not_apart: str = ""
    drawer: Drawer | None = None


def opened(settings: environment.Environment) -> Factory:
    """The environment of a recipe; each is made in a process of its own where the recipe says so. Makes one to try, and
    closes it. Raises ``UserError`` where it cannot be made, or a tool has no schema."""
    if settings.isolate:
        return _apart(settings)
    make = maker(settings)
    first = make()
    try:
        return Factory(make, **about(first), drawer=getattr(first, "drawer", None))
    finally:
        closed(first, settings.timeout)


def about(world: Environment) -> dict[str, Any]:
    """The fields of ``Factory`` that an environment says, but for ``drawer``. Raises ``UserError``."""
    tools = getattr(world, "tools", ())
    return {
        "schemas": schemas_of(tools),
        "pictures": getattr(world, "pictures", False) is True or any(map(_returns_picture, tools)),
        "stateless": isinstance(world, Toolbox) and world.world is None,
        "closes": closer_of(world) is not None,
        "not_apart": getattr(world, "not_apart", ""),
    }


def _apart(settings: environment.Environment) -> Factory:
    """Nothing of it is made in this process, not even the one to try; the class of a shipped one may refuse before a
    process imports it and loads its model."""
    if settings.name.isidentifier() and (why := getattr(_class_of(settings), "not_apart", "")):
        raise _together(why)
    processes = Isolated(settings)
    first = processes.make()
    try:
        returned = returned_within(max(_MADE, settings.timeout), first.about)
    finally:
        closed(first, settings.timeout)
    if returned.error:
        raise UserError(
            f"environment.name: {settings.name} cannot be made in a process of its own: {returned.error}; mend its file"
        )
    said: dict[str, Any] = dict(returned.value[0].info)
    if "refused" in said:
        raise UserError(said["refused"])
    if said["not_apart"]:
        raise _together(said["not_apart"])
    processes.stateless = said["stateless"]
    return Factory(processes.make, **said)


def draws(settings: environment.Environment | None) -> bool:
    """Whether the picture that an episode drew last is ``sample.image``: the class says so by ``draws = True``. Raises
    ``LoadError``."""
    return settings is not None and getattr(_class_of(settings), "draws", False) is True


def _class_of(settings: environment.Environment) -> Any:
    found = load("environments", settings.name)
    return getattr(found, DEFAULT["environments"], None) if isinstance(found, ModuleType) else found


def _together(why: str) -> UserError:
    return UserError(f"environment.isolate: {why}; set environment.isolate to false")


def maker(settings: environment.Environment) -> Callable[[], Any]:
    """What makes an environment for one episode. Raises ``LoadError``."""
    found = _class_of(settings)
    if inspect.isfunction(found):
        return partial(Toolbox, [found])
    if isinstance(found, list | tuple):
        return partial(Toolbox, found)
    return partial(_of_class, found, settings)


def _returns_picture(tool: Callable[..., Any]) -> bool:
    """Whether its type says so: ``Image`` of PIL, or ``Media``, alone or in a list."""
    returned = getattr(tool, "__annotations__", {}).get("return", "")
    return re.search(r"\b(Image|Media)\b", returned if isinstance(returned, str) else repr(returned)) is not None


def _of_class(found: Callable[..., Any], settings: environment.Environment) -> Environment:
    try:
        made = found(**settings.options)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"environment.options: {settings.name} cannot be made with them: {describe(error)}; correct them, or the "
            "class"
        ) from error
    if isinstance(made, Environment):
        return made
    tools = of_class(made)
    if not tools.tools:
        raise UserError(
            f"environment.name: {settings.name} has neither reset and step nor a public method that a model could "
            "call; give the class one of them (docs/environments.md)"
        )
    return tools


def closer_of(world: object) -> Callable[[], Any] | None:
    """What closes it: its method ``close``, or else ``__exit__``; None where it has neither. A class of tools is asked
    itself."""
    world = world.world if isinstance(world, Toolbox) else world
    if callable(close := getattr(world, "close", None)):
        return close
    leave = getattr(type(world), "__exit__", None)
    return None if leave is None else partial(leave, world, None, None, None)


async def close(world: Environment) -> Returned | None:
    """Close it, where it can be closed. Raises what its method raises."""
    closer = closer_of(world)
    value = None if closer is None else await awaited(closer())
    return value if isinstance(value, Returned) else None


def closed(world: Environment, timeout: float) -> str:
    """Close it and end its process, where it has one, after at most ``timeout`` seconds. Returns why it could not be
    closed."""
    why = ""
    if closer_of(world) is not None:
        why = returned_within(timeout, partial(close, world)).error
    end(world)
    return why

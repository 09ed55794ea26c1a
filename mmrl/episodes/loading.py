"""Find an environment by its name in a recipe, and make one for each episode."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

from mmrl._load import load
from mmrl.config import environment
from mmrl.config.drop_ins import DEFAULT
from mmrl.episodes.environment import Environment
from mmrl.episodes.tools import Toolbox, of_class, schemas_of
from mmrl.errors import UserError
from mmrl.json_types import JsonObject
from mmrl.user_code import describe


@dataclass(frozen=True)
class Factory:
    """``make`` makes an environment for one episode; ``schemas``: the tools that it shows to the model."""

    make: Callable[[], Environment]
    schemas: list[JsonObject]


def opened(settings: environment.Environment) -> Factory:
    """The environment of a recipe. Makes one to try. Raises ``UserError`` where it cannot be made, or a tool has no
    schema."""
    found = load("environments", settings.name)
    if isinstance(found, ModuleType):
        found = getattr(found, DEFAULT["environments"])
    if inspect.isfunction(found):
        make: Callable[[], Any] = partial(Toolbox, [found])
    elif isinstance(found, list | tuple):
        make = partial(Toolbox, found)
    else:
        make = partial(_of_class, found, settings)
    first = make()
    return Factory(make, schemas_of(getattr(first, "tools", ())))


def _of_class(found: Callable[..., Any], settings: environment.Environment) -> Environment:
    try:
        made = found(**settings.options)
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

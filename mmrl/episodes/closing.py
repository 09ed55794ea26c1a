"""Close the environments whose episodes are over. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from mmrl.episodes.environment import Environment
from mmrl.episodes.isolated import end
from mmrl.episodes.pool import Pool, Returned
from mmrl.episodes.tools import Toolbox


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
    made = None if closer is None else closer()
    value = await made if inspect.isawaitable(made) else made
    return value if isinstance(value, Returned) else None


def closed(world: Environment, timeout: float) -> str:
    """Close it and end its process, where it has one, after at most ``timeout`` seconds. Returns why it could not be
    closed."""
    why = ""
    if closer_of(world) is not None:
        pool: Pool[str] = Pool(1, timeout)
        pool.submit("close", partial(close, world))
        ((_, returned),) = pool.ready(wait=True)
        why = returned.error
    end(world)
    return why

"""Functions and methods that a model can call, as an environment.

Their types and docstrings become JSON schemas by transformers' own ``get_json_schema``. A class without ``step`` is
taken as TRL takes one of its ``environment_factory``: each public method is a tool, ``reset`` gets the columns of the
record, and ``get_reward`` adds a reward.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import ConfigDict, ValidationError, validate_call

from mmrl.core.episode import FAILED, Action, Call, Content, Observation
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.plugins.loading import load
from mmrl.core.plugins.user_code import describe
from mmrl.core.trajectory import Prompt
from mmrl.episodes.pool import awaited
from mmrl.episodes.shown import content_of, is_content

Tool = Callable[..., Any]
_NO_TOOLS = ("reset", "get_reward", "close")


class Toolbox:
    """Final class, an ``Environment`` of ``tools``: functions, or their names (``path/to/file.py:name``)."""

    def __init__(self, tools: Sequence[str | Tool], world: Any = None) -> None:
        self.tools = [load("environments", tool) if isinstance(tool, str) else tool for tool in tools]
        self._by_name = {tool.__name__: tool for tool in self.tools}
        self.world = world
        """The instance whose methods they are; None of functions."""

    async def reset(self, prompt: Prompt, seed: int) -> Content | None:
        if not hasattr(self.world, "reset"):
            return None
        said = await awaited(self.world.reset(**{**prompt.meta, "prompt": prompt.text}))
        return None if said is None else shown(said)

    async def step(self, action: Action) -> list[Observation]:
        """Make the calls, one after another. What a tool raises is told to the model. Without a call the episode is
        over."""
        if action.calls:
            return [await self._made(call) for call in action.calls]
        asks = getattr(self.world, "get_reward", None)
        reward = 0.0 if asks is None else float(await awaited(asks()))
        return [Observation(reward=reward, done=True)]

    async def _made(self, call: Call) -> Observation:
        if call.error:
            return refused(call, call.error)
        tool = self._by_name.get(call.name)
        if tool is None:
            return refused(call, f"there is no tool {call.name!r}; there are {', '.join(self._by_name)}")
        try:
            checked = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(tool)
            result = await awaited(checked(**call.arguments))
        except ValidationError as error:
            first = error.errors()[0]
            return refused(call, f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
        except Exception as error:
            return refused(call, describe(error))
        return Observation(
            shown(result), call_id=call.id
        )  # what it raises ends the episode: the model cannot mend a picture


def of_class(made: Any) -> Toolbox:
    """The tools of an instance: its public methods."""
    names = [name for name in dir(type(made)) if not name.startswith("_") and name not in _NO_TOOLS]
    methods = [name for name in names if inspect.isfunction(inspect.getattr_static(type(made), name))]
    return Toolbox([getattr(made, name) for name in methods], made)


def schemas_of(tools: Sequence[Tool | JsonObject]) -> list[JsonObject]:
    """The JSON schema of each tool, which may be one itself. Raises ``UserError`` for a tool that has none."""
    found: list[JsonObject] = []
    for tool in tools:
        if isinstance(tool, Mapping):
            found.append(tool)
            continue
        from transformers.utils.chat_template_utils import get_json_schema

        name = getattr(tool, "__name__", repr(tool))
        open_ended = [
            p.name for p in inspect.signature(tool).parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        if open_ended:
            raise UserError(
                f"environment: the tool {name} takes any arguments ({', '.join(open_ended)}), which a schema cannot "
                "say; give each argument a name, a type and a line under Args:"
            )
        try:
            found.append(get_json_schema(tool))
        except Exception as error:  # its reader of docstrings raises errors of its own
            raise UserError(
                f"environment: the tool {name} has no schema: {describe(error)}; give every argument a type, and the "
                "function a docstring with a line for each under Args:"
            ) from error
    return found


def shown(result: object) -> Content:
    """What a tool returned: a text, a picture or parts of a message as they are, all else as ``str``."""
    return content_of(result) if isinstance(result, str) or is_content(result) else str(result)


def refused(call: Call, why: str) -> Observation:
    """What is told of a call that was not made."""
    return Observation(json.dumps({"error": why}, ensure_ascii=False), call_id=call.id, info={FAILED: why})

"""A world of gymnasium, or of a package for it (MiniGrid, ALE): ``gymnasium:ID``, as in ``gymnasium:CartPole-v1``.

    environment:
      name: gymnasium:MiniGrid-Empty-Random-5x5-v0
      options:
        make: {tile_size: 8, max_steps: 20, highlight: false} # keyword arguments of gymnasium.make
        wrappers: [ViewSizeWrapper: {agent_view_size: 5}]     # the innermost first
        actions: {left: 0, right: 1, forward: 2}              # words to actions
        show: picture                                         # text, picture or both

The model acts with the last word of its turn that ``actions`` has; without ``actions`` of a discrete world, the words
are the numbers of its actions. A turn without such a word is told the words, and the world stands still; it costs
``penalty`` (0).

``show: text`` is what the world draws as text (its mode ``ansi``), with what it colours in brackets, or else the
observation, as JSON; a dictionary has a line for each key. ``picture`` is what ``render`` draws. The reward of a step
is the world's; ``rewards: [{name: environment}]`` is their sum.

The world is looked for in gymnasium, and in the installed packages that require it. ``wrappers`` are names of
``gymnasium.wrappers``, or of ``wrappers`` in the world's package, and nothing else.

BabyAI prints while it makes its levels: ``environment.isolate`` keeps that off the terminal.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from PIL import Image

from mmrl.config.errors import did_you_mean
from mmrl.core.episode import Action, Observation, no_action
from mmrl.core.errors import UserError
from mmrl.core.installing import extra_of, optional
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.plugins.user_code import describe
from mmrl.core.trajectory import Prompt

Show = Literal["text", "picture", "both"]
_COLOURED = re.compile(r"\x1b\[[0-9;]+m(.*?)\x1b\[0m", re.DOTALL)


def __getattr__(name: str) -> Callable[..., World]:
    """What makes the world ``name``. Raises ``UserError`` where none is installed."""
    if name.startswith("_"):
        raise AttributeError(name)
    return partial(World, _spec(name))


class World:
    """One episode of a world; the options are those of the module's docstring. Raises ``UserError`` for an option that
    the world has not."""

    def __init__(
        self,
        spec: Any,
        *,
        make: JsonObject | None = None,
        wrappers: Sequence[str | JsonObject] = (),
        actions: Mapping[str, Json] | None = None,
        show: Show = "text",
        penalty: float = 0.0,
    ) -> None:
        if show not in ("text", "picture", "both"):
            raise UserError(f"environment.options.show is {show!r}; write text, picture or both")
        if penalty < 0:
            raise UserError(f"environment.options.penalty is {penalty}; it is 0 or more, and is subtracted")
        self._show, self._penalty = show, penalty
        self.pictures = show != "text"
        self._world = _made(spec, make or {}, show)
        for wrapper in wrappers:
            self._world = _wrapped(self._world, spec, wrapper)
        self._actions = _words(self._world.action_space, actions)
        listed = "|".join(re.escape(word) for word in sorted(self._actions, key=len, reverse=True))
        self._word = re.compile(rf"(?<!\w)(?:{listed})(?!\w)", re.IGNORECASE)

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        observation, _ = self._world.reset(seed=seed)
        return Observation(self._shown(observation))

    def step(self, action: Action) -> Observation:
        named = self._word.findall(action.text)
        if not named:
            return no_action(f"Write one of: {', '.join(self._actions)}.", self._penalty)
        observation, reward, terminated, truncated, _ = self._world.step(self._actions[named[-1].lower()])
        return Observation(self._shown(observation), float(reward), bool(terminated), bool(truncated))

    def close(self) -> None:
        self._world.close()

    def _shown(self, observation: object) -> list[str | Image.Image]:
        drawn: Any = None if self._world.render_mode is None else self._world.render()
        pictures: list[str | Image.Image] = [] if self._show == "text" else [Image.fromarray(drawn)]
        if self._show == "picture":
            return pictures
        text = _COLOURED.sub(r"[\1]", drawn).strip("\n") if isinstance(drawn, str) else _text(observation)
        return [text, *pictures]


def _spec(id: str) -> Any:
    """What gymnasium knows of a world. Imports packages that require gymnasium until one registers it."""
    registry = optional("gymnasium", "gymnasium", f"environment.name: gymnasium:{id}").registry
    packages = [] if id in registry else _packages()
    for package in packages:
        with contextlib.suppress(ImportError):  # of a package that lacks a part of its own
            importlib.import_module(package)
        if id in registry:
            break
    if id not in registry:
        meant, beside = did_you_mean(id, list(registry)), "".join(f", {package}" for package in packages)
        raise UserError(
            f"environment.name: there is no world {id!r} in gymnasium{beside}{meant}; correct the name, or install the "
            "package that has it"
        )
    return registry[id]


def _packages() -> list[str]:
    """The installed packages that require gymnasium, by the names that are imported."""
    found = set[str]()
    for one in importlib.metadata.distributions():
        if any(re.match(r"gymnasium(?![\w.-])", r, re.IGNORECASE) and not extra_of(r) for r in one.requires or ()):
            tops = (one.read_text("top_level.txt") or "").split()
            files = [file.parts for file in one.files or ()]
            tops = tops or [parts[0] for parts in files if len(parts) == 2 and parts[1] == "__init__.py"]
            found |= set(tops or [one.name.replace("-", "_")])
    return sorted(found)


def _made(spec: Any, given: JsonObject, show: Show) -> Any:
    gym = optional("gymnasium", "gymnasium", "environment.name")
    modes = getattr(gym.envs.registration.load_env_creator(spec.entry_point), "metadata", {}).get("render_modes", ())
    os.environ.setdefault("SDL_VIDEODRIVER", "dummy")  # pygame draws into memory, and looks for no screen
    mode = "rgb_array" if show != "text" else "ansi" if "ansi" in modes else None
    if mode not in (None, *modes):
        raise UserError(f"environment.options.show is {show}, and {spec.id} draws no pictures; write show: text")
    try:
        return gym.make(spec, render_mode=mode, disable_env_checker=True, **given)
    except Exception as error:  # of a package of others
        raise UserError(
            f"environment.options.make: {spec.id} cannot be made: {describe(error)}; correct the arguments, or install "
            "what it needs"
        ) from error


def _wrapped(world: Any, spec: Any, wrapper: str | JsonObject) -> Any:
    """``world`` in a wrapper of gymnasium or of its own package: no other code is found by a name."""
    gym = optional("gymnasium", "gymnasium", "environment.name")
    name, given = (wrapper, None) if isinstance(wrapper, str) else next(iter(wrapper.items()), ("", None))
    known: dict[str, Any] = {}
    for package in ("gymnasium", type(world.unwrapped).__module__.partition(".")[0]):
        with contextlib.suppress(ImportError):
            module = importlib.import_module(f"{package}.wrappers")
            known |= {n: v for n, v in vars(module).items() if isinstance(v, type) and issubclass(v, gym.Wrapper)}
    if name not in known:
        meant = did_you_mean(str(name), list(known))
        raise UserError(
            f"environment.options.wrappers: {spec.id} has no wrapper {name!r}{meant}; write one of "
            f"{', '.join(sorted(known))}"
        )
    try:
        return known[name](world, **_keywords(given))
    except Exception as error:  # of a package of others
        raise UserError(
            f"environment.options.wrappers: {name} cannot be made: {describe(error)}; correct its arguments, as in "
            "[TimeLimit: {max_episode_steps: 20}]"
        ) from error


def _words(space: Any, given: Mapping[str, Json] | None) -> dict[str, Any]:
    """Words to the actions of ``space``."""
    discrete = type(space).__name__ == "Discrete"
    if given is None:
        if not discrete:
            raise UserError(f"environment.options.actions: name the actions, each with a value of {space}")
        first = int(space.start)
        given = {str(n): n for n in range(first, first + int(space.n))}
    found: dict[str, Any] = {}
    for word, value in given.items():
        try:
            (action,) = space.from_jsonable([value])
            fits = bool(word.strip()) and space.contains(action)
        except Exception:  # of whatever the value is
            fits, action = False, None
        if not fits:
            whole = f"a whole number from {space.start} to {space.start + space.n - 1}" if discrete else ""
            raise UserError(
                f"environment.options.actions: {word!r} is {value!r}, and an action is {whole or f'one of {space}'}; "
                "correct it"
            )
        found[word.lower()] = action
    if not found:
        raise UserError("environment.options.actions is empty; name an action, or leave the key out")
    return found


def _keywords(given: Json) -> JsonObject:
    """Raises ``TypeError``."""
    if isinstance(given, Mapping | None):
        return given or {}
    raise TypeError(f"its arguments are {given!r}, and no keys and values")


def _text(observation: object) -> str:
    if isinstance(observation, str):
        return observation
    if isinstance(observation, Mapping):
        return "\n".join(f"{key}: {_text(value)}" for key, value in observation.items())
    return json.dumps(observation, default=lambda value: value.tolist())

"""Load a reward by the name in a recipe; its signature and options are checked before it is built.

Imports no torch: ``mmrl serve`` and ``mmrl score`` run rewards in environments that have none.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from concurrent.futures import wait
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar

from mmrl.core.daemon import in_daemon
from mmrl.core.errors import UserError, refuse
from mmrl.core.json_types import JsonObject
from mmrl.core.notices import tell
from mmrl.core.plugins import loading as _load
from mmrl.core.plugins.python_objects import in_this_process
from mmrl.core.plugins.user_code import blaming, defined_at, option_problems
from mmrl.core.reward_contract import CheckedError, Declaration, Input, Sleeper, declaration_of, only_checks
from mmrl.core.trajectory import Sample
from mmrl.rewards.last_words import watched
from mmrl.rewards.peers import adapted

if TYPE_CHECKING:
    import torch

CLOSE_S = 10.0
"""Seconds that a reward's ``close`` may take."""
_FORM = "def score(samples, *, context)"
_EDIT = "that line or the reward's options"
T = TypeVar("T")


NOBODY_VOTES = (
    "eval.maj_at: no reward says what the answer of a response is; take one that does (answer:number), give your class "
    "a method answer_of(sample) that returns it as text, or remove eval.maj_at"
)
"""Where a majority is asked for, and there are no votes."""


@dataclass(frozen=True)
class Found:
    """A reward as its file defines it: a function, or a class not yet built."""

    name: str
    target: Any
    file: str | None

    @property
    def declaration(self) -> Declaration:
        """Its declaration, before it is built with options."""
        return declaration_of(self.target)

    def reads(self, options: JsonObject) -> tuple[Input, ...]:
        """The fields of a sample that it reads with these ``options``. Raises ``UserError``."""
        declared = self.declaration
        if declared.reads is None:
            return declared.inputs
        return asked_of_options(self, lambda: replace(declared, inputs=tuple(declared.reads(options))).inputs)  # type: ignore[misc]

    @property
    def votes(self) -> bool:
        """Whether it says which answer a response gives."""
        return callable(getattr(self.target, "answer_of", None))

    @property
    def place(self) -> str:
        """``file:line`` of its definition, for messages."""
        return defined_at(self.target, self.file, self.name)


@dataclass(frozen=True)
class Loaded:
    """A reward ready to be called as ``call(samples, context=...)``."""

    name: str
    call: Callable[..., Any]
    declaration: Declaration
    is_async: bool
    file: str | None
    place: str

    @property
    def answer_of(self) -> Callable[[Sample], str | None] | None:
        """What says which answer a response gives, of a class that has such a method: equal answers vote together."""
        return getattr(getattr(self.call, "__self__", None), "answer_of", None)

    @property
    def sleeper(self) -> Sleeper | None:
        """The instance, where it computes on a device and has ``sleep`` and ``wake``; else None."""
        holder = getattr(self.call, "__self__", None)
        return holder if self.declaration.device and can_sleep(holder) else None

    def awake(self, device: torch.device | str) -> Loaded:
        """Itself, after its models are loaded onto ``device``, which would else happen at the first call.

        Raises ``UserError``.
        """
        self.wake(device)
        return self

    def wake(self, device: torch.device | str) -> bool:
        """Load its models onto ``device``. Returns whether later calls are faster. Raises ``UserError``."""
        return bool(self._turned("wake", device))

    def sleep(self, device: torch.device | str) -> None:
        """Free the memory of ``device``, where the reward can sleep. Raises ``UserError``."""
        self._turned("sleep", device)

    def _turned(self, method: str, device: torch.device | str) -> bool | None:
        with blaming(f"the {method}() of the reward {self.name}", self.file), watched(self.name):
            return None if self.sleeper is None else getattr(self.sleeper, method)(device)

    def close(self) -> None:
        """Call its method ``close``, where it has one: in a thread, since that may hang."""
        close = getattr(getattr(self.call, "__self__", None), "close", None)
        if not callable(close):
            return

        def run() -> None:
            with watched(self.name, here=False):
                close()

        closed = in_daemon(run, "mmrl-reward-close")
        if wait([closed], CLOSE_S).done:
            closed.result()
        else:
            tell(f"warning: close() of the reward {self.name} ({self.place}) hangs; given up after {CLOSE_S:g} s")


def find(name: str) -> Found:
    """Import what ``name`` stands for; a file is looked up from the current folder.

    ``shapes`` and ``my.py`` stand for ``shapes:score`` and ``my.py:score``. Raises ``UserError``.
    """
    module_name, _, attribute = name.partition(":")
    if in_this_process(name):
        target = _load.load("rewards", name)
        return Found(name, adapted(target) or target, _file_of(target))
    module = _module(module_name)
    attribute = attribute or "score"
    if not hasattr(module, attribute):
        public = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        offered = [n for n in public if not n.startswith("_")]
        raise UserError(
            f"{called(module_name)} has no {attribute!r}; it has: {', '.join(offered) or 'no functions or classes'}"
        )
    target = getattr(module, attribute)
    return Found(name, adapted(target) or target, getattr(module, "__file__", None))


def called(name: str) -> str:
    """The name of a reward in messages; for a file that a recipe names without the folder."""
    return Path(name).name if name.startswith("/") else name


def _file_of(target: object) -> str | None:
    """The file that defines ``target``, or the class of it; None where that cannot be told (a notebook)."""
    defined = target if inspect.isroutine(target) or inspect.isclass(target) else type(target)
    try:
        return inspect.getsourcefile(defined)
    except (OSError, TypeError):
        return None


def problems(found: Found, options: JsonObject) -> list[str]:
    """What is wrong with the reward's signature or with its ``options``; empty when it can be called."""
    target = found.target
    if _is_built(target):
        given = [f"options.{key}: {found.name} is built already; give it to its constructor" for key in options]
        return given + _call_problems(found, target.score, {})
    if not callable(target):
        return [f"{found.place}: {found.name} is a {type(target).__name__}; a reward is a function or class: {_FORM}"]
    if not inspect.isclass(target):
        return _call_problems(found, target, options)
    method = getattr(target, "score", None)
    if method is None:
        return [f"{found.place}: the class {target.__name__} has no method score; add {_FORM[:10]}self, {_FORM[10:]}"]
    wrong = _call_problems(found, functools.partial(method, None), {}) + option_problems(
        found.name, target, options, set()
    )
    return wrong + _sleep_problems(found)


def refused(found: Found, options: JsonObject) -> list[str]:
    """What the constructor of a reward refuses of its resolved ``options`` before it loads or connects.

    Empty for a function, and for a class that does not declare ``checks``: its constructor may load a model.
    """
    if not (inspect.isclass(found.target) and found.declaration.checks):
        return []
    try:
        with only_checks():
            build(found, options).close()
    except CheckedError:
        return []
    except UserError as error:
        return [str(error)]
    return []


def build(found: Found, options: JsonObject) -> Loaded:
    """Bind a function's options, or build a class with them. Raises ``UserError`` when either cannot work."""
    refuse(problems(found, options))
    holder: Any = found.target
    if inspect.isclass(holder):
        with blaming(f"building the reward {found.name}", found.file, _EDIT), watched(found.name):
            holder = holder(**options)
        call = holder.score
    elif _is_built(holder):
        call = holder.score
    else:
        call = functools.partial(holder, **options)
    declaration = declaration_of(holder)
    is_async = inspect.iscoroutinefunction(call)
    if is_async and declaration.differentiable:
        raise UserError(f"{found.place}: a differentiable reward runs inside the update; make it def, not async def")
    return Loaded(found.name, call, declaration, is_async, found.file, found.place)


def _is_built(target: object) -> bool:
    """Whether a reward is an object with a method ``score``, made by the user."""
    return not inspect.isclass(target) and not inspect.isroutine(target) and callable(getattr(target, "score", None))


def asked_of_options(found: Found, ask: Callable[[], T]) -> T:
    """The result of ``ask``, which calls a function of the reward's file on its options. Raises ``UserError``."""
    with blaming(f"looking at the options of {found.name}", found.file, _EDIT), watched(found.name):
        return ask()


def _module(name: str) -> ModuleType:
    file = Path(name).expanduser().resolve() if name.endswith(".py") else None
    if file is not None and not file.is_file():
        raise UserError(f"there is no file {name}; looked from {Path.cwd()}")
    place = str(file) if file else None
    with blaming(f"importing the reward {called(name)}", place), watched(name):
        return _load.load("rewards", place or name)


def _call_problems(found: Found, function: Callable[..., object], options: JsonObject) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return [f"{found.place}: the signature of {found.name} cannot be read; wrap it: {_FORM}"]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    by_name = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    wide = any(p.kind is p.VAR_KEYWORD for p in parameters)
    first = positional[0].name if positional else ""
    if not positional or first == "context":
        return [f"{found.place}: {found.name} takes no samples; write {_FORM}"]
    if "context" not in by_name and not wide:
        return [f"{found.place}: {found.name} takes no 'context'; write {_FORM}"]
    return option_problems(found.name, function, options, {first, "context"})


def can_sleep(target: object) -> bool:
    """Whether a reward, or its class, has the methods of a ``Sleeper``."""
    return hasattr(target, "sleep") and hasattr(target, "wake")


def _sleep_problems(found: Found) -> list[str]:
    """What is wrong with the methods that put a class to sleep and wake it."""
    if not (found.declaration.device and can_sleep(found.target)):
        return []
    wrong = []
    for name in ("sleep", "wake"):
        try:
            inspect.signature(getattr(found.target, name)).bind(None, "cpu")
        except TypeError:
            edit = f"write def {name}(self, device)"
            wrong.append(f"{found.place}: {name} of {found.target.__name__} must take the device alone; {edit}")
    return wrong

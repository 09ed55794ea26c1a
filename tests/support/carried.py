"""The edits of keys that messages name, carried out where a test causes the message.

A test that raises a ``UserError`` leaves here its text and the calls on the stack that were given a recipe. After the
test they are repeated, the innermost first: one must complain again as it was, and with each edit that the text names
not complain of it. ``tests/support/carried_table.py`` says which test does that for which message of the code, which
test does it by hand, and why it is done for no other. A test by hand causes the message, makes the edit and sees it
gone.

    python -m tests.support.carried                               # every message that names an edit, and what carries
    it out MMRL_CARRIED=FILE pytest tests/test_x.py              # tries all messages of these tests; a line for each in
    FILE
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from types import CodeType, FrameType
from typing import Any

from pydantic import ValidationError

from mmrl.config.loader import LoadedRecipe
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from tests.support.messages import ALTERNATIVES, EDITS, GAP, KEY, NOT_OURS, edits, literals, literals_of, put

EDIT = "the edit "
"""How the reason begins where an edit was carried out and did not mend the message."""
DEPTH = 10
"""How many calls are tried, from the innermost on."""
OF_THE_RECIPE = "mmrl/config/"
"""Messages of the recipe's own checks; ``tests/config/test_edits.py`` carries theirs out."""


@functools.cache
def named(file: str | None = None) -> dict[str, re.Pattern[str]]:
    """The messages of the code, or of one file, that name an edit of a key: by file and beginning, each as a pattern of
    its text."""
    found = {}
    for literal in literals() if file is None else literals_of(file):
        text = NOT_OURS.sub(GAP, literal.text)
        keys = [match["key"] for one in (*EDITS, *ALTERNATIVES) for match in one.finditer(text)]
        if not literal.file.startswith(OF_THE_RECIPE) and any(key.split(".")[0] in Recipe.model_fields for key in keys):
            pattern = ".*?".join(map(re.escape, re.split(rf"{GAP}|\{{\}}", literal.text)))
            found[f"{literal.file}: {literal.text[:70]}"] = re.compile(pattern, re.DOTALL)
    return found


def said_by(text: str, names: Collection[str]) -> list[str]:
    """The messages of the code that ``text`` is made of: of ``names``, or of all where there are none."""
    files = {name.partition(":")[0] for name in names} or {None}
    every = {name: pattern for file in files for name, pattern in named(file).items()}
    return [name for name in names or every if name in every and every[name].search(text)]


@dataclass
class Call:
    """A call that ended with a message, and the argument that is or holds the recipe."""

    text: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    place: str
    names: Collection[str] = ()
    """The messages of the code that the text is made of."""

    def again(self, change: Callable[[Recipe], Recipe]) -> str:
        """What it complains of with another recipe; empty for nothing, or for something else."""
        given = {**self.arguments, self.place: changed(self.arguments[self.place], change)}
        try:
            said = list(map(str, getattr(self._called(given), "problems", ())))  # of a plan, which raises nothing
        except UserError as error:
            said = [str(error)]
        return next((text for text in said if said_by(text, self.names)), "")

    def _called(self, given: dict[str, Any]) -> object:
        positional, named = [], {}
        for name, parameter in inspect.signature(self.function).parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                positional += given[name]
            elif parameter.kind is parameter.VAR_KEYWORD:
                named |= given[name]
            elif parameter.kind is parameter.KEYWORD_ONLY:
                named[name] = given[name]
            else:
                positional.append(given[name])
        return self.function(*positional, **named)

    def mends(self) -> str:
        """Why the edits that the text names mend nothing; empty where each takes the complaint away."""
        for together in edits_of(self.text):
            try:
                left = self.again(lambda recipe, made=together: edited(recipe, made))
            except ValidationError as error:
                return f"{EDIT}{together} is refused: {error.errors()[0]['msg']}"
            if left:
                return f"{EDIT}{together} leaves {left!r}"
        return ""


SCALED = re.compile(rf"\b(?P<how>lower|raise) (?P<key>{KEY})")
"""An edit without a value: 64 times less, or more."""


def edits_of(text: str) -> list[list[tuple[str, object, bool]]]:
    """As ``edits``, also where they follow a full stop, and where a number is to be less or more."""
    found = edits(text) or edits(text.replace(". ", "; ", 1))
    return found or [[(match["key"], match["how"], False)] for match in SCALED.finditer(text) if "." in match["key"]]


def edited(recipe: Recipe, together: list[tuple[str, object, bool]]) -> Recipe:
    said = recipe.model_dump(exclude_unset=True)
    for key, value, remove in together:
        if value in ("lower", "raise"):
            number: Any = functools.reduce(getattr, key.split("."), recipe)
            less = max(number // 64, 1) if isinstance(number, int) else number / 64
            value = less if value == "lower" else number * 64
        said = put(said, key, value, remove=remove)
    return Recipe.model_validate(said)


def changed(given: Any, change: Callable[[Recipe], Recipe]) -> Any:
    if isinstance(given, Recipe):
        return change(given)
    if isinstance(given, LoadedRecipe):
        return replace(given, recipe=change(given.recipe))
    made = copy.copy(given)
    for name, value in vars(given).items():
        if isinstance(value, Recipe | LoadedRecipe):
            object.__setattr__(made, name, changed(value, change))  # the class may be frozen
    return made


def calls_of(text: str, frame: FrameType | None) -> list[Call]:
    """The calls on the stack that were given a recipe and can be repeated, the innermost first."""
    found = []
    while frame is not None and len(found) < DEPTH:
        held = [name for name in arguments_of(frame.f_code) if holds_recipe(frame.f_locals.get(name))]
        if held and (function := function_of(frame)) is not None:
            values = {one: frame.f_locals[one] for one in arguments_of(frame.f_code) if one in frame.f_locals}
            found.append(Call(text, function, values, held[0]))
        frame = frame.f_back
    return found


def arguments_of(code: CodeType) -> tuple[str, ...]:
    several = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + several]


def holds_recipe(value: object) -> bool:
    if isinstance(value, Recipe | LoadedRecipe):
        return True
    held = getattr(value, "__dict__", None)
    return isinstance(held, dict) and any(isinstance(one, Recipe | LoadedRecipe) for one in held.values())


def function_of(frame: FrameType) -> Callable[..., Any] | None:
    code, module = frame.f_code, sys.modules.get(frame.f_globals.get("__name__", ""))
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE) or not str(code.co_filename).endswith(".py"):
        return None
    if "/tests/" in code.co_filename:
        return None
    found: Any = module
    for part in code.co_qualname.split("."):
        found = inspect.getattr_static(found, part, None)
    found = getattr(found, "__func__", None) or getattr(found, "fget", None) or found
    found = inspect.unwrap(found) if callable(found) else found
    return found if getattr(found, "__code__", None) is code else None


def after(names: Collection[str], said: list[list[Call]], node: str) -> list[str]:
    """What is wrong with the messages ``names``, which the test ``node`` carries out; ``said``: the calls behind each
    text that it made."""
    why = dict.fromkeys(names, "the test does not cause it")
    for calls in said:
        if found := said_by(calls[0].text, names):
            wrong = _carried_out(calls, found)
            note(f"{name}\t{node}\t{wrong or 'carried out'}\t{calls[0].function.__qualname__}\n" for name in found)
            for name in {*found} & {*why}:
                if not wrong or wrong.startswith(EDIT) or why[name]:  # what is not known takes no success away
                    why[name] = wrong
    return [f"{name}: {wrong}" for name, wrong in why.items() if wrong]


def note(lines: Iterable[str]) -> None:
    if where := os.environ.get("MMRL_CARRIED"):
        with open(where, "a", encoding="utf-8") as file:
            file.writelines(lines)


def _carried_out(calls: list[Call], names: list[str]) -> str:
    if not edits_of(calls[0].text):
        return "no edit is written so that it can be read"
    why = "no call complains when it is repeated"
    for call in calls:
        call.names = names
        try:
            with contextlib.redirect_stdout(None):
                if call.again(lambda recipe: recipe) and not (why := call.mends()):
                    return ""
        except Exception as error:
            why = f"{type(error).__name__} when {call.function.__name__} is repeated: {error}".replace("\n", " ")[:200]
    return why


if __name__ == "__main__":
    from tests.support.carried_table import ADVICE, BY_HAND, CARRIED, NOT_HERE

    for name in named():
        print(f"{name}\n    {(CARRIED | BY_HAND | ADVICE | NOT_HERE).get(name, 'open')}")
    print(
        f"{len(named())}: {len(CARRIED) + len(BY_HAND)} are carried out, {len(BY_HAND)} of them by hand, {len(ADVICE)} "
        f"refuse nothing, {len(NOT_HERE)} cannot be here"
    )

"""What an environment owes an episode: see ``mmrl.episodes.environment``."""

from __future__ import annotations

import random
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from typing import Any

from mmrl.app.conformance.running import CannotRun, Check, expect
from mmrl.config.environment import Environment as Section
from mmrl.core.episode import NO_ACTION, Action, Call, Observation
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.media import open_image
from mmrl.core.trajectory import Prompt
from mmrl.episodes.environment import Environment, observations
from mmrl.episodes.isolated import Isolated
from mmrl.episodes.loading import Factory, closed, opened
from mmrl.episodes.pool import returned_within

PROMPT = Prompt("mmrl check/1", "Begin.", {"answer": "1"})
TURNS = ("", "1", "I do not know.", "<tool_call>", "7 " * 50)
"""What a policy may write."""
_ARGUMENTS: Mapping[str, Any] = {"integer": 1, "number": 1.0, "boolean": True, "array": [], "object": {}}
"""An argument of each type of JSON; else it is a text."""
_Told = list[tuple[Observation, ...]]
SEEDS = (0, 1, 2**62)


@dataclass(frozen=True)
class Case:
    """An environment by the name a recipe calls it."""

    section: Section
    factory: Factory

    def called(self, what: str, call: Callable[[], Any]) -> tuple[Observation, ...]:
        """What a call answers. Fails where it takes too long, raises, or answers with something else."""
        returned = returned_within(self.section.timeout, call)
        expect(not returned.error, f"{what} failed: {returned.error}")
        try:
            told = observations(returned.value)
            for picture in (picture for one in told for picture in one.pictures):
                open_image(picture)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{what}: {error}") from error
        return told

    @property
    def actions(self) -> list[Action]:
        """What is written in an episode: ``TURNS``, after a call of each tool of a class. Functions are not called."""
        calls = [] if self.factory.stateless else [_call(schema) for schema in self.factory.schemas]
        return [*([Action("", tuple(calls))] if calls else []), *map(Action, TURNS)]

    def played(self, seed: int, noise: int) -> _Told:
        """The answers to ``actions`` of a new environment; ``noise`` seeds Python's own generator before."""
        random.seed(noise)
        with self.begun() as world:
            return self._answers(world, seed, noise)

    def _answers(self, world: Environment, seed: int, noise: int) -> _Told:
        answers = [self.called("reset", partial(world.reset, PROMPT, seed))]
        for n, action in enumerate(self.actions):
            answers.append(self.called(f"step, of the turn {action.text[:20]!r},", partial(world.step, action)))
            if not answers[-1] or any(one.done or one.truncated for one in answers[-1]):
                return answers
            random.seed(noise + n)
        return answers

    @contextmanager
    def begun(self) -> Generator[Environment]:
        """A new environment, which is closed afterwards. Fails where it cannot be closed."""
        world, why = self.factory.make(), ""
        try:
            yield world
        finally:
            why = closed(world, self.section.timeout)
        expect(not why, f"close failed: {why}; mend it, as nothing that it holds is freed")


def case_of(name: str, options: JsonObject, *, isolate: bool = False) -> Case:
    """``isolate``: as in a recipe. Raises ``UserError`` where it cannot be found, or made with ``options``."""
    section = Section(name=name, options=dict(options), isolate=isolate)
    return Case(section, opened(section))


def _call(schema: JsonObject) -> Call:
    """A call of a tool, with arguments of its types."""
    function: Any = schema["function"]
    given: Mapping[str, Any] = function.get("parameters", {}).get("properties", {})
    made = {name: (of.get("enum") or [_ARGUMENTS.get(str(of.get("type")), "1")])[0] for name, of in given.items()}
    return Call(f"call_{function['name']}", str(function["name"]), made)


def _where(first: _Told, again: _Told) -> str:
    """The first call that was answered otherwise; an empty text where none was."""
    pairs = enumerate(zip_longest(first, again))
    n = next((n for n, (one, other) in pairs if one != other), None)
    return "" if n is None else f"first in what {f'turn {n} was' if n else 'reset'} told"


def turns_are_answered(case: Case) -> str:
    turns = [told for seed in SEEDS for told in case.played(seed, 0)[1:]]
    idle = sum(any(NO_ACTION in one.info for one in told) for told in turns)
    said = f"; {idle} of them were no action to it, so that what an action does was tried less" if idle else ""
    return f"{len(turns)} turns in {len(SEEDS)} episodes{said}"


def equal_seeds_begin_equally(case: Case) -> str:
    for seed in SEEDS:
        differs = _where(case.played(seed, 1), case.played(seed, 2))
        expect(
            not differs,
            f"two episodes of the seed {seed} differ, {differs}; take every random number from the seed that reset "
            "gets, and nothing from the time, the network or Python's own generator",
        )
    return f"{len(SEEDS)} seeds, each played twice"


def another_process_answers_equally(case: Case) -> str:
    if case.factory.stateless:
        raise CannotRun("functions are asked once for a turn, and what they answered is kept")
    try:
        make = Isolated(case.section).make
        make()
        other = replace(case, factory=replace(case.factory, make=make))
        played = [other.played(seed, 0) for seed in SEEDS]
    except (UserError, AssertionError) as error:
        raise CannotRun(f"it cannot be played there ({error})") from error
    for seed, apart in zip(SEEDS, played, strict=True):
        differs = _where(case.played(seed, 0), apart)
        expect(
            not differs,
            f"the seed {seed} gives another episode in another process, {differs}; sort what comes from a set, and "
            "take nothing from hash(), id(), the number of the process or what other episodes left",
        )
    return f"{len(SEEDS)} seeds, each played here and there"


def episodes_share_nothing(case: Case) -> str:
    alone = case.played(0, 0)
    with case.begun() as one, case.begun() as other:
        case.called("reset", partial(one.reset, PROMPT, 0))
        case.called("reset", partial(other.reset, PROMPT, 1))
        case.called("step", partial(other.step, Action("1")))
        answers = case.called("step", partial(one.step, case.actions[0]))
    expect(answers == alone[1], "an episode answers otherwise beside another one; keep all state in the instance")
    return "two at the same time"


def wrong_calls_are_told(case: Case) -> str:
    if not case.factory.schemas:
        raise CannotRun("it shows no tools to the model")
    with case.begun() as world:
        case.called("reset", partial(world.reset, PROMPT, 0))
        for schema in case.factory.schemas:
            function = schema["function"]
            name = str(function["name"]) if isinstance(function, Mapping) else ""
            call = Call("call_0", name, {"no such argument": 1})
            told = case.called(f"a wrong call of {name}", partial(world.step, Action("", (call,))))
            answer = told and told[0].content
            expect(answer, f"a call of {name} with a wrong argument got no answer; say what was wrong")
    return f"{len(case.factory.schemas)} tools"


CHECKS: Mapping[str, Callable[[Case], str]] = {
    "every turn is answered": turns_are_answered,
    "equal seeds begin equally": equal_seeds_begin_equally,
    "another process answers equally": another_process_answers_equally,
    "episodes share nothing": episodes_share_nothing,
    "wrong calls are answered": wrong_calls_are_told,
}


def checks(case: Case) -> Iterator[Check]:
    """All checks of ``case``."""
    yield from (Check(name, partial(check, case)) for name, check in CHECKS.items())

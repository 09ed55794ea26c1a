"""What an environment owes an episode: see ``mmrl.episodes.environment``."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from mmrl.config.environment import Environment as Section
from mmrl.contracts.running import CannotRun, Check, expect
from mmrl.episodes.contract import Action, Call, Observation
from mmrl.episodes.environment import observations
from mmrl.episodes.loading import Factory, opened
from mmrl.episodes.pool import Pool
from mmrl.json_types import JsonObject
from mmrl.media import open_image
from mmrl.trajectory import Prompt

PROMPT = Prompt("mmrl check/1", "Begin.", {"answer": "1"})
TURNS = ("", "1", "I do not know.", "<tool_call>", "7 " * 50)
"""What a policy may write."""
SEEDS = (0, 1, 2**62)


@dataclass(frozen=True)
class Case:
    """An environment by the name a recipe calls it."""

    section: Section
    factory: Factory

    def called(self, what: str, call: Callable[[], Any]) -> tuple[Observation, ...]:
        """What a call answers. Fails where it takes too long, raises, or answers with something else."""
        pool: Pool[str] = Pool(1, self.section.timeout)
        pool.submit(what, call)
        ((_, returned),) = pool.ready(wait=True)
        expect(not returned.error, f"{what} failed: {returned.error}")
        try:
            told = observations(returned.value)
            for picture in (picture for one in told for picture in one.pictures):
                open_image(picture)
        except (TypeError, ValueError) as error:
            raise AssertionError(f"{what}: {error}") from error
        return told

    def played(self, seed: int, noise: int) -> list[tuple[Observation, ...]]:
        """The answers to ``TURNS`` of a new environment; ``noise`` seeds Python's own generator before."""
        random.seed(noise)
        world = self.factory.make()
        answers = [self.called("reset", partial(world.reset, PROMPT, seed))]
        for n, text in enumerate(TURNS):
            answers.append(self.called(f"step, of the turn {text[:20]!r},", partial(world.step, Action(text))))
            if not answers[-1] or any(one.done or one.truncated for one in answers[-1]):
                return answers
            random.seed(noise + n)
        return answers


def case_of(name: str, options: JsonObject) -> Case:
    """Raises ``UserError`` where it cannot be found, or made with ``options``."""
    section = Section(name=name, options=dict(options))
    return Case(section, opened(section))


def turns_are_answered(case: Case) -> str:
    counts = [len(case.played(seed, 0)) - 1 for seed in SEEDS]
    return f"{sum(counts)} turns in {len(SEEDS)} episodes"


def equal_seeds_begin_equally(case: Case) -> str:
    for seed in SEEDS:
        first, again = case.played(seed, 1), case.played(seed, 2)
        expect(
            first == again,
            "two episodes of one seed differ; take every random number from the seed that reset gets, and nothing from "
            "the time, the network or Python's own generator",
        )
    return f"{len(SEEDS)} seeds, each played twice"


def episodes_share_nothing(case: Case) -> str:
    alone = case.played(0, 0)
    one, other = case.factory.make(), case.factory.make()
    case.called("reset", partial(one.reset, PROMPT, 0))
    case.called("reset", partial(other.reset, PROMPT, 1))
    case.called("step", partial(other.step, Action("1")))
    answers = case.called("step", partial(one.step, Action(TURNS[0])))
    expect(answers == alone[1], "an episode answers otherwise beside another one; keep all state in the instance")
    return "two at the same time"


def wrong_calls_are_told(case: Case) -> str:
    if not case.factory.schemas:
        raise CannotRun("it shows no tools to the model")
    world = case.factory.make()
    case.called("reset", partial(world.reset, PROMPT, 0))
    for schema in case.factory.schemas:
        function = schema["function"]
        name = str(function["name"]) if isinstance(function, Mapping) else ""
        call = Call("call_0", name, {"no such argument": 1})
        told = case.called(f"a wrong call of {name}", partial(world.step, Action("", (call,))))
        expect(told and told[0].content, f"a call of {name} with a wrong argument got no answer; say what was wrong")
    return f"{len(case.factory.schemas)} tools"


CHECKS: Mapping[str, Callable[[Case], str]] = {
    "every turn is answered": turns_are_answered,
    "equal seeds begin equally": equal_seeds_begin_equally,
    "episodes share nothing": episodes_share_nothing,
    "wrong calls are answered": wrong_calls_are_told,
}


def checks(case: Case) -> Iterator[Check]:
    """All checks of ``case``."""
    yield from (Check(name, partial(check, case)) for name, check in CHECKS.items())

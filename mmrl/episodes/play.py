"""Play episodes: the policy writes a turn, its environment answers, and so on, each episode at its own pace.

Tokens in, tokens out: the ids that were sampled are the ids that train, and no text is tokenised again. An episode
whose environment has answered goes on beside those that wait; what it draws depends on its sample and its turn alone.
What a journal of an earlier start answers is not asked again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from PIL.Image import Image
from torch import Tensor

from mmrl.config import environment
from mmrl.core.episode import Action, Episode, Exchange, Observation
from mmrl.core.randomness import seed_of
from mmrl.core.rollout_engine import AnswersAsItGoes, Completion, Request, Settings
from mmrl.core.trajectory import Prompt, SampleId, Segment
from mmrl.episodes.calls import BEFORE, Reader
from mmrl.episodes.environment import Answer, Environment, told_of
from mmrl.episodes.isolated import end
from mmrl.episodes.journal import Journal, digest
from mmrl.episodes.loading import Factory, close
from mmrl.episodes.pool import Pool, Returned
from mmrl.models.text.features import with_told
from mmrl.models.text.retold import Past, Retold, Teller
from mmrl.models.text.stop_strings import StopStrings
from mmrl.models.text.told import Told, pictures_of

_POLL = 0.005
"""Seconds that sampling may take between two looks at what environments answered."""


class InStep:
    """Final class, an ``AnswersAsItGoes`` of an engine that is none: what was submitted is answered together."""

    def __init__(self, generate: Callable[[Sequence[Request], Settings], list[Completion]]) -> None:
        self._generate = generate
        self._asked: dict[int, tuple[Request, Settings]] = {}
        self._next = 0

    def submit(self, request: Request, settings: Settings) -> int:
        self._next += 1
        self._asked[self._next] = request, settings
        return self._next

    def ready(self, timeout: float | None) -> list[tuple[int, Completion]]:
        asked, self._asked = self._asked, {}
        if not asked:
            return []
        settings = next(iter(asked.values()))[1]
        answers = self._generate([request for request, _ in asked.values()], settings)
        return list(zip(asked, answers, strict=True))

    def cancel(self, id: int) -> None:
        self._asked.pop(id, None)


@dataclass(frozen=True)
class How:
    """What episodes are played with. ``seed``: the run's, for ``reset``; ``settings``: of a turn; ``room``: tokens of
    prompt and episode that the model and the engine take, None without a limit; ``calls``: reads the calls of
    a turn; ``teller``: tells the policy; ``journal``: keeps the answers."""

    section: environment.Environment
    factory: Factory
    teller: Teller
    stops: StopStrings
    settings: Settings
    seed: int
    room: int | None
    calls: Reader
    journal: Journal | None = None


@dataclass(eq=False)
class Played:
    """An episode under way. ``prompt``: as the data has it; ``asked``: as the policy is shown it. ``tokens`` and
    ``log_probs`` are those behind the prompt, with 0 for what was told. ``first``: the token of the row where what the
    policy reads begins: another one once its conversation was told anew, whose prompt lacks its last tokens (``gone``).
    ``calling``: the turn of the call under way, 0 for ``reset``; ``seen``: the last one that ``world`` saw.
    ``unexpanded``, ``images`` and ``shown``: behind the prompt, tokens with a placeholder for each picture, the
    pictures, and what the processor made of them, from a token of what it reads on each."""

    id: SampleId
    prompt: Prompt
    asked: Prompt
    request: Request
    world: Environment
    tokens: list[int] = field(default_factory=list, init=False)
    log_probs: list[float] = field(default_factory=list, init=False)
    segments: list[Segment] = field(default_factory=list, init=False)
    turns: list[Exchange] = field(default_factory=list, init=False)
    past: list[Past] = field(default_factory=list, init=False)
    first: int = field(default=0, init=False)
    gone: int = field(default=0, init=False)
    unexpanded: list[int] = field(default_factory=list, init=False)
    images: list[Image] = field(default_factory=list, init=False)
    shown: list[tuple[int, Mapping[str, Tensor]]] = field(default_factory=list, init=False)
    end: Literal["answer", "done", "turns", "tokens", "failed"] | None = None
    failure: str = ""
    calling: int = field(default=0, init=False)
    seen: int = field(default=-1, init=False)
    closing: bool = field(default=False, init=False)
    unclosed: str = field(default="", init=False)
    seconds: float = field(default=0.0, init=False)

    def wrote(self, tokens: Sequence[int], log_probs: Sequence[float]) -> None:
        """Append a turn of the policy."""
        self._append("written", tokens)
        self.log_probs += log_probs
        self.unexpanded += tokens

    def heard(self, told: Told, turn: int) -> None:
        """Append what it was told after ``turn``."""
        if told.features:
            self.shown.append((len(self) - self.first, told.features))
        self._append("told", told.tokens, told.key, turn)
        self.log_probs += [0.0] * len(told.tokens)
        self.unexpanded += told.unexpanded
        self.images += told.images

    def told_anew(self, said: Retold) -> None:
        """Go on behind another conversation, which begins with the prompt."""
        self.first, self.gone = len(self), said.gone
        self.unexpanded, self.images, self.shown = [], [], []
        asked = self.request.prompt_ids[: len(self.request.prompt_ids) - said.gone]
        self._append("prompt", asked)
        self.log_probs += [0.0] * len(asked)
        for turn, told in said.parts:
            self.heard(told, turn)

    def _append(
        self, kind: Literal["prompt", "written", "told"], tokens: Sequence[int], key: str | None = None, turn: int = -1
    ) -> None:
        first, turn = len(self), len(self.turns) if turn < 0 else turn
        self.segments.append(Segment(first, first + len(tokens), kind, key, turn))
        self.tokens += tokens

    def __len__(self) -> int:
        """The tokens of its row."""
        return len(self.request.prompt_ids) + len(self.tokens)

    @property
    def read(self) -> list[int]:
        """The tokens that the policy has before its next turn."""
        return [*self.request.prompt_ids, *self.tokens][self.first :]

    @property
    def written(self) -> str:
        """A digest of what the policy wrote so far."""
        return digest(token for turn in self.turns for token in turn.action.tokens)

    @property
    def episode(self) -> Episode:
        reward = sum(observation.reward for turn in self.turns for observation in turn.told)
        return Episode(tuple(self.turns), reward, self.end or "answer", self.failure, self.unclosed, self.seconds)

    @property
    def cut(self) -> bool:
        """Whether the last turn was."""
        return bool(self.turns) and self.turns[-1].action.finish == "length"


def reset_seed(seed: int, id: SampleId) -> int:
    """The seed of ``Environment.reset``: one for all samples of a group."""
    return seed_of(seed, id.step, id.slot, id.attempt, "environment")


def play(
    how: How,
    answers: AnswersAsItGoes,
    ids: Sequence[SampleId],
    prompts: Sequence[tuple[Prompt, Prompt]],
    requests: Sequence[Request],
) -> list[Played]:
    """Play an episode of each request, whose prompt has what ``reset`` showed; returns them in order. ``prompts``: each
    as the data has it, and as the policy is shown it. Raises ``UserError`` from the engine."""
    played, stage = list[Played](), _Stage(how, answers)
    try:
        for id, (prompt, asked), request in zip(ids, prompts, requests, strict=True):
            played.append(Played(id, prompt, asked, request, how.factory.make()))
        for one in played:
            stage.call(one)
        stage.run()
    finally:
        stage.close(played)
    return played


class _Stage:
    """The episodes of one call of ``play``."""

    def __init__(self, how: How, answers: AnswersAsItGoes) -> None:
        self._how, self._answers = how, answers
        self._pool: Pool[Played] = Pool(how.section.workers, how.section.timeout)
        self._closing: Pool[Played] = Pool(how.section.workers, how.section.timeout)
        self._asked: dict[int, Played] = {}

    def close(self, played: Sequence[Played]) -> None:
        """Close the environments that are still open, and wait until all are closed."""
        for one in played:
            self._close(one)
        while self._closing:
            self._closed(wait=True)

    def _close(self, one: Played) -> None:
        if not self._how.factory.closes:
            end(one.world)
        elif not one.closing:
            one.closing = True
            self._closing.submit(one, partial(close, one.world))

    def _closed(self, *, wait: bool) -> None:
        for one, returned in self._closing.ready(wait=wait):
            end(one.world)
            if one.seen >= 0:  # else none of its methods was called
                one.unclosed = returned.error

    def call(self, one: Played) -> None:
        """Begin the next call of its environment: ``reset``, or ``step`` with the turn that was written last.

        Where a journal answers, it is not called. Its state is then made again before the first call that is: it is
        called for the turns so far. A function has no state, and is never called twice for a turn."""
        turn, journal = len(one.turns), self._how.journal
        stateless = self._how.factory.stateless
        kept = None if journal is None else journal.answer(one.id, turn, one.written)
        if kept is not None and kept.lost and stateless:
            self._answered(one, (), "the run was ended while a tool was called, and its answer is lost")
        elif kept is not None and not kept.lost:
            one.seen = turn if stateless else one.seen
            self._answered(one, kept.told, kept.failure)
        else:
            one.calling = turn if stateless else one.seen + 1
            if journal is not None and one.calling == turn:
                journal.asks(one.id, turn, one.written)
            self._pool.submit(one, partial(self._made, one, one.calling))

    def _made(self, one: Played, turn: int) -> Answer | Awaitable[Answer]:
        if turn == 0:
            return one.world.reset(one.prompt, reset_seed(self._how.seed, one.id))
        action, told = one.turns[turn - 1].action, one.turns[turn - 1].told
        recall = getattr(one.world, "recall", None) if turn < len(one.turns) else None
        if recall is None:
            return one.world.step(action)
        recall(action, told)
        return told

    def run(self) -> None:
        in_step = isinstance(self._answers, InStep)  # such an engine answers many as fast as one
        try:
            while self._asked or self._pool:
                found = self._pool.ready(wait=in_step or not self._asked)
                if found and not self._asked and self._pool:  # calls that take equally long return in crowds
                    time.sleep(_POLL)
                    found += self._pool.ready(wait=False)
                for one, returned in found:
                    self._returned(one, returned)
                    if one.end is not None:
                        self._close(one)
                self._closed(wait=False)
                if in_step and self._pool:
                    continue
                for id, completion in self._answers.ready(_POLL if self._pool else None) if self._asked else ():
                    self._wrote(self._asked.pop(id), completion)
        except BaseException:
            for id in self._asked:
                self._answers.cancel(id)
            raise

    def _returned(self, one: Played, returned: Returned) -> None:
        told, why = told_of(returned)
        one.seen, one.seconds = one.calling, one.seconds + returned.seconds
        if one.seen < len(one.turns):  # the journal has its answer
            if one.seen and (why or told != one.turns[one.seen - 1].told):
                why = "called again after the run was ended, it answers otherwise; make it depend on its seed alone"
            if why:
                one.end, one.failure = "failed", why
            else:
                self.call(one)
            return
        if self._how.journal is not None:
            self._how.journal.tells(one.id, one.seen, one.written, told, why)
        self._answered(one, told, why)

    def _answered(self, one: Played, told: tuple[Observation, ...], why: str) -> None:
        if why:
            one.end, one.failure = "failed", why
        elif one.turns:
            self._told(one, told)
        else:
            self._ask(one)

    def _told(self, one: Played, told: tuple[Observation, ...]) -> None:
        how = self._how
        one.turns[-1] = replace(one.turns[-1], told=told)
        if not told or any(observation.done for observation in told):
            one.end = "done" if one.turns[-1].action.calls or any(o.content for o in told) else "answer"
        elif any(observation.truncated for observation in told) or len(one.turns) >= how.section.max_turns:
            one.end = "turns"
        else:
            self._shown(one, told)

    def _shown(self, one: Played, told: tuple[Observation, ...]) -> None:
        """Tell the policy, and ask it for its next turn."""
        how, most = self._how, self._how.section.max_pictures
        contents = [observation.parts for observation in told if not observation.hidden]
        try:
            before = len(one.request.media) - len(one.prompt.media)
            before += sum(len(pictures_of(turn.contents)) for turn in one.past)
            if (n := before + len(pictures_of(contents))) > most:
                raise ValueError(f"the environment showed {n} pictures, and environment.max_pictures is {most}")
            said, action = how.teller.told(contents), one.turns[-1].action
            one.past.append(Past(action.tokens, action.text, contents, said))
            shown = said.behind(one.tokens, how.teller.chat.stop_tokens)
            anew = self._anew(one, [*one.read, *shown.tokens])
        except ValueError as error:  # a picture that cannot be read, or that the model or its template cannot be shown
            one.end, one.failure = "failed", str(error)
            return
        read = len(one.read) + len(shown.tokens) if anew is None else len(anew.behind(one.request.prompt_ids))
        if self._left(one, read) < 1:
            one.end = "tokens"
            return
        if anew is None:
            one.heard(shown, len(one.turns))
        else:
            one.told_anew(anew)
        self._ask(one)

    def _anew(self, one: Played, read: list[int]) -> Retold | None:
        """Its conversation as the policy is shown it now; None where that is what it would ``read``."""
        teller, first = self._how.teller, len(one.past) - (self._how.section.history_length or len(one.past))
        if not teller.renews and first <= 0:
            return None
        past = one.past[max(0, first) :]
        said = teller.retold(one.asked, past) if teller.renews else teller.last(past)
        return None if said.behind(one.request.prompt_ids) == read else said.later(max(0, first))

    def _left(self, one: Played, read: int) -> int:
        """Tokens that the episode may still have where the policy has ``read`` so many, with the prompt."""
        most, room = len(one.request.prompt_ids) + self._how.section.max_tokens, self._how.room
        return (most if room is None else min(most, room)) - read

    def _ask(self, one: Played) -> None:
        how, turn = self._how, len(one.turns)
        most = min(self._left(one, len(one.read)), one.request.max_new_tokens or how.settings.max_new_tokens)
        request = replace(one.request, max_new_tokens=most)
        if turn:
            seed = None if request.seed is None else seed_of(request.seed, "turn", turn)
            media = [*request.media, *one.images]
            asked = request.unexpanded_ids or request.prompt_ids
            unexpanded = [*asked[: len(asked) - one.gone], *one.unexpanded] if media else ()
            ids = one.read
            features = with_told(request.features, one.shown) if one.shown else request.features
            request = replace(request, prompt_ids=ids, unexpanded_ids=unexpanded, text="", seed=seed)
            request = replace(request, media=media, features=features)
        self._asked[self._answers.submit(request, how.settings)] = one

    def _wrote(self, one: Played, completion: Completion) -> None:
        how = self._how
        made = how.stops.ended(completion, replace(one.request, partial=()))
        tokens = list(made.token_ids)
        n = next((n for n, token in enumerate(tokens) if token in how.teller.chat.forbidden), len(tokens))
        stopped = made.finish == "stop" and n == len(tokens)
        text, before = how.stops.text(tokens[:n]), one.read[-BEFORE:]
        calls = how.calls(text, tokens[:n], before, len(one.turns))
        if not stopped and calls:  # a parser may take what was cut for a whole call
            calls = (*calls[:-1], replace(calls[-1], error=calls[-1].error or "the turn was cut before the call ended"))
        one.wrote(tokens[:n], list(made.log_probs[:n]))
        action = Action(text, calls, tuple(tokens[:n]), "stop" if stopped else "length")
        one.turns.append(Exchange(action))
        self.call(one)

"""Votes that people give while a run trains (``mmrl label --train``, docs/labels.md): the score that a vote would have.

    - name: votes
      on_failure: drop                    # an evaluation before the first votes has no score
      options: {model: shapes-full}       # its model reads the samples, as mmrl spread --model does

Each step's samples are kept under ``votes/`` of the run, where the page shows those whose score is least sure. The
votes of earlier steps make the scores of this one. Before the first step that trains it waits for ``first`` votes. One
process; it computes on the CPU.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.core import notices
from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.json_types import Json, JsonObject, as_list, as_object
from mmrl.core.reward_contract import Context, Declaration, Failed, Input, Value
from mmrl.core.signals import stop_asked
from mmrl.core.trajectory import Sample
from mmrl.rewards.judging.replay import recorded_here
from mmrl.rewards.learned.labels.embeddings import MOST_NOISES, NOISES, Content, Embedder, Encoders, model_of, sampled
from mmrl.rewards.learned.labels.folder import NAME, Known
from mmrl.rewards.learned.labels.items import Item
from mmrl.rewards.learned.labels.items import Kind as Sort
from mmrl.rewards.learned.labels.live import Batch, Pool, asks, fitted
from mmrl.rewards.learned.labels.spreading import AUTO, GRAPH, HEAD
from mmrl.rewards.learned.labels.votes import ASKS, FOLDER, Used, VoteLog
from mmrl.rewards.learned.labels.votes import Votes as Kind

_LOOK_S, _SAY_S = 0.2, 30.0
"""Seconds between two looks at the log, and between two lines on the terminal."""
_NONE = "there are no votes yet; they begin with the first step"
_METHODS = {"auto": AUTO, "graph": GRAPH, "head": HEAD}


def _read(model: str | None, kind: str | None) -> tuple[Sort, JsonObject | None]:
    """The kind of samples, and the model that reads them. Raises ``UserError``."""
    if model is None:
        if kind not in (None, "image", "text"):
            raise UserError(f"kind: {kind!r} cannot be voted on while a run trains; write image or text")
        return "text" if kind == "text" else "image", None
    recipe = load_recipe([model], []).recipe
    if recipe.makes == "video":
        raise UserError("clips cannot be voted on while a run trains; label samples of the run with mmrl label RUN")
    return recipe.makes, model_of(recipe)


def _check(votes: Kind, by: str, **numbers: float) -> None:
    """Raises ``UserError`` for an option that means nothing."""
    if votes not in ("scores", "pairs"):
        raise UserError(f"votes: {votes!r} is no kind of vote; write scores or pairs")
    if by not in _METHODS or (votes == "pairs" and by == "graph"):
        raise UserError(f"by: {by!r} cannot spread {votes}; write auto{', graph' * (votes == 'scores')} or head")
    for name, value in numbers.items():
        if isinstance(value, bool) or not value >= (0 if name in ("wait", "patience") else 1):
            raise UserError(f"{name}: {value} is no number that can be waited for; write a larger one")
    if not isinstance(numbers["noises"], int) or numbers["noises"] > MOST_NOISES:
        raise UserError(f"noises: a picture is read under 1 to {MOST_NOISES} of them; write one of these numbers")


def _reads(options: Mapping[str, Any]) -> tuple[Input, ...]:
    """What is voted on. Raises ``UserError``."""
    return (_read(options.get("model"), options.get("kind"))[0],)


@mmrl.reward(paths=("model",), reads=_reads, own_deadline=True, checks=True)
class Voted:
    """``votes``: ``scores`` of single samples, or ``pairs`` of a prompt. ``model``: the recipe whose model embeds the
    samples; without it pictures are read by colours and edges and texts (``kind: text``) by their words. ``first``:
    votes before the first step; ``wait``: new votes that each later step waits for, at most ``patience`` seconds;
    ``refit``: new votes after which the scores are made anew; ``keep``: newest samples that the graph has; ``by``: as
    of ``mmrl spread``; ``noises``: under how many a diffusion model reads a picture, in the mean (1 to 16; each is two
    more forward passes a sample). Raises ``UserError``."""

    def __init__(
        self,
        votes: Kind = "scores",
        model: str | None = None,
        kind: str | None = None,
        first: int = 20,
        wait: int = 0,
        patience: float = 60.0,
        refit: int = 10,
        keep: int = 2000,
        by: Literal["auto", "graph", "head"] = "head",
        noises: int = NOISES,
    ) -> None:
        _check(votes, by, first=first, wait=wait, patience=patience, refit=refit, keep=keep, noises=noises)
        self.kind, described = _read(model, kind)
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            raise UserError("the reward votes is for a run of one process, and this one has several (controllers)")
        mmrl.before_loading()
        self.votes: Kind = votes
        self.first, self.wait, self.patience = first, wait, patience
        self.refit, self.keep, self.by = refit, keep, _METHODS[by]
        several = [Item("", self.kind, prompt) for prompt in ("a", "b")]  # prompts differ, and are embedded
        self.encoders = Encoders.for_items(several, None, described, noises)
        self.embedder = Embedder(self.encoders)
        self.__mmrl_reward__ = Declaration(inputs=(self.kind,), paths=("model",), reads=_reads, own_deadline=True)
        replayed = recorded_here()
        self.replays = None if replayed is None else replayed.folder
        """The run whose steps are repeated: its log says which votes they used, and nothing is asked."""
        self._run: Live | None = None

    async def score(self, samples: Sequence[Sample], *, context: Context) -> list[Value]:
        """``score``."""
        if context.folder is None:
            return [Failed("votes are given while a run trains (mmrl label RECIPE --train)")] * len(samples)
        if self._run is None:
            self._run = Live(self, context.folder)
        pictures = self.encoders.model is not None
        parts = self.embedder.parts([sampled(sample, pictures=pictures) or Content() for sample in samples])
        known: Known | str | None = self._run.known
        if context.step >= 0:
            self._run.pool.add(context.step, samples, parts)
            known = await self._run.known_at(context.step)
        if not isinstance(known, Known):
            return [Failed(known or _NONE)] * len(samples)
        return list(known.scores(parts).tolist())


score = Voted


class Live:
    """The votes and the samples of a run in ``folder``, and the reward that the current step uses (``known``)."""

    def __init__(self, reward: Voted, folder: Path) -> None:
        self.reward, self.replays = reward, reward.replays is not None
        self.log = VoteLog(reward.replays or folder)
        self.own = folder / FOLDER
        self.tally = self.log.read() if self.replays else self.log.begin(reward.votes)
        self.pool = Pool(self.log.folder, self.own)
        self.known: Known | None = None
        self.step = -1
        self.fit = Used(0, (-1, 0), ())
        self._events = self._events_of_fit = 0
        self._asks: list[Json] = []
        self._said = ""
        self._turn = asyncio.Lock()
        if self.tally.used:  # for an evaluation before the next step
            self._take(self.tally.used[max(self.tally.used)])

    async def known_at(self, step: int) -> Known | str:
        """The reward of ``step``, whose samples come into the pool; a text where the run is stopped instead."""
        if self.known is None:
            self._ask(step + 1)
        async with self._turn:
            if step != self.step:
                used = self.tally.used.get(step)
                if stopped := await (self._decide(step) if used is None else self._recorded(step, used)):
                    return stopped
                self.step = step
                self._ask(step)
        return self.known or _NONE

    async def _recorded(self, step: int, used: Used) -> str:
        """Take the votes that ``step`` used before; the samples of the step that its fit knew come meanwhile."""
        self.log.check(used, step)
        while any((used.fit[0], batch) not in self.pool.batches for batch in used.batches):
            if stop_asked():
                return "the run was stopped"
            await asyncio.sleep(_LOOK_S)
        self._take(used)
        return ""

    async def _decide(self, step: int) -> str:
        """Wait for the votes that ``step`` needs, record which it uses, and make the reward of them. Returns why not
        where the run is stopped."""
        if self.replays:
            raise UserError(f"{self.log.path} does not say which votes step {step + 1} used; put it back from a copy")
        began = time.monotonic()
        said = began - _SAY_S
        with notices.starting():  # people have no deadline, and the watchdog must not take this for a hang
            while why := self._waits(step, time.monotonic() - began):
                if stop_asked():
                    return "the run was stopped while it waited for votes"
                if time.monotonic() - said >= _SAY_S:
                    said = time.monotonic()
                    notices.tell(f"step {step + 1} waits for votes: {why}")
                self._publish(why)
                await asyncio.sleep(_LOOK_S)
        self._publish()  # a fit takes seconds, and nothing waits meanwhile
        tally, used = self.tally, replace(self.fit, bytes=self.tally.size)
        if self.known is None or tally.events - self._events_of_fit >= self.reward.refit:
            alone = all(at == step for at, _ in self.pool.batches)  # else earlier steps have what was voted on
            batches = tuple(sorted(key for at, key in self.pool.batches if at == step)) if alone else ()
            used = Used(tally.size, (step, tally.size), batches)
        self.log.write_used(step, used)
        self._take(used)
        return ""

    def _waits(self, step: int, seconds: float) -> str:
        """What ``step`` still waits for, after ``seconds``; empty where it goes on."""
        if len(self.log.data()) != self.tally.size:
            self.tally = self.log.read()
            if self.known is None or not self._open():
                self._ask(step + (self.known is None))
        tally, new = self.tally, self.tally.events - self._events
        if self.known is None and (lacks := tally.lacking(self.reward.first)):
            return lacks
        if tally.paused:
            return "paused on the page"
        if self.known is None or tally.enough or new >= self.reward.wait or seconds >= self.reward.patience:
            return ""
        if not self._open():
            return ""
        return f"{new} of {self.reward.wait} new ones, for at most {self.reward.patience:g} s"

    def _open(self) -> bool:
        """Whether anything is asked for that nobody has voted on."""
        voted = {samples for _, samples in self.tally.given}
        return any(tuple(map(str, as_list(as_object(one)["samples"]))) not in voted for one in self._asks)

    def _take(self, used: Used) -> None:
        """Make the reward of the fit that ``used`` names, where it is not the one of now."""
        self._events = self.log.read(used.bytes).events
        if self.known is not None and used.fit == self.fit.fit:
            return
        step, size = used.fit
        tally, name = self.log.read(size), f"fit-{step}-{size}"
        voted = {name for samples in tally.means for name in samples}
        samples = self.pool.before(step, used.batches, voted, self.reward.keep)
        out = (self.log.folder if (self.log.folder / name / NAME).exists() else self.own) / name
        self.known = fitted(samples, tally, self.reward.encoders, self.reward.by, out)
        self.fit, self._events_of_fit = used, tally.events

    def _ask(self, step: int) -> None:
        """Ask for votes on the newest samples of steps before ``step``, the least sure first."""
        newest = max((at for at, _ in self.pool.batches if at < step), default=None)
        if self.replays or newest is None:
            return
        there = [batch for (at, _), batch in self.pool.batches.items() if at == newest]
        parts = [torch.cat(part) for part in zip(*(batch.parts for batch in there), strict=True)]
        asked = Batch([sample for batch in there for sample in batch.samples], parts)
        self._asks = asks(asked, self.tally, self.known, self.reward.encoders)
        self._publish()

    def _publish(self, waiting: str = "") -> None:
        figures = {} if self.known is None else self.known.record.figures[self.known.record.by]
        said: JsonObject = {
            "run": self.tally.run,
            "votes": self.tally.votes,
            "step": self.step + 1,
            "used": self._events,
            "auc": None if self.known is None else figures["auc"][0],
            "waiting": waiting,
            "asks": self._asks,
        }
        if (text := json.dumps(said, ensure_ascii=False, allow_nan=False)) != self._said:
            self._said = text
            write_atomic(self.log.folder / ASKS, text + "\n")

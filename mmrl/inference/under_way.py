"""What engines that answer as they go have in common: the requests that are not answered yet."""

from __future__ import annotations

import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from mmrl.core.errors import UserError
from mmrl.core.rollout_engine import Completion, Request, Settings
from mmrl.inference.engine_weights import Allowance, allowances, completion, nothing_left

H = TypeVar("H")


@dataclass(frozen=True)
class Asked:
    """A request under way."""

    id: int
    request: Request
    allowance: Allowance


class OneByOne(ABC, Generic[H]):
    """Abstract, an ``AnswersAsItGoes``. A subclass begins with a request, works until there are answers, and ends
    requests; it knows each by a handle of its own. ``engine``: its name in messages."""

    def __init__(self, engine: str, max_model_len: int) -> None:
        self.max_model_len, self._engine = max_model_len, engine
        self._ids = itertools.count()
        self._asked: dict[H, Asked] = {}
        self._answered: dict[int, Completion] = {}

    @abstractmethod
    def _begin(self, request: Request, allowance: Allowance, settings: Settings) -> H:
        """The handle of a request that is under way from now on. Raises ``UserError``."""

    @abstractmethod
    def _work(self, timeout: float | None) -> None:
        """Come nearer to an answer, or wait for one up to ``timeout`` seconds, and ``_answer`` what is answered."""

    @abstractmethod
    def _end(self, handles: Sequence[H]) -> None:
        """Drop requests that are under way."""

    def generate(self, requests: Sequence[Request], settings: Settings) -> list[Completion]:
        """One completion per request, in their order. ``UserError`` where a prompt does not fit, or where the engine
        expands its pictures and clips to other tokens than the trainer did."""
        self._refuse("it generates")
        allowances(requests, settings, self.max_model_len)  # counts all that do not fit, before one is drawn
        try:
            ids = [self.submit(request, settings) for request in requests]
            found: dict[int, Completion] = {}
            while len(found) < len(ids):
                found.update(self.ready(None))
        except BaseException:
            self._clear()
            raise
        return [found[id] for id in ids]

    def submit(self, request: Request, settings: Settings) -> int:
        (allowed,) = allowances([request], settings, self.max_model_len)
        id = next(self._ids)
        if allowed.tokens:
            self._asked[self._begin(request, allowed, settings)] = Asked(id, request, allowed)
        else:
            self._answered[id] = nothing_left(request)
        return id

    def ready(self, timeout: float | None) -> list[tuple[int, Completion]]:
        until = None if timeout is None else time.monotonic() + timeout
        try:
            while self._asked and not self._answered:
                self._work(None if until is None else max(0.0, until - time.monotonic()))
                if until is not None and time.monotonic() >= until:
                    break
        except BaseException:
            self._clear()
            raise
        answers, self._answered = list(self._answered.items()), {}
        return answers

    def cancel(self, id: int) -> None:
        if self._answered.pop(id, None) is not None:
            return
        handle = next((handle for handle, asked in self._asked.items() if asked.id == id), None)
        if handle is None:
            raise UserError(
                f"{self._engine} has no request {id} under way: it was answered, cancelled or never submitted; cancel "
                "what submit returned and ready has not"
            )
        del self._asked[handle]
        self._end([handle])

    def _answer(
        self, handle: H, tokens: Sequence[int], log_probs: Sequence[float], finish: str | None, prompt_tokens: int
    ) -> None:
        """What the engine said to a request; see ``completion``. Raises ``UserError`` where that is wrong."""
        asked = self._asked.pop(handle)
        self._answered[asked.id] = completion(
            asked.request, asked.allowance, tokens, log_probs, finish, prompt_tokens, self._engine
        )

    def _clear(self) -> None:
        """Drop all requests, of an engine that may be lost."""
        handles, self._asked, self._answered = list(self._asked), {}, {}
        with suppress(Exception):
            self._end(handles)

    def _refuse(self, what: str) -> None:
        """Raise ``UserError`` where requests are under way, or answers were not taken, before ``what``."""
        names = [one.request.name or str(one.id) for one in self._asked.values()] + [str(id) for id in self._answered]
        if names:
            raise UserError(
                f"{self._engine} has {len(names)} requests under way ({', '.join(names[:3])}"
                f"{', ...' * (len(names) > 3)}): take their answers (ready) or cancel them before {what}"
            )

"""A text game of TextArena for one player: ``textarena:ID``, as in ``textarena:GuessTheNumber-v0``.

    environment:
      name: textarena:Mastermind-v0
      options: {make: {max_turns: 10}} # keyword arguments of textarena.make
      max_turns: 10

The model is shown what is new, not the whole history. The game says how a move is written, mostly in square brackets.
Its reward, at the end, is the one that TextArena gives to the player. A move that the game refuses costs ``penalty``
(0).

Games draw from Python's own generator, which they seed: here each has a state of it, and calls are made one after
another; ``environment.isolate`` lets them run at the same time.

A game of several players, and one that needs what is not here (word lists from the network), is refused.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from typing import Any

from mmrl.config.errors import did_you_mean
from mmrl.core.episode import NO_ACTION, Action, Observation
from mmrl.core.errors import UserError
from mmrl.core.installing import optional
from mmrl.core.json_types import JsonObject
from mmrl.core.plugins.user_code import describe
from mmrl.core.trajectory import Prompt

_ONE_GAME = threading.Lock()
_RAW = "-raw"
"""Behind the ID of a game that shows what is new."""


def __getattr__(name: str) -> Callable[..., Game]:
    """What makes the game ``name``."""
    if name.startswith("_"):
        raise AttributeError(name)
    return partial(Game, name)


class Game:
    """One episode of a game. ``make``: keyword arguments of the game. Raises ``UserError`` where there is no such game,
    or it cannot be played here by one player."""

    def __init__(self, id: str, *, make: JsonObject | None = None, penalty: float = 0.0) -> None:
        if penalty < 0:
            raise UserError(f"environment.options.penalty is {penalty}; it is 0 or more, and is subtracted")
        arena = optional("textarena", "textarena", f"environment.name: textarena:{id}")
        known: dict[str, Any] = arena.envs.registration.ENV_REGISTRY
        if id not in known:
            raise UserError(
                f"environment.name: TextArena has no game {id!r}{did_you_mean(id, list(known))}; correct the name"
            )
        self._penalty, self._echo = penalty, arena.ObservationType.PLAYER_ACTION
        self._drawn = random.Random(0).getstate()
        try:
            with self._drawing():
                self._game = arena.make(id if id.endswith(_RAW) or id + _RAW not in known else id + _RAW, **make or {})
                self._game.reset(num_players=1, seed=0)
        except Exception as error:  # of a package of others
            raise UserError(
                f"environment.name: the game {id} cannot be played here by one player: {describe(error)}; take another "
                "game, correct options.make, or install what it needs"
            ) from error

    def reset(self, prompt: Prompt, seed: int) -> str:
        with self._drawing():
            self._game.reset(num_players=1, seed=seed)
            return self._news()

    def step(self, action: Action) -> Observation:
        with self._drawing():
            done, _ = self._game.step(action.text)
            news = self._news()
            rewards = self._game.close()[0] if done else None
            refused = self._refused()
        reward = float((rewards or {}).get(0, 0.0)) - (self._penalty if refused else 0.0)
        return Observation(news, reward, bool(done), info={NO_ACTION: news} if refused else {})

    def _refused(self) -> bool:
        """Whether the game took the last move for no valid one."""
        state = self._game.state
        ended = any(info.get("invalid_move") for info in getattr(state, "game_info", {}).values())
        return ended or getattr(state, "error_count", 0) > 0

    def _news(self) -> str:
        _, told = self._game.get_observation()
        return told if isinstance(told, str) else "\n".join(text for _, text, kind in told if kind is not self._echo)

    @contextmanager
    def _drawing(self) -> Generator[None]:
        """Python's own generator is that of this game, and nobody else's."""
        with _ONE_GAME:
            theirs = random.getstate()
            random.setstate(self._drawn)
            try:
                yield
            finally:
                self._drawn = random.getstate()
                random.setstate(theirs)

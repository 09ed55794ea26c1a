"""How a run ended, in its file ``ended.json``: what says so where a run has fewer steps than its recipe."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from mmrl.files import write_atomic
from mmrl.secrets import hidden
from mmrl.stored import read_object

NAME = "ended.json"
How = Literal["finished", "early", "stopped", "failed"]
_MOST = 1 << 16
"""Bytes of the file that are read."""


@dataclass(frozen=True)
class Ended:
    """``how``: it came to its end; early stopping or a guard ended it; a signal, a callback or whoever took its steps
    did; an error did. ``step``: finished steps; ``why``: in a few words."""

    how: How
    step: int
    why: str = ""

    def __str__(self) -> str:
        words = {"finished": "finished", "early": "stopped early", "stopped": "stopped", "failed": "failed"}[self.how]
        if self.how == "finished":
            return f"finished ({self.why})" if self.why else words
        return f"{words} at step {self.step}: {self.why}" if self.why else f"{words} at step {self.step}"

    def write(self, run: Path) -> None:
        """Keep it in the directory of the run."""
        made = asdict(self) | {"why": hidden(self.why)}
        write_atomic(run / NAME, json.dumps(made, ensure_ascii=False) + "\n")


def read_ended(run: Path) -> Ended | None:
    """How the run in ``run`` ended; None while it trains, where it was killed, and of an older version."""
    with suppress(OSError, ValueError, TypeError, KeyError):
        found = read_object(run / NAME, _MOST)
        how, step, why = found["how"], found["step"], found["why"]
        if how in get_args(How) and isinstance(step, int) and isinstance(why, str):
            return Ended(how, step, why)
    return None

"""Stop when a held-out metric no longer improves, and keep the best checkpoint.

A reward that RL follows goes up whatever becomes of the samples; one that it never sees tells when they get worse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mmrl.checkpoint.reader import PartState, Saved
from mmrl.config.schema import EarlyStopping
from mmrl.errors import UserError
from mmrl.training.guards import PREFIX


class EarlyStop:
    """Final class: the best of the evaluations so far, and how many have passed since. The same on every controller."""

    def __init__(self, settings: EarlyStopping) -> None:
        self.settings = settings
        self.best: float | None = None
        self.step = 0
        """After which step it was."""
        self.since = 0

    def saw(self, step: int, row: Mapping[str, float]) -> bool:
        """Take a row of heldout.jsonl; whether it is the best so far. Raises ``UserError`` where it has no such metric.

        Only what is better by ``threshold`` ends the waiting. An evaluation with no finite value counts as no better.
        """
        name = self.settings.metric
        if name not in row:
            has = ", ".join(sorted(key for key in row if not key.startswith(PREFIX)))
            raise UserError(f"eval.early_stopping.metric: evaluations have no {name!r}; they have {has}")
        value = row[name]
        beaten = self.best is None or value > self.best + self.settings.threshold
        if not (beaten and math.isfinite(value)):
            self.since += 1
            return False
        self.best, self.step, self.since = value, step, 0
        return True

    @property
    def stopped(self) -> bool:
        return self.since >= self.settings.patience

    def told(self) -> str:
        """Why training ends, for the terminal."""
        which = "base" if self.step == 0 else "best"
        return (
            f"stopping: {self.settings.metric} was best after step {self.step} ({self.best:.3f}) and no better in "
            f"{self.since} evaluations since (eval.early_stopping); --checkpoint {which} has those weights"
        )

    def state_dict(self) -> PartState:
        return PartState({"best": self.best, "step": self.step, "since": self.since})

    def load_state_dict(self, numbers: Mapping[str, Any], saved: Saved) -> None:
        self.best, self.step, self.since = numbers["best"], numbers["step"], numbers["since"]

"""Stop when a held-out metric no longer improves, and keep the best checkpoint.

A training reward may rise while samples get worse (reward hacking); a reward that is not trained on shows this.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from mmrl.config.schema import EarlyStopping
from mmrl.core.checkpoint_reader import PartState, Saved
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject, as_integer, as_number
from mmrl.training.guards import PREFIX


class EarlyStop:
    """Final class: the best evaluation so far, and the number of evaluations since. Equal on every controller."""

    def __init__(self, settings: EarlyStopping, after: int = 0) -> None:
        self.settings, self.after = settings, after
        """Evaluations up to the step ``after`` do not end training."""
        self.best: float | None = None
        self.step = 0
        """The number of finished steps at the best evaluation."""
        self.since = 0

    def saw(self, step: int, row: Mapping[str, float]) -> bool:
        """Read a row of heldout.jsonl; returns whether it is the best so far. Raises ``UserError`` without the metric.

        Better means higher by more than ``threshold``. A value that is not finite is not better.
        """
        name = self.settings.metric
        if name not in row:
            has = ", ".join(sorted(key for key in row if not key.startswith(PREFIX)))
            raise UserError(f"eval.early_stopping.metric: evaluations have no {name!r}; they have {has}")
        value = row[name]
        beaten = self.best is None or value > self.best + self.settings.threshold
        if not (beaten and math.isfinite(value)):
            self.since += step > self.after
            return False
        self.best, self.step, self.since = value, step, 0
        return True

    @property
    def stopped(self) -> bool:
        return self.since >= self.settings.patience

    def why(self) -> str:
        """Why training ends."""
        best = "never finite" if self.best is None else f"best after step {self.step} ({self.best:.3f})"
        return (
            f"{self.settings.metric} was {best} and no better in {self.since} evaluations since (eval.early_stopping)"
        )

    def message(self) -> str:
        """Why training ends, for the terminal."""
        which = "base" if self.step == 0 else "best"
        return f"stopping: {self.why()}; --checkpoint {which} has those weights"

    def state_dict(self) -> PartState:
        return PartState({"best": self.best, "step": self.step, "since": self.since})

    def load_state_dict(self, numbers: JsonObject, saved: Saved) -> None:
        best = numbers["best"]
        self.best = None if best is None else as_number(best)
        self.step = as_integer(numbers["step"])
        self.since = 0 if self.after and saved.step <= self.after else as_integer(numbers["since"])

"""Callbacks of training: code of the user's that is called after a step, an evaluation, a checkpoint and at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.plugins.user_code import blaming
from mmrl.core.signals import Stop

Metrics: TypeAlias = Mapping[str, float]


@dataclass
class Training:
    """What a callback is given: how far the run is, and what it may ask for.

    ``step``: training steps that are done; ``directory``: of the run.
    """

    recipe: Recipe
    directory: Path
    step: int = 0
    reason: str | None = None
    """Why a callback stopped the run."""
    _logged: dict[str, float] = field(default_factory=dict)

    def stop(self, reason: str = "a callback asked for it") -> None:
        """End training after this step. The step is saved, and the run can be resumed."""
        self.reason = reason

    def log(self, **metrics: float) -> None:
        """Add ``metrics`` to the row of the current step, as ``callback/<name>``. In ``on_step`` only."""
        self._logged |= {f"callback/{name}": float(value) for name, value in metrics.items()}

    def take_logged(self) -> dict[str, float]:
        """What was logged since the last call."""
        logged, self._logged = self._logged, {}
        return logged


class Callback:
    """Base class of callbacks: override what you need. All methods are called in the process that trains; of a
    run with several controllers or devices, in that of its leader, on a copy of the object, with figures of all.

    A method that raises ends the run with an error that names it. Finished steps are saved, and the run can be resumed.
    """

    def on_step(self, training: Training, metrics: Metrics) -> None:
        """Called after each training step, with its metrics."""

    def on_evaluation(self, training: Training, metrics: Metrics) -> None:
        """Called after each evaluation on the held-out prompts, with its metrics."""

    def on_checkpoint(self, training: Training, checkpoint: Path) -> None:
        """Called once ``checkpoint``, a directory, is on the disk: when the next one begins, or at the end."""

    def on_end(self, training: Training) -> None:
        """Called when training has ended, or was stopped after a step. Not called after an error."""


class _OnStep(Callback):
    """A plain function: called after each step."""

    def __init__(self, function: Callable[[Training, Metrics], object]) -> None:
        self.function = function

    def on_step(self, training: Training, metrics: Metrics) -> None:
        self.function(training, metrics)


AnyCallback: TypeAlias = Callback | Callable[[Training, Metrics], object]


class Callbacks:
    """The callbacks of a run, called in their order. Raises ``UserError`` where one raises, naming it and the line."""

    def __init__(self, callbacks: Sequence[AnyCallback], recipe: Recipe, directory: Path, stop: Stop) -> None:
        self._callbacks = [as_callback(one) for one in callbacks]
        self._training, self._stop = Training(recipe, directory), stop
        self._saved = 0

    @property
    def asked(self) -> str | None:
        """Why one of them stopped the run."""
        return self._training.reason

    def step(self, step: int, metrics: Metrics) -> dict[str, float]:
        """Tell of a finished step; returns the metrics that callbacks add to its row."""
        self._training.step = step
        self._call("on_step", lambda one: one.on_step(self._training, metrics))
        logged = self._training.take_logged()
        if taken := sorted(logged.keys() & metrics.keys()):
            raise UserError(f"a callback logged {taken[0]}, which the step has already; give it another name")
        return logged

    def evaluated(self, step: int, metrics: Metrics) -> None:
        """Tell of an evaluation after ``step``."""
        self._training.step = step
        self._call("on_evaluation", lambda one: one.on_evaluation(self._training, metrics))

    def saved(self, step: int, checkpoint: Path) -> None:
        """Tell of the newest checkpoint on the disk, once."""
        if step > self._saved:
            self._saved = step
            self._call("on_checkpoint", lambda one: one.on_checkpoint(self._training, checkpoint))

    def ended(self) -> None:
        """Tell that training has ended without an error."""
        self._call("on_end", lambda one: one.on_end(self._training))

    def _call(self, method: str, call: Callable[[Callback], None]) -> None:
        for one in self._callbacks:
            named = one.function if isinstance(one, _OnStep) else type(one)
            name = getattr(named, "__qualname__", type(named).__qualname__)
            with blaming(f"the callback {name} ({method})", None, "it"):
                call(one)
        if self._training.reason is not None:
            self._stop.asked, self._stop.reason = True, self._training.reason


def as_callback(value: AnyCallback) -> Callback:
    """``value`` as a ``Callback``; a function is called after each step. Raises ``UserError``."""
    if isinstance(value, Callback):
        return value
    if isinstance(value, type) and issubclass(value, Callback):
        raise UserError(f"callbacks: {value.__name__} is a class; give an object of it: {value.__name__}()")
    if not callable(value):
        raise UserError(
            f"callbacks: {value!r} is neither a mmrl.Callback nor a function; write def after_step(training, metrics)"
        )
    return _OnStep(value)

"""Controllers whose devices sample ahead of training, in simulated time: the order of ``mmrl.rollout.async_rollout``.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from mmrl.placement.simulated_devices import Rounds, SimulatedDevices


class SimulatedAhead:
    """Final class. The ``controllers`` share a clock, and their roles are set (``SimulatedDevices.apart``).

    ``steps``: each controller's rounds, by step. ``training``: the seconds of each step's training. ``lend``: while a
    controller waits for the samples of the step that trains next, its devices that train do work for that step.
    ``trained`` hears of each step when it is trained.
    """

    def __init__(
        self,
        controllers: Sequence[SimulatedDevices],
        steps: Sequence[Sequence[Rounds]],
        training: Sequence[float],
        staleness: int,
        trained: Callable[[int], None],
        *,
        lend: bool,
    ) -> None:
        self._controllers, self._time = controllers, controllers[0].time
        self._steps, self._seconds, self._staleness, self._lend = steps, training, staleness, lend
        self._hears = trained
        self._judged: set[tuple[int, int]] = set()
        """The steps and the controllers that have all their samples of them."""
        self._ready = 0
        """Controllers whose devices can train the next step."""
        self._trained: list[float] = []
        self.moves: list[int] = []
        """Changes of roles until the end of each step."""

    def trained(self) -> list[float]:
        """When each step has been trained."""
        for step in range(min(self._staleness + 1, len(self._steps))):
            self._sample(step)
        self._wait()
        self._time.run()
        return self._trained

    def _sample(self, step: int) -> None:
        for n, (devices, rounds) in enumerate(zip(self._controllers, self._steps[step], strict=True)):
            devices.rounds_ahead(step, rounds, partial(self._finished, step, n))

    def _finished(self, step: int, controller: int) -> None:
        self._judged.add((step, controller))
        if step == len(self._trained):  # for which the controller waits
            if self._lend:
                self._controllers[controller].recall(self._can_train)
            else:
                self._can_train()

    def _wait(self) -> None:
        """For the samples of the next step to train."""
        step, self._ready = len(self._trained), 0
        for n, devices in enumerate(self._controllers if step < len(self._steps) else ()):
            if (step, n) in self._judged:
                self._can_train()
            elif self._lend:
                devices.lend(step)

    def _can_train(self) -> None:
        self._ready += 1
        if self._ready == len(self._controllers):
            self._time.after(self._seconds[len(self._trained)], self._updated)

    def _updated(self) -> None:
        self._trained.append(self._time.now)
        self.moves.append(sum(devices.scheduler.moves for devices in self._controllers))
        self._hears(len(self._trained) - 1)
        later = len(self._trained) + self._staleness
        if later < len(self._steps):
            self._sample(later)
        self._wait()

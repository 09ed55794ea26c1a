"""Sampling ahead: what step ``n`` trains on was drawn while the steps before it trained (``placement: disaggregated``).

The groups of step ``n`` are drawn with the weights as they were after step ``n - staleness`` (the first ones with
those that the run began with), always: not with whichever weights happen to be there. So who is faster, how many
controllers there are, and where a run was stopped change nothing in what is drawn. Sampling lags by exactly
``staleness`` steps, and begins as soon as those weights are there.

That the policy has moved since is corrected as the gap to an engine is: truncated importance weights, the policy before
the update over the policy that drew (``mmrl.algorithms.mismatch``; the decoupled objective of AReaL, arXiv 2505.24298,
eq. 5). Of pictures the weights are of mean log-probs, as Flow-GRPO's ratios are.

A checkpoint keeps the weights of the last ``staleness`` versions and no samples: a resumed run draws again what was
under way, which is the same.
"""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread

import torch
from torch import Tensor

from mmrl.batch import Run
from mmrl.engines.policy import Version
from mmrl.report.clock import Clock
from mmrl.rollout import Round, Sampling
from mmrl.tally import Tally


class Ahead:
    """Final class: the rounds of this step and the next ones on this controller, and the versions they are drawn with.

    A thread of each round gives samples to the rewards as they come, one round after the other.
    """

    def __init__(self, staleness: int) -> None:
        self.staleness = staleness
        self._versions: dict[int, Version] = {}
        self._rounds: dict[int, tuple[Sampling, Future[None]]] = {}

    def land(self, run: Run, step: int, clock: Clock, tally: Tally) -> Round:
        """Begin what may be begun with the weights of now, and wait for the round of ``step``. Raises ``UserError``."""
        self._versions[step] = run.devices.version(run, run.objective.samples_with)
        last = min(step + self.staleness, run.recipe.train.steps - 1)
        for n in range(step, last + 1):
            if n not in self._rounds:
                self._rounds[n] = self._begin(run, n, clock)
        self._versions = {n: version for n, version in self._versions.items() if n + self.staleness > step}
        sampling, collected = self._rounds.pop(step)
        with clock("sample"):
            collected.result()
        stale = torch.tensor(float(step - self._of(step)))
        tally.gather({}, {"sampling/stale_steps": stale}, 1)
        return sampling.finish(clock)

    def state(self) -> tuple[dict[str, Tensor], dict[str, int]]:
        """What a checkpoint keeps: the weights of every version as ``step.name``, and the updates each has seen."""
        tensors = {f"{n}.{name}": t for n, version in self._versions.items() for name, t in version.tensors.items()}
        return tensors, {str(n): version.updates for n, version in self._versions.items()}

    def load_state(self, run: Run, tensors: dict[str, Tensor], updates: dict[str, int]) -> None:
        """Restore ``state``; the next ``land`` draws again what was under way."""
        self._rounds.clear()
        self._versions = {
            int(n): Version(
                seen,
                run.objective.samples_with,
                {name: tensors[f"{n}.{name}"] for name in run.policy.trainable},
            )
            for n, seen in updates.items()
        }

    def _of(self, step: int) -> int:
        """The version that ``step`` is drawn with."""
        return max(0, step - self.staleness)

    def _begin(self, run: Run, step: int, clock: Clock) -> tuple[Sampling, Future[None]]:
        slots = run.controller.slots(step, run.prompts, run.recipe.train.prompts_per_step)
        version = self._versions[self._of(step)]
        sampling = Sampling(run, slots, step, clock, Clock(torch.device("cpu")), version)
        collected: Future[None] = Future()
        before = [future for _, future in self._rounds.values()]
        Thread(target=_collect, args=(sampling, before, collected), name=f"mmrl-ahead-{step}", daemon=True).start()
        return sampling, collected


def _collect(sampling: Sampling, before: list[Future[None]], collected: Future[None]) -> None:
    for earlier in before:
        earlier.exception()
    try:
        sampling.collect()
    except BaseException as error:
        collected.set_exception(error)
    else:
        collected.set_result(None)

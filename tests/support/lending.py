"""Shared by the tests of lending and others."""

import threading
import time

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.placement import device_tasks
from mmrl.placement.multi_device import MultiDevice
from mmrl.placement.simulated_devices import SimulatedTask
from mmrl.placement.tasks import LENT
from mmrl.runtime import worker

allow_cpu_only()  # before transformers imports torchvision
SMALL = ["train.prompts_per_step=4", "train.group_size=4", "train.micro_batch_size=4", "model.dtype=float32"]
SMALL += ["sampling.batch_size=4", "train.steps=3"]  # nothing is drawn beyond the last step


class Slow:
    """A device with a context of its own, in a thread of this process; ``pause`` seconds before it samples."""

    def __init__(self, context, pause):
        self.context, self.pause = context, pause

    def perform(self, context, call, arguments, features):
        if call is device_tasks.sample:
            time.sleep(self.pause)
        worker._keep(self.context, features)
        return device_tasks.perform(self.context, call, arguments)

    def close(self):
        pass


class Begins:
    """How the devices of a run begin, so that no machine is too fast or too slow for lending: the ``others`` wait in
    their first task until device 0, which trains, has begun ``lent`` tasks of sampling or judging. All have begun to
    sample before a task ends. ``judged``: device 0 trains only after another one has judged."""

    def __init__(self, others=1, lent=2, judged=False):
        self.others, self.lent, self.judged = set(range(1, others + 1)), lent, judged
        self.begun, self.changed = [], threading.Condition()

    def before(self, device, task):
        """Wait until ``device`` may do ``task``. Raises ``TimeoutError``."""
        shown = task.call.__name__
        with self.changed:
            if task.role in LENT and shown in ("lent", "sample", "score"):
                self.begun.append((device, task.role))
                self.changed.notify_all()
                self._wait("not all devices sample", lambda: self.others <= {d for d, _ in self.begun})
                if device:
                    self._wait("device 0 is not lent", lambda: sum(d == 0 for d, _ in self.begun) >= self.lent)
            elif task.role == "train" and shown in ("prepare", "backward", "apply") and self.judged:
                self._wait("no other device judges", lambda: any(d and role == "judge" for d, role in self.begun))

    def _wait(self, otherwise, until):
        if not self.changed.wait_for(until, 120):
            raise TimeoutError(f"{otherwise}: {self.begun}")


class Watched(MultiDevice):
    """Keeps what was sampled, by sample."""

    def __init__(self, *given):
        super().__init__(*given)
        self.drawn, self.rows, self.decided, self.begins = {}, [], [], None

    def begin_by(self, begins):
        """Begin as ``begins`` says. Before a task has ended, lending is worth it by these seconds and no price."""
        self.begins = begins
        self._board.scheduler._seconds.update(rollout=1.0, judge=1.0)
        self._board.scheduler.prices.clear()

    def _perform(self, context, device, task):
        if self.begins is not None:
            self.begins.before(device, task)
        return super()._perform(context, device, task)

    def sample(self, *given, **how):
        for n, trajectory, samples in super().sample(*given, **how):
            self.drawn |= {i: trajectory.rows([k]) for k, i in enumerate(trajectory.ids)}
            yield n, trajectory, samples

    def end_step(self, context, step):
        self.rows += [(step, event) for event in self._board.scheduler.events]
        found = super().end_step(context, step)
        self.decided += [line for line in self.lines() if "decision" in line]
        return found


def task(role, step, updates=None):
    return SimulatedTask(role, 1.0, lambda: None, of=(step, 0), updates=updates)

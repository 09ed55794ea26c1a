"""A reward in a process of its own (``process: true``), so that its Python does not hold up the launches of a device.

The threads of a process share one lock of the interpreter: while a reward counts words or compresses pictures in this
one, the thread that launches kernels waits for its turns. Imports no torch.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mmrl.core.errors import UserError, refuse
from mmrl.core.json_types import JsonObject
from mmrl.core.plugins.python_objects import in_this_process
from mmrl.core.reward_contract import Context, Returned
from mmrl.core.script_process import ScriptProcess
from mmrl.core.trajectory import Sample
from mmrl.rewards.loading import Found, Loaded, problems

_SCRIPT = Path(__file__).with_name("apart_child.py")
_EDIT = "remove process from this reward"


def apart_problems(found: Found, file: str) -> list[str]:
    """Why the reward cannot be computed in another process. ``file``: the name in the recipe."""
    declared = found.declaration
    why = {
        "lives in this process: save it in a file, or": in_this_process(file),
        "gives a gradient, which does not leave its process:": declared.differentiable,
        "computes with a model on the device, beside which nothing is gained:": declared.device,
    }
    return [f"process: {found.name} {said} {_EDIT}" for said, is_it in why.items() if is_it]


def build_apart(found: Found, file: str, options: JsonObject) -> Loaded:
    """The reward, built in a process of its own when it is first called. Raises ``UserError``."""
    refuse(problems(found, options) + apart_problems(found, file))
    declaration = replace(found.declaration, inputs=found.reads(options), reads=None, models=None, checks=False)
    return Loaded(found.name, RewardProcess(file, options).ask, declaration, False, found.file, found.place)


class RewardProcess:
    """Asks a process for the scores of a reward. It starts with the first call, and anew after it ended or was given
    up. Calls come one after another; one that begins while another is under way ends that one's process, since its
    caller has given it up.
    """

    def __init__(self, file: str, options: JsonObject) -> None:
        self._file, self._options = file, options
        self._turn = threading.Lock()
        self._child: ScriptProcess | None = None
        self._busy = False

    def ask(self, samples: Sequence[Sample], *, context: Context) -> Returned:
        """What the reward returns. Raises ``UserError`` for what it raises, and where its process ends."""
        with self._turn:
            if self._busy:
                self._end()
            child = self._child = self._child or self._started()
            self._busy = True
        try:
            there = Context(context.step, "cpu", context.folder, context.label, round=context.round)
            # not pipe.send: torch would hand over its tensors' memory and not their content
            child.pipe.send_bytes(pickle.dumps(([_on_cpu(sample) for sample in samples], there)))
            returned, sent, why = pickle.loads(child.pipe.recv_bytes())
        except (EOFError, OSError):
            with self._turn:
                if self._child is child:
                    self._end()
            status = child.process.wait()
            raise UserError(f"the process of the reward ended with status {status}; mend it, or {_EDIT}") from None
        with self._turn:
            self._busy = self._busy and self._child is not child
        if why:
            raise UserError(why)
        context.sent.update(sent)
        return returned

    def close(self) -> None:
        """End the process."""
        with self._turn:
            self._end()

    def _started(self) -> ScriptProcess:
        child = ScriptProcess(_SCRIPT, own_session=True)
        child.pipe.send_bytes(pickle.dumps((self._file, self._options)))
        return child

    def _end(self) -> None:
        if self._child is not None:
            self._child.end()
        self._child, self._busy = None, False


def _on_cpu(sample: Sample) -> Sample:
    return sample if sample.tensor is None else replace(sample, tensor=sample.tensor.detach().cpu())

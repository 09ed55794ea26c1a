"""The trained weights: optimizer, and named copies of the weights (reference, old, ema).

The optimizer's state and the reference may stay in host memory while they are not used.
"""

# What is private to torch below has no public name.
# pyright: reportPrivateUsage=false

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mmrl.config.learning_rate import learning_rate
from mmrl.config.performance import Performance
from mmrl.config.schema import Optim
from mmrl.core import nan_check, notices
from mmrl.core.checkpoint_reader import PartState, Saved
from mmrl.core.errors import NotFiniteError, UserError
from mmrl.core.json_types import as_integer
from mmrl.core.transfer import arrived, to_device, to_host
from mmrl.models.gradient_check import GradientCheck
from mmrl.models.optimizers import as_kept, as_saved, optimizer_of
from mmrl.models.weights import Replicated, Weights

P = TypeVar("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Version:
    """The trainable weights as they were after ``updates`` updates, of the copy ``name``, in the host's memory."""

    updates: int
    name: str
    tensors: dict[str, Tensor]

    @property
    def tag(self) -> tuple[int, str]:
        """The ``Policy.tag`` of a policy that has these weights."""
        return self.updates, self.name


class Policy:
    """Final class. Gradients accumulate over ``backward`` calls until ``apply``.

    Copies hold the trainable weights only: a few megabytes for LoRA. The reference of a LoRA policy is the base model
    with the adapter switched off; otherwise, and where a saved adapter goes on (``continues``), it is a copy of the
    weights the run began with.

    ``weights``: how they lie on the ranks that train them; None for one rank. Optimizer and copies lie as they do.
    ``prefix``: how the names of its files in a checkpoint begin.
    """

    def __init__(
        self,
        module: nn.Module,
        settings: Optim,
        total_updates: int,
        weights: Weights | None = None,
        performance: Performance | None = None,
        prefix: str = "",
        *,
        continues: bool = False,
    ) -> None:
        self.prefix = prefix
        self.base_is_reference = hasattr(module, "disable_adapter") and not continues
        self.module, self.settings, self.total_updates = module, settings, total_updates
        self.weights = weights or Replicated(module)
        self.trainable = self.weights.mine
        self.performance = performance or Performance()
        stepped = [self.trainable[name] for name in self.weights.stepped]
        self._gradients, self._rows = GradientCheck(module, self.weights.stepped), False
        self.optimizer = optimizer_of(stepped, settings, self.performance)
        self._device = next((p.device for p in self.trainable.values()), torch.device("cpu"))
        away = self._device.type != "cpu"
        self._state = OptimizerState(self.optimizer) if away and self.performance.offload_optimizer else None
        self._away = frozenset({"reference"} if away and self.performance.offload_reference else ())
        """Copies that live on the host."""
        self._visiting: dict[str, dict[str, Tensor]] = {}
        """Of those, what is on the device until it is ``put_away``. Its values do not change, so nothing goes back."""
        self.copies: dict[str, dict[str, Tensor]] = {}
        self.updates = 0
        self.spent = 0.0
        """The share of train.max_cpu_seconds that the steps before this one took."""
        self.active = "current"
        if settings.ema_decay is not None:
            self.keep("ema")

    @property
    def tag(self) -> tuple[int, str]:
        """Names the weights as they are now: an engine with weights of its own asks whether it has these."""
        return self.updates, self.active

    def keep(self, name: str) -> None:
        """Begin a copy ``name`` of the weights as they are now."""
        if name == "reference" and self.base_is_reference:
            return
        kept = to_host if name in self._away else torch.clone
        self.copies[name] = {k: kept(p.detach()) for k, p in self.trainable.items()}

    def hold(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Begin a copy ``name`` with ``weights``, of the names of the trained ones."""
        self.copies[name] = {k: weights[k].to(p.device, p.dtype) for k, p in self.trainable.items()}

    @contextmanager
    def using(self, name: str) -> Generator[None]:
        """Compute under the copy ``name``; ``"current"`` is the weights themselves. Raises ``KeyError``."""
        if name == "reference" and self.base_is_reference:
            with self.module.disable_adapter():  # type: ignore[operator]
                yield
        elif name == self.active:
            yield
        else:
            copy = self.copies[name]
            if name in self._away:
                if name not in self._visiting:
                    self._visiting[name] = {k: to_device(t, self.trainable[k].device) for k, t in copy.items()}
                copy = self._visiting[name]
            before, self.active = self.active, name
            self.weights.swap(copy)
            try:
                yield
            finally:
                self.weights.swap(copy)
                self.active = before  # which another copy may be: the reference beside the moving average

    def put_away(self) -> None:
        """Have nothing on the device that lives on the host: no slice needs it before the next update."""
        self._visiting.clear()

    @contextmanager
    def unsharded(self, name: str) -> Generator[None]:
        """``using`` and ``Weights.unsharded`` together; all ranks enter and leave it together."""
        with self.using(name), self.weights.unsharded():
            yield

    @property
    def evaluated(self) -> str:
        """The copy that evaluation and export use: the moving average where one is kept."""
        return "ema" if "ema" in self.copies else "current"

    def for_evaluation(self) -> AbstractContextManager[None]:
        """The context of evaluation and export."""
        return self.unsharded(self.evaluated)

    @torch.no_grad()
    def move(self, name: str, decay: float) -> None:
        """``copy <- decay * copy + (1 - decay) * weights``."""
        copy = self.copies[name]
        torch._foreach_lerp_([copy[k] for k in self.trainable], [p.data for p in self.trainable.values()], 1 - decay)

    def age(self, name: str, most: int) -> None:
        """Remember the copy ``name``, which moves next, as ``aged(name, 1)``, what that was as ``aged(name, 2)`` and so
        on until ``most``."""
        for n in range(most, 1, -1):
            self.copies[snapshot_name(name, n)] = self.copies[snapshot_name(name, n - 1)]
        self.copies[snapshot_name(name, 1)] = self.copies[name]
        self.copies[name] = {k: t.clone() for k, t in self.copies[name].items()}

    def version(self, name: str) -> Version:
        """The weights of the copy ``name`` as they are now, for another process; the next update leaves them alone.

        All ranks that hold parts of them ask together.
        """
        with self.using(name):
            taken = {k: self.weights.whole(k, p.detach()).to("cpu", copy=True) for k, p in self.trainable.items()}
        return Version(self.updates, name, taken)

    @torch.no_grad()
    def load_version(self, version: Version) -> None:
        """Have the weights of ``version``, and its tag. Where nothing is trained: the optimizer is left as it was."""
        for k, p in self.trainable.items():
            p.copy_(version.tensors[k])
        self.weights.changed()
        self.updates, self.active = version.tag

    def each(self, pieces: Iterable[P], work: Callable[[P], R]) -> list[R]:
        """What ``work`` makes of each piece, for which it calls the model once. Where the model is a pipeline of stages
        only the last has an answer."""
        if self.weights.stages is not None:
            return self.weights.stages.through(list(pieces), work, graph=False)
        found: list[R] = []
        for piece in pieces:
            found.append(work(piece))
            notices.alive()
        return found

    def accumulate(self, pieces: Iterable[P], loss_of: Callable[[P], Tensor]) -> None:
        """Add the gradients of the loss of each piece, whose graph is gone before the next is begun; or, of a pipeline,
        as its stages have it. ``loss_of`` calls the model once there."""
        if self.weights.stages is not None:
            self.weights.stages.through(list(pieces), loss_of, graph=True)
            return
        for piece in pieces:
            self.backward(loss_of(piece))
            notices.alive()

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self._rows = True

    def apply(self) -> dict[str, float]:
        """Clip, take the optimizer step, clear the gradients.

        Raises ``NotFiniteError`` where the gradient or, at the first update, a weight is not finite, before a weight is
        touched, and where the weights are not finite after the step. Raises ``UserError`` where a weight would never
        learn (``mmrl.models.gradient_check``).
        """
        self.put_away()
        self.weights.gather_gradients()
        self._gradients.check({name: p.grad for name, p in self.trainable.items()}, rows=self._rows)
        self._rows = False
        norm = self.weights.norm()
        if not torch.isfinite(norm):
            held = nan_check.first({k: p.grad for k, p in self.trainable.items() if p.grad is not None})
            where = f"; the first such gradient is of {held}" if held else ""
            raise NotFiniteError(f"the gradient norm of update {self.updates} is {norm.item()}{where}")
        if not self.updates and (held := nan_check.first(self.trainable)):  # of rows that nothing has read, so far
            raise NotFiniteError(f"update 0 starts from weights that are not finite: {held}")
        torch.nn.utils.clip_grads_with_norm_(self.trainable.values(), self.settings.max_grad_norm, norm)
        lr = self.learning_rate()
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        with self._state.on_device() if self._state else nullcontext():
            self.optimizer.step()
        self.weights.updated()
        self.weights.changed()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        if self.settings.ema_decay is not None and self.updates % self.settings.ema_every == 0:
            # The early average follows the weights: (1 + n) / (10 + n) is the usual ramp.
            n = self.updates // self.settings.ema_every
            self.move("ema", min(self.settings.ema_decay, (1 + n) / (10 + n)))
        after = nan_check.norm(self.trainable.values())
        norms = torch.stack([norm.double(), after.double().to(norm.device)]).tolist()  # one wait for both
        if not math.isfinite(norms[1]) and (held := nan_check.first(self.trainable)):
            raise NotFiniteError(f"the weights after update {self.updates} are not finite: {held}")
        return {"optim/grad_norm": norms[0], "optim/lr": lr}

    def learning_rate(self) -> float:
        """The learning rate of the next update: a function of what a checkpoint holds, so that a resumed run has it
        too."""
        return learning_rate(self.settings, self.total_updates, self.updates, self.spent)

    def state(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
        """All that a resumed run needs: tensors by part and name, as this rank keeps them, and numbers."""
        if self._state or self._away:
            arrived(self._device)
        adam = {
            f"{kind}.{name}": t
            for name, p in self.trainable.items()
            if p in self.optimizer.state
            for kind, t in as_saved(self.optimizer.state[p]).items()
        }
        weights = {name: p.detach() for name, p in self.trainable.items()}
        copies = {f"copy_{name}": copy for name, copy in self.copies.items()}
        return {"weights": weights, "optimizer": adam, **copies}, {"updates": self.updates}

    def state_dict(self) -> PartState:
        tensors, numbers = self.state()
        return PartState(numbers, self._checkpoint_views(tensors))

    def load_state_dict(self, numbers: Mapping[str, Any], saved: Saved) -> None:
        """Restore ``state_dict``, of which each rank reads what it keeps.

        Raises ``UserError`` where it is of another policy.
        """
        files = {f: f.removeprefix(self.prefix) for f in saved.shapes if f.startswith(self.prefix)}
        rooms = self.rooms({part: saved.shapes[file] for file, part in files.items() if _is_part(part)})
        saved.read(self._checkpoint_views(rooms))
        self.load_state(rooms, numbers)

    def rooms(self, saved: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """Empty tensors for a saved ``state``, whose whole shapes are ``saved``'s.

        Raises ``UserError`` where it is of another policy, or in 8 bits where weights lie in parts.
        """
        theirs = {name: t.shape for name, t in saved.get("weights", {}).items()}
        different = sorted(set(theirs) ^ set(self.weights.names))[:3]
        if different or any(theirs[k] != self.weights.checkpoint_view(k, p).shape for k, p in self.trainable.items()):
            different = different or ["shapes differ"]
            raise UserError(
                f"the checkpoint is of another policy ({', '.join(different)}, ...): resume with its own recipe "
                "(resolved.json in the run directory), or start a new run with --out"
            )
        if self.weights.lockstep and any("_8bit." in key for key in saved.get("optimizer", ())):
            raise UserError(
                "train.backend: the checkpoint has the optimizer's moments in 8 bits, of whole weights; go on with "
                "train.backend=replicated"
            )
        return {
            part: {
                k: torch.empty_like(t, device="cpu") if _counts(part, k) else self._room(part, k, t)
                for k, t in of.items()
                if _parameter(part, k) in (self.weights.stepped if part == "optimizer" else self.trainable)
            }
            for part, of in saved.items()
        }

    def checkpoint_view(self, part: str, key: str, mine: Tensor) -> Tensor:
        """A tensor of ``state`` or ``rooms`` as it is saved and read: see ``Weights.checkpoint_view``."""
        return mine if _counts(part, key) else self.weights.checkpoint_view(_parameter(part, key), mine)

    def _checkpoint_views(self, tensors: Mapping[str, Mapping[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
        """``checkpoint_view`` of all of them, by the names of their parts in a checkpoint."""
        return {
            f"{self.prefix}{part}": {key: self.checkpoint_view(part, key, t) for key, t in of.items()}
            for part, of in tensors.items()
        }

    def _room(self, part: str, key: str, saved: Tensor) -> Tensor:
        mine = self.trainable[_parameter(part, key)].detach()
        return torch.empty_like(saved, device=mine.device) if _in_8_bits(part, key) else torch.empty_like(mine)

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Mapping[str, Tensor]], numbers: Mapping[str, Any]) -> None:
        """Restore ``state``, of whichever optimizer; ``tensors`` are copied."""
        found: dict[str, dict[str, Tensor]] = {}
        for key, t in tensors.get("optimizer", {}).items():
            kind, _, name = key.partition(".")
            found.setdefault(name, {})[kind] = t
        for name, p in self.trainable.items():
            p.copy_(tensors["weights"][name])
            if kinds := found.get(name):
                self.optimizer.state[p] = as_kept(kinds, p, self.performance)
        if self._state:
            self._state.put_away()
        self.weights.changed()
        self.put_away()
        self.copies = {}
        for part, copy in tensors.items():
            if part.startswith("copy_"):
                name = part.removeprefix("copy_")
                kept = to_host if name in self._away else torch.clone
                self.copies[name] = {k: kept(v.to(self.trainable[k].device)) for k, v in copy.items()}
        self.updates = as_integer(numbers["updates"])


def snapshot_name(name: str, steps: int) -> str:
    """What the copy ``name`` as it was ``steps`` steps ago is called."""
    return f"{name}-{steps}"


def _is_part(name: str) -> bool:
    """Whether ``Policy.state`` has a part of this name."""
    return name in ("weights", "optimizer") or name.startswith("copy_")


def _counts(part: str, key: str) -> bool:
    """Whether it is the optimizer's count of steps, which is no tensor of a parameter's shape."""
    return part == "optimizer" and key.startswith("step.")


def _in_8_bits(part: str, key: str) -> bool:
    """Whether it is 8 bits of a moment, or their scales: not as a parameter is in shape and dtype."""
    return part == "optimizer" and key.partition(".")[0].endswith(("_8bit", "_absmax"))


def _parameter(part: str, key: str) -> str:
    """The name of the parameter that a tensor of ``state`` belongs to."""
    return key.partition(".")[2] if part == "optimizer" else key


class OptimizerState:
    """Final class: the tensors of ``optimizer``'s state are on the host outside of ``on_device``.

    Each parameter's are moved whole, so that an update computes what it would compute anyway, to the bit.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._rooms: dict[tuple[Tensor, str], Tensor] = {}

    @contextmanager
    def on_device(self) -> Generator[None]:
        for p, name, t in self._tensors():
            self._optimizer.state[p][name] = to_device(t, p.device)
        try:
            yield
        finally:
            self.put_away()

    def put_away(self) -> None:
        """Move to the host what is on the device, into the same memory each time."""
        for p, name, t in self._tensors():
            if t.device.type != "cpu":
                self._rooms[p, name] = self._optimizer.state[p][name] = to_host(t, self._rooms.get((p, name)))

    def _tensors(self) -> Iterator[tuple[Tensor, str, Tensor]]:
        """Those of each parameter alone; its count of steps stays where the optimizer has it, and tables that all
        parameters share on the device."""
        for p, state in self._optimizer.state.items():
            for name, t in list(state.items()):
                if isinstance(t, Tensor) and name not in ("step", "qmap1", "qmap2"):
                    yield p, name, t

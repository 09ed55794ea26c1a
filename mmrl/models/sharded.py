"""Sharded trained weights, a part of each parameter on every rank: torch's FSDP2.

A forward or backward pass gathers the weights block by block, so all ranks must do equally many of them, in the same
order. Where they cannot (sampling), the whole model is gathered for the phase.

The optimizer, copies of the weights and their moving average work on this rank's shards as plain tensors: what they do
is elementwise.
"""

from __future__ import annotations

import ctypes
import warnings
from collections import Counter
from collections.abc import Generator
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmrl.core import sharded_loading
from mmrl.models.weights import ByItself, exchange, gradients, outermost

_MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""
LARGE = 1 << 20
"""Bytes from which a tensor on the CPU has a block of its own. Smaller ones lie in the heap: a block costs time."""


class Sharded(ByItself):
    """Final class; see ``mmrl.models.weights.Weights``. Changes ``module`` in place; frozen weights are sharded too.

    ``group``: the ranks that divide the weights; all must construct it together, from equal weights or from their own
    rows of them (``mmrl.core.sharded_loading``). ``replicas``: the ranks of other groups that have this one's rows
    (HSDP), if there are such. ``sent`` counts the bytes given to them. ``gathered``: the dtype in which float32 weights
    are gathered; gradients are summed in float32.
    """

    in_shards = lockstep = True

    def __init__(
        self,
        module: nn.Module,
        group: dist.ProcessGroup,
        sent: Counter[str],
        gathered: torch.dtype = torch.float32,
        replicas: dist.ProcessGroup | None = None,
    ) -> None:
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        half = gathered != torch.float32
        # what a model takes stays as it is: autocast knows where rounding does harm, in time steps for example
        policy = MixedPrecisionPolicy(gathered, torch.float32, cast_forward_inputs=False) if half else None
        given: dict[str, Any] = {} if policy is None else {"mp_policy": policy}
        self._itemsize = gathered.itemsize
        self._group, self._sent = group, sent
        # the loop writes into nothing that a model returned
        warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view tensor")
        device = sharded_loading.device_of(module)
        if device.type == "cpu":
            give_back()
        sharded_loading.move(module, device)
        self._copies = 1 if replicas is None else replicas.size()
        mesh = _mesh(group, replicas, device.type)
        self._unsharded = False
        self._counted: set[int] = set()
        self._kept = 0  # bytes of all parameters on this rank that the others get, about
        for part in (*blocks(module), module):
            fully_shard(part, mesh=mesh, reshard_after_forward=True, **given)
            self._count(part)
        sharded_loading.fill(module)
        self._parts: list[Any] = [m for m in module.modules() if isinstance(m, FSDPModule)]
        for part in self._parts:
            part.set_gradient_divide_factor(1.0)  # losses have global denominators: their gradients are summed
            part.set_force_sum_reduction_for_comms(True)
        fully_shard.state(module)._lazy_init()  # type: ignore[attr-defined]  # the first forward may be a block's own
        self._whole = {name: p for name, p in module.named_parameters() if p.requires_grad}
        with torch.no_grad():
            self.mine = {name: _shard(p) for name, p in self._whole.items()}
        self.names = self.stepped = self.mine.keys()

    @torch.no_grad()
    def gather_gradients(self) -> None:
        for name, p in self._whole.items():
            self.mine[name].grad = None if p.grad is None else _shard(p.grad)
            p.grad = None

    def norm(self) -> Tensor:
        here = [g.square().sum() for g in gradients(self.mine)]
        total = torch.stack(here).sum() if here else torch.zeros((), device=next(iter(self.mine.values())).device)
        dist.all_reduce(total, group=self._group)
        return total.sqrt()

    def swap(self, copy: dict[str, Tensor]) -> None:
        exchange(self.mine, copy, unsharded=self._unsharded)

    @outermost
    def unsharded(self) -> Generator[None]:
        self._sent["weights"] += self._kept
        for part in self._parts:
            part.set_reshard_after_forward(False, recurse=False)
            part.unshard()
        try:
            yield
        finally:
            for part in self._parts:
                part.set_reshard_after_forward(True, recurse=False)
                part.reshard()

    def _count(self, part: nn.Module) -> None:
        """Count what each pass through ``part`` gives the others: its rows of the weights before the forward and again
        before the backward, and behind that its gradients of the rows of others."""
        own = [p for p in part.parameters() if id(p) not in self._counted]
        self._counted.update(map(id, own))
        kept = sum(_shard(p).numel() * min(p.element_size(), self._itemsize) for p in own)
        given = sum(p.numel() * p.element_size() - _shard(p).nbytes for p in own if p.requires_grad)
        among = 2 * (self._copies - 1) / self._copies  # a ring all-reduce of the summed rows
        given += int(among * sum(_shard(p).nbytes for p in own if p.requires_grad))
        self._kept += kept

        def count(*_: Any) -> None:
            if not self._unsharded:
                graph = torch.is_grad_enabled()
                self._sent["weights"] += kept * (1 + graph)
                self._sent["gradients"] += given * graph

        part.register_forward_pre_hook(count)

    def checkpoint_view(self, name: str, mine: Tensor) -> Tensor:
        from torch.distributed.tensor import DTensor

        like: Any = self._whole[name]
        return DTensor.from_local(
            mine, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
        )

    def whole(self, name: str, mine: Tensor) -> Tensor:
        self._sent["weights"] += mine.nbytes
        view: Any = self.checkpoint_view(name, mine.detach())
        return view.full_tensor()


def _mesh(group: dist.ProcessGroup, replicas: dist.ProcessGroup | None, device: str) -> Any:
    """The ranks of ``group``; with ``replicas`` a mesh of two dimensions, the groups and the ranks in each."""
    from torch.distributed.device_mesh import DeviceMesh  # half a second, which a run without shards need not take

    if replicas is None:
        return DeviceMesh.from_group(group, device)
    ranks = torch.arange(replicas.size() * group.size()).view(replicas.size(), group.size())
    return DeviceMesh.from_group([replicas, group], device, ranks, mesh_dim_names=("replica", "shard"))


def blocks(module: nn.Module) -> list[nn.Module]:
    """The layers that transformers and diffusers say must stay together, or repeat: each is gathered when its turn
    comes."""
    names = _named(module, "_no_split_modules") or _named(module, "_repeated_blocks")  # LTX-2 has the second alone
    return [m for m in module.modules() if type(m).__name__ in names and m is not module]


def _named(module: nn.Module, field: str) -> set[str]:
    return {name for m in module.modules() for name in getattr(m, field, None) or ()}


def give_back(size: int = LARGE) -> None:
    """Have this process give what was gathered back to the system. The C library asks the system for a block of its own
    from a size on, which it raises to that of whatever was freed, up to 32 MiB; smaller ones it keeps. A size that is
    set stays as it is: here ``size`` bytes. Does nothing without glibc."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, size)


def _shard(whole: Any) -> Tensor:
    return whole.to_local()

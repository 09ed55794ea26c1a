"""The rows of a model's weights that this rank keeps, from reading the checkpoint until the model is sharded.

FSDP gives every rank some rows of each parameter (``mmrl.models.sharded``). A rank that reads only these never holds
the whole model. Until the model is sharded, a parameter that was read so is a placeholder of the whole shape without
memory of its own, and its module keeps the rows beside it:

    reading(group)   a context in which a loader may read rows only; ``mmrl.app.build`` enters it
    divide           parameters on the meta device become DTensors, into which a library reads this rank's rows
    set_aside        those DTensors become placeholders; the rows lie in their modules
    cut, hold        the same for a loader of our own: which rows to read, and where to put them
    move             ``module.to(device)`` of a module with placeholders, which then are on the meta device
    fill             the rows become the parameters of the sharded module
    Lifted           the rows taken out of a module whose weights another layout divides: whole tensors, one at a time

The placeholder's values are nan: what computes with it by mistake is not silently wrong.
"""

# ``nn.Module`` has no public way to replace a parameter and leave it in its place of the order.
# pyright: reportPrivateUsage=false

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import Parameter

M = TypeVar("M", bound="nn.Module")
_ROWS = "_mmrl_rows"
"""The attribute of a module: its rows by the names of its parameters. A deep copy of the module copies them."""
_group: ContextVar[dist.ProcessGroup | None] = ContextVar("_group", default=None)


@contextmanager
def reading(group: dist.ProcessGroup | None) -> Generator[None]:
    """The ranks that a model is about to be sharded over; None where it is not. They load it together."""
    before = _group.set(group)
    try:
        yield
    finally:
        _group.reset(before)


def group() -> dist.ProcessGroup | None:
    """The ranks that the policy that is loaded now will be sharded over."""
    return _group.get()


def divide(model: nn.Module, ranks: dist.ProcessGroup, whole: Collection[str] = ()) -> None:
    """Make the parameters of ``model``, which is on the meta device, DTensors of this rank's rows. Those with names in
    ``whole``, and those without rows, stay as they are. Tied parameters stay tied."""
    from torch.distributed.tensor import DTensor, Shard

    mesh, made = DeviceMesh.from_group(ranks, "cpu"), dict[int, Parameter]()
    kept = {id(p) for name, p in model.named_parameters(remove_duplicate=False) if name in whole}
    for module, name, p in _parameters(model):
        if p.ndim == 0 or id(p) in kept:
            continue
        if id(p) not in made:
            mine = p.detach()[cut(len(p), ranks)]
            rows = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False, shape=p.shape, stride=p.stride())
            made[id(p)] = Parameter(rows, requires_grad=p.requires_grad)
        module._parameters[name] = made[id(p)]


def set_aside(model: nn.Module) -> None:
    """Put placeholders in place of the DTensors of ``model``, and their rows into its modules. Rows that are a view, of
    a file for example, are copied, so that what is behind them can go."""
    from torch.distributed.tensor import DTensor

    made: dict[int, tuple[Parameter, Tensor]] = {}
    for module, name, p in _parameters(model):
        if not isinstance(p, DTensor):
            continue
        if id(p) not in made:
            rows: Tensor = p.to_local().detach()
            whole = rows.untyped_storage().nbytes() == rows.nbytes
            made[id(p)] = _placeholder(p, rows.dtype), rows if whole else rows.clone()
        module._parameters[name], rows_of_it = made[id(p)]
        module.__dict__.setdefault(_ROWS, {})[name] = rows_of_it


def cut(length: int, ranks: dist.ProcessGroup) -> slice:
    """The rows of this rank, of ``length``, as FSDP cuts."""
    each = -(-length // ranks.size())
    return slice(min(ranks.rank() * each, length), min((ranks.rank() + 1) * each, length))


def hold(module: nn.Module, name: str, rows: Tensor) -> None:
    """Put a placeholder in place of the parameter ``name`` of ``module``, which is on the meta device, and keep its
    ``rows``."""
    p = module._parameters[name]
    assert p is not None
    module._parameters[name] = _placeholder(p, rows.dtype)
    module.__dict__.setdefault(_ROWS, {})[name] = rows


def _placeholder(p: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    value = torch.full((), float("nan") if dtype.is_floating_point else 0, dtype=dtype)
    return torch.nn.Parameter(value.expand(p.shape), requires_grad=p.requires_grad)


def move(module: M, device: torch.device) -> M:
    """``module.to(device)``; its placeholders go to the meta device, and their rows to ``device``."""
    placeholders: dict[int, Parameter] = {}
    moved: dict[int, Tensor] = {}
    put_back: list[tuple[nn.Module, str, Parameter]] = []
    for owner, name, rows in _kept(module):
        p = owner._parameters[name]
        assert p is not None
        if id(p) not in placeholders:
            placeholders[id(p)] = Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
            moved[id(p)] = rows.to(device)
        put_back.append((owner, name, placeholders[id(p)]))
        getattr(owner, _ROWS)[name] = moved[id(p)]
    for owner, name, _ in put_back:
        owner._parameters[name] = None  # which ``to`` passes over; deleting it would change the order
    module.to(device)
    for owner, name, p in put_back:
        owner._parameters[name] = p
    return module


def device_of(module: nn.Module) -> torch.device:
    """Where the weights of ``module`` are, or their rows."""
    for _, _, rows in _kept(module):
        return rows.device
    return next(module.parameters()).device


def fill(module: nn.Module) -> None:
    """Give the sharded ``module``, whose placeholders were on the meta device, its rows."""
    from torch.distributed.tensor import DTensor

    made: dict[int, Parameter] = {}
    for owner, name, rows in list(_kept(module)):
        p: Any = owner._parameters[name]
        if id(p) not in made:
            of = DTensor.from_local(
                rows.to(p.dtype), p.device_mesh, p.placements, run_check=False, shape=p.shape, stride=p.stride()
            )
            made[id(p)] = Parameter(of, requires_grad=p.requires_grad)
        owner._parameters[name] = made[id(p)]
    for owner in module.modules():
        owner.__dict__.pop(_ROWS, None)


class Lifted:
    """Final class: the rows of ``module``, taken out of it. Its parameters have no elements then, and lie where the
    rows do. Does nothing where the module has no rows.

    ``ranks``: those that read the rows. All of them ask for the same tensors, in the same order.
    """

    def __init__(self, module: nn.Module, ranks: dist.ProcessGroup) -> None:
        self._module, self._ranks = module, ranks
        self._rows: dict[int, tuple[Tensor, torch.Size]] = {}
        """By the identity of the parameter that is now in the module."""
        made: dict[int, Parameter] = {}
        for owner, name, rows in list(_kept(module)):
            p = owner._parameters[name]
            assert p is not None
            if id(p) not in made:
                made[id(p)] = Parameter(rows.new_empty(0), requires_grad=p.requires_grad)
                self._rows[id(made[id(p)])] = rows, p.shape
            owner._parameters[name] = made[id(p)]
        for owner in module.modules():
            owner.__dict__.pop(_ROWS, None)

    def shape(self, p: nn.Parameter) -> torch.Size:
        """The shape of the whole tensor."""
        return self._rows[id(p)][1] if id(p) in self._rows else p.shape

    def whole(self, p: nn.Parameter) -> Tensor:
        """The whole tensor, of all ranks' rows."""
        if id(p) not in self._rows:
            return p.detach()
        rows, shape = self._rows[id(p)]
        each = -(-shape[0] // self._ranks.size())
        mine = rows
        if len(rows) < each:
            mine = rows.new_zeros(each, *shape[1:])
            mine[: len(rows)] = rows
        every = rows.new_empty(each * self._ranks.size(), *shape[1:])
        dist.all_gather(list(every.split(each)), mine, group=self._ranks)
        return every[: shape[0]]

    def put_back(self, p: nn.Parameter) -> None:
        """Give the module the whole tensor, for good."""
        if id(p) in self._rows:
            p.data = self.whole(p)
            del self._rows[id(p)]

    @contextmanager
    def on_demand(self) -> Generator[None]:
        """While a submodule computes, it has its own weights whole."""
        hooks = []
        for owner in self._module.modules():
            own = [p for p in owner._parameters.values() if p is not None and id(p) in self._rows]
            if own:
                hooks.append(owner.register_forward_pre_hook(lambda *_, own=own: self._give(own)))
                hooks.append(owner.register_forward_hook(lambda *_, own=own: _empty(own), always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _give(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            p.data = self.whole(p)


def _empty(parameters: list[nn.Parameter]) -> None:
    for p in parameters:
        p.data = p.new_empty(0)


def _parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    for module in model.modules():
        for name, p in list(module._parameters.items()):
            if p is not None:
                yield module, name, p


def _kept(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        for name, rows in list(owner.__dict__.get(_ROWS, {}).items()):
            yield owner, name, rows

"""Keep the optimizer's state and reference in host memory while they are not used."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from mmrl.transfer import to_device, to_host


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


class Visiting:
    """Final class: copies of weights that live on the host. ``there`` brings one to the device, where it stays until
    ``put_away``; its values do not change, so nothing goes back."""

    def __init__(self) -> None:
        self._here: dict[str, dict[str, Tensor]] = {}

    def there(self, name: str, copy: Mapping[str, Tensor], mine: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The copy ``name`` where ``mine`` are."""
        if name not in self._here:
            self._here[name] = {k: to_device(t, mine[k].device) for k, t in copy.items()}
        return self._here[name]

    def put_away(self) -> None:
        self._here.clear()

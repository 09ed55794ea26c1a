"""The base class of engines with their own weights."""

from __future__ import annotations

import shutil
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mmrl.inference.engine_weights import check_rank, model_folder, values_of, write_adapter
from mmrl.inference.server_process import private_folder
from mmrl.inference.sleep_mode import SleepMode
from mmrl.inference.under_way import OneByOne


class WeightedEngine(OneByOne[str]):
    """Abstract: an ``engine`` with the model in the folder ``model``, its size, and a private folder for adapters.
    Raises ``UserError`` where there is no such model."""

    def __init__(self, engine: str, model: str, max_model_len: int, lora_rank: int | None, prefix: str) -> None:
        super().__init__(engine, max_model_len)
        self._folder = model_folder(model, engine)
        self._values = values_of(self._folder)
        self._lora_rank, self._versions = lora_rank, 0
        self._private = private_folder(prefix)
        self._remove = weakref.finalize(self, shutil.rmtree, self._private, True)

    def _written(self, tensors: Mapping[str, Tensor], rank: int, alpha: float, targets: Sequence[str]) -> Path:
        """The new folder of an adapter that is to be loaded. Raises ``UserError`` while requests are under way, and for
        a rank that the engine was not started for."""
        self._refuse("new weights come")
        check_rank(rank, self._lora_rank)
        self._versions += 1
        folder = self._private / f"adapter-{self._versions}"
        write_adapter(folder, tensors, rank, alpha, targets)
        return folder


class SleepingEngine(WeightedEngine):
    """Abstract: where it ``sleeps``, its memory is freed as ``SleepMode`` says."""

    sleeps: bool
    _mode: SleepMode

    def sleep(self) -> None:
        """Free the device's memory."""
        self._refuse("it sleeps")
        if self.sleeps:
            self._mode.sleep()

    def wake(self) -> None:
        self._mode.wake()

"""The feature store of a controller: encoded prompts, which never leave it."""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from mmrl.controller.spill import Spill


@dataclass(frozen=True)
class FeatureRef:
    """A description of the features under ``key``, without their data: shapes and dtypes by name. ``owner``: a rank."""

    owner: int
    key: str
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, torch.dtype]
    bytes: int


P = ParamSpec("P")
R = TypeVar("R")


def _locked(method: Callable[Concatenate[FeatureStore, P], R]) -> Callable[Concatenate[FeatureStore, P], R]:
    """Allow one thread at a time: the controller prepares features while its devices read others."""

    @functools.wraps(method)
    def guarded(self: FeatureStore, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            return method(self, *args, **kwargs)

    return guarded


class FeatureStore:
    """Named groups of tensors with reference counts, at most ``budget_bytes`` of them in memory.

    Call ``hold`` before a use and ``release`` after it. Above the budget, features without a hold are dropped, the
    least recently used first; then those with a hold are written to local disk (under ``folder``, None: the system's
    temporary folder), from which ``get`` reads them back, equal to the bit. The features that were put or read last
    stay in memory, whatever their size. Thread-safe.
    """

    def __init__(self, budget_bytes: int = 2 << 30, folder: str | None = None, owner: int = 0) -> None:
        self.budget_bytes, self.owner = budget_bytes, owner
        self.bytes = 0
        """Bytes in memory."""
        self.written_bytes = 0
        """Bytes written to disk so far."""
        self._refs: dict[str, FeatureRef] = {}
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self._held: Counter[str] = Counter()
        self._spill = Spill(None if folder is None else Path(folder))
        self._warned = False
        self.lock = threading.RLock()

    def __contains__(self, key: str) -> bool:
        return key in self._refs

    def __len__(self) -> int:
        return len(self._refs)

    @property
    def held(self) -> int:
        """The number of keys with a hold."""
        return len(self._held)

    @_locked
    def put(self, key: str, features: dict[str, Tensor]) -> None:
        """Store ``features`` under ``key``; drops or moves others to stay in the budget."""
        self.drop(key)
        shapes = {name: tuple(tensor.shape) for name, tensor in features.items()}
        dtypes = {name: tensor.dtype for name, tensor in features.items()}
        size = sum(tensor.nbytes for tensor in features.values())
        self._refs[key] = FeatureRef(self.owner, key, shapes, dtypes, size)
        self._load(key, features)

    def ref(self, key: str) -> FeatureRef:
        """A description of the features of ``key``, without reading the disk. Raises ``KeyError`` if they were never
        put or were dropped."""
        return self._refs[key]

    @_locked
    def get(self, key: str) -> dict[str, Tensor]:
        """The features of ``key``, marked as just used. Raises ``KeyError`` if they were never put or were dropped, and
        ``UserError`` if they were on disk and cannot be read back."""
        if key in self._loaded:
            features = self._loaded[key] = self._loaded.pop(key)
            return features
        if key not in self._refs:
            raise KeyError(key)
        self._load(key, self._spill.read(key))
        return self._loaded[key]

    @_locked
    def hold(self, keys: list[str]) -> None:
        self._held.update(keys)

    @_locked
    def release(self, keys: list[str]) -> None:
        self._held.subtract(keys)
        self._held += Counter()
        for key in set(keys) - set(self._held):
            self._spill.remove(key)
            if key not in self._loaded:
                self.drop(key)

    @_locked
    def drop(self, key: str) -> None:
        """Delete ``key``, in memory and on disk."""
        self._unload(key)
        self._spill.remove(key)
        self._refs.pop(key, None)

    @_locked
    def close(self) -> None:
        """Delete everything."""
        self._refs.clear()
        self._loaded.clear()
        self._held.clear()
        self._spill.close()
        self.bytes = 0

    def _load(self, key: str, features: dict[str, Tensor]) -> None:
        self._loaded[key] = features
        self.bytes += self._refs[key].bytes
        if self.bytes <= self.budget_bytes:
            return
        others = [k for k in self._loaded if k != key]
        for idle in (k for k in others if k not in self._held):
            self.drop(idle)
            if self.bytes <= self.budget_bytes:
                return
        for held in (k for k in others if k in self._held):
            if not self._to_disk(held) or self.bytes <= self.budget_bytes:
                return

    def _unload(self, key: str) -> None:
        if self._loaded.pop(key, None) is not None:
            self.bytes -= self._refs[key].bytes

    def _to_disk(self, key: str) -> bool:
        """Write ``key`` to disk; returns whether there was space. If not, the features stay in memory."""
        if key not in self._spill:  # features read back from disk are still there
            try:
                self._spill.write(key, self._loaded[key])
            except OSError as error:
                if not self._warned:
                    print(
                        f"warning: features past features.budget ({self.budget_bytes:,} bytes) cannot be written to "
                        f"{self._spill.parent} and stay in memory ({error}); free space there, set features.folder to "
                        "a local folder with room, or raise features.budget",
                        file=sys.stderr,
                    )
                self._warned = True
                return False
            self.written_bytes += self._refs[key].bytes
        self._unload(key)
        return True

"""The feature store of a controller: encoded prompts, which never leave it.

What does not fit memory lies on local disk: safetensors in a private folder of this process, deleted with it (never
pickle).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from mmrl.core.errors import UserError

_PREFIX = "mmrl-features-"
_LOCK = "lock"


@dataclass(frozen=True)
class FeatureRef:
    """A description of features, without their data: shapes by name, and their size."""

    shapes: Mapping[str, tuple[int, ...]]
    bytes: int


class FeatureStore:
    """Named groups of tensors with reference counts, at most ``budget_bytes`` of them in memory.

    Call ``hold`` before a use and ``release`` after it. Above the budget, features without a hold are dropped, the
    least recently used first; then those with a hold are written to local disk (under ``folder``, None: the system's
    temporary folder), from which ``get`` reads them back, equal to the bit. The features that were put or read last
    stay in memory, whatever their size. Thread-safe.
    """

    def __init__(self, budget_bytes: int = 2 << 30, folder: str | None = None) -> None:
        self.budget_bytes = budget_bytes
        self.bytes = 0
        """Bytes in memory."""
        self.written_bytes = 0
        """Bytes written to disk so far."""
        self._refs: dict[str, FeatureRef] = {}
        self._loaded: dict[str, dict[str, Tensor]] = {}
        self._held: Counter[str] = Counter()
        self._spill = Spill(None if folder is None else Path(folder))
        self._warned = False
        self._lock = threading.RLock()
        """The controller prepares features while its devices read others."""

    def __contains__(self, key: str) -> bool:
        return key in self._refs

    def __len__(self) -> int:
        return len(self._refs)

    @property
    def held(self) -> int:
        """The number of keys with a hold."""
        return len(self._held)

    def put(self, key: str, features: dict[str, Tensor]) -> None:
        """Store ``features`` under ``key``; drops or moves others to stay in the budget."""
        with self._lock:
            self.drop(key)
            shapes = {name: tuple(tensor.shape) for name, tensor in features.items()}
            self._refs[key] = FeatureRef(shapes, sum(tensor.nbytes for tensor in features.values()))
            self._load(key, features)

    def ref(self, key: str) -> FeatureRef:
        """A description of the features of ``key``, without reading the disk. Raises ``KeyError`` if they were never
        put or were dropped."""
        return self._refs[key]

    def get(self, key: str) -> dict[str, Tensor]:
        """The features of ``key``, marked as just used. Raises ``KeyError`` if they were never put or were dropped, and
        ``UserError`` if they were on disk and cannot be read back."""
        with self._lock:
            if key in self._loaded:
                features = self._loaded[key] = self._loaded.pop(key)
                return features
            self._load(key, self._spill.read(key))
            return self._loaded[key]

    def hold(self, keys: list[str]) -> None:
        with self._lock:
            self._held.update(keys)

    def release(self, keys: list[str]) -> None:
        with self._lock:
            self._held.subtract(keys)
            self._held += Counter()
            for key in set(keys) - set(self._held):
                self._spill.remove(key)
                if key not in self._loaded:
                    self.drop(key)

    def drop(self, key: str) -> None:
        """Delete ``key``, in memory and on disk."""
        with self._lock:
            self._unload(key)
            self._spill.remove(key)
            self._refs.pop(key, None)

    def close(self) -> None:
        """Delete everything."""
        with self._lock:
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


class Spill:
    """Groups of tensors by key, one file each, in a folder under ``parent`` (None: the system's temporary folder).

    The folder is created at the first write; folders of killed processes beside it are removed then.
    """

    def __init__(self, parent: Path | None) -> None:
        self.parent = parent or Path(tempfile.gettempdir())
        self._files: dict[str, tuple[Path, dict[str, str]]] = {}
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._lock: IO[bytes] | None = None
        self._made = 0

    def __contains__(self, key: str) -> bool:
        return key in self._files

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Write ``tensors`` to a file. Raises ``OSError`` if there is no space; then no file is left."""
        folder = Path((self._folder or self._open()).name)
        self._made += 1
        path = folder / f"{self._made}.safetensors"
        try:
            save_file({name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}, path)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            raise OSError(str(error)) from error
        self._files[key] = path, {name: str(t.device) for name, t in tensors.items()}

    def read(self, key: str) -> dict[str, Tensor]:
        """The tensors of ``key``, equal to the bit, on their device. Raises ``UserError`` if the file is gone."""
        path, devices = self._files[key]
        try:
            return {name: t.to(devices[name]) for name, t in load(path.read_bytes()).items()}
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"features written to {path} cannot be read back ({error}): something removed or changed them; set "
                "features.folder to a local folder that nothing cleans up, or raise features.budget"
            ) from error

    def remove(self, key: str) -> None:
        path, _ = self._files.pop(key, (None, None))
        if path is not None:
            path.unlink(missing_ok=True)

    def close(self) -> None:
        """Remove everything."""
        self._files.clear()
        if self._folder is not None and self._lock is not None:
            self._folder.cleanup()
            self._lock.close()
        self._folder = self._lock = None

    def _open(self) -> tempfile.TemporaryDirectory[str]:
        _clear(self.parent)
        made = tempfile.TemporaryDirectory(prefix=_PREFIX, dir=self.parent, ignore_cleanup_errors=True)
        draft = Path(made.name) / "draft"
        lock = draft.open("wb")
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when this process ends, in any way
        draft.rename(draft.with_name(_LOCK))  # under this name it is always locked
        self._folder, self._lock = made, lock
        return made


def _clear(parent: Path) -> None:
    """Remove the folders of processes that are gone."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError), (folder / _LOCK).open("rb") as lock:
            if os.fstat(lock.fileno()).st_uid == os.getuid():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder)

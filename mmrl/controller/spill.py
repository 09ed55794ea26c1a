"""Tensors on local disk: safetensors in a private folder of this process, deleted with it (never pickle)."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

from safetensors import SafetensorError
from safetensors.torch import load, save_file
from torch import Tensor

from mmrl.errors import UserError

_PREFIX = "mmrl-features-"
_LOCK = "lock"


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

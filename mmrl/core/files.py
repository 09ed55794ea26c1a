"""Write files atomically, and remove files of any kind."""

from __future__ import annotations

import contextlib
import os
import shutil
from pathlib import Path


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file so that whoever reads it, at any moment, finds the old content or the new, never a part."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with partial.open("wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def remove(path: Path) -> None:
    """Remove a file, a link (never what it points to) or a folder; nothing where there is none."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)

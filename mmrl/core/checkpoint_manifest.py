"""The checkpoints in a folder, as their manifests describe them.

A checkpoint's directory holds ``manifest.json``: its step, and the size and SHA-256 of each of its files. The step in
the manifest counts, not the directory's name: somebody may have renamed or copied it.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from mmrl.core.errors import plain
from mmrl.core.stored import BadFileError, read_as, read_object

MANIFEST = "manifest.json"
STATE = "state.json"
DIVERGED = "diverged.json"
"""The file that marks a checkpoint after which training diverged."""
_NAME = re.compile(r"step_(\d{6,})$")
TENSORS = "*.safetensors"
LAST_STEP = 10**9
"""No run has more steps."""


class File(BaseModel):
    """Size and checksum of a file of a checkpoint."""

    model_config = ConfigDict(strict=True)
    bytes: Annotated[int, Field(ge=0, lt=1 << 63)]
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class Manifest(BaseModel):
    """The content of ``manifest.json``."""

    model_config = ConfigDict(strict=True)
    step: Annotated[int, Field(ge=0, le=LAST_STEP)]
    files: dict[Annotated[str, Field(pattern=r"^[^/\\\x00-\x1f\x7f-\U0010ffff]{1,200}$")], File]


@dataclass(frozen=True)
class Entry:
    """A checkpoint's directory. ``fault``: why it cannot be used, as far as this is known without reading its files.

    ``manifest`` is None if it cannot be read; ``step`` is then the one in the directory's name. ``diverged``: the
    numbers that were not finite in training after it, if there were any.
    """

    step: int
    directory: Path
    manifest: Manifest | None
    fault: str | None
    diverged: str | None

    @property
    def usable(self) -> bool:
        """Whether a run can continue from it, as far as this is known without reading its files."""
        return self.fault is None and self.diverged is None

    @property
    def renamed(self) -> bool:
        """Whether the directory's name is not that of its step."""
        return self.directory.name != directory_of(self.step)


def directory_of(step: int) -> str:
    """The name of the directory of a checkpoint."""
    return f"step_{step:06d}"


def entries(folder: Path) -> list[Entry]:
    """The checkpoints in ``folder`` by step; within one step those with renamed directories come last."""
    if not folder.is_dir():
        return []
    found = [_entry(p) for p in sorted(folder.iterdir()) if p.is_dir() and not p.name.startswith(".")]
    return sorted((e for e in found if e is not None), key=lambda e: (e.step, e.renamed))


def fault_of(entry: Entry) -> str | None:
    """Why the checkpoint must not be loaded, or None. Reads every file."""
    if entry.fault is not None or entry.manifest is None:
        return entry.fault
    for name, expected in entry.manifest.files.items():
        if sha256(entry.directory / name) != expected.sha256:
            return f"{name} does not match its checksum"
    return None


def mark_diverged(entry: Entry, why: str) -> None:
    """Mark a checkpoint, so that no run continues from it: training diverged after it."""
    (entry.directory / DIVERGED).write_text(json.dumps({"why": why}) + "\n", encoding="utf-8")


def sha256(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _entry(directory: Path) -> Entry | None:
    """The checkpoint in ``directory``; None if its name is not that of a checkpoint and it has no readable manifest."""
    name = _NAME.match(directory.name)
    diverged = _diverged(directory)
    try:
        manifest = read_as(Manifest, directory / MANIFEST)
        return Entry(manifest.step, directory, manifest, _missing(directory, manifest), diverged)
    except FileNotFoundError:
        fault = f"{MANIFEST} is missing"
    except (OSError, BadFileError) as error:
        fault = str(error)
    step = int(name[1][-12:]) if name is not None else LAST_STEP + 1
    return None if step > LAST_STEP else Entry(step, directory, None, fault, diverged)


def _missing(directory: Path, manifest: Manifest) -> str | None:
    """A fault in the names and sizes of the files, or None."""
    files = manifest.files
    for name, expected in files.items():
        path = directory / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != expected.bytes:
            return f"{name} has {path.stat().st_size} bytes, not {expected.bytes}"
    stray = sorted(path.name for path in directory.glob(TENSORS) if path.name not in files)
    if stray:  # the reader reads every file of tensors that it finds
        return f"{stray[0]} is not in its {MANIFEST}; move that file elsewhere"
    return None if STATE in files else f"{STATE} is missing"


def _diverged(directory: Path) -> str | None:
    try:
        why = read_object(directory / DIVERGED).get("why")
    except FileNotFoundError:
        return None
    except (OSError, BadFileError):
        why = None
    return plain(why) if isinstance(why, str) else "numbers that are not finite"

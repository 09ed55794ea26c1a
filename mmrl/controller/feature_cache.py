"""A cache of features on disk beyond a run: one file per prompt and encoder. Shared by processes and runs."""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from mmrl.core.errors import UserError


class FeatureCache:
    """Final class. Groups of tensors by key under ``folder``, which is created. ``identity`` names everything that the
    features depend on, except the key: entries with a different identity are never returned. Raises ``UserError`` if
    the folder cannot be created.

    An entry that cannot be read counts as missing, and one that cannot be written is skipped, with one warning for each
    kind.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self.folder = folder / identity
        self._warned: set[str] = set()
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"features.cache: {folder} cannot be created ({error}); name a different folder") from error

    def path(self, key: str) -> Path:
        return self.folder / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.safetensors"

    def read(self, key: str) -> dict[str, Tensor] | None:
        """The tensors of ``key`` on the CPU, equal to the bit; None if they must be computed."""
        path = self.path(key)
        try:
            with safe_open(path, framework="pt") as file:
                metadata, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return None
        except (OSError, SafetensorError) as error:
            self._warn("read", f"{path} cannot be read ({error}) and is computed again")
            return None
        if metadata.get("digest") != digest_of(key, tensors):
            self._warn("read", f"{path} does not match its checksum and is computed again")
            return None
        return tensors

    def write(self, key: str, tensors: Mapping[str, Tensor]) -> None:
        """Store ``tensors`` under ``key``, atomically, also if several processes write it at once."""
        own = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
        draft = None
        try:
            number, draft = tempfile.mkstemp(prefix="draft-", dir=self.folder)
            os.close(number)
            save_file(own, draft, {"digest": digest_of(key, own)})
            Path(draft).replace(self.path(key))
        except (OSError, SafetensorError) as error:
            if draft is not None:
                Path(draft).unlink(missing_ok=True)
            self._warn("write", f"{self.folder} takes no more prompts ({error}); free space there, or set a new one")

    def _warn(self, what: str, line: str) -> None:
        if what not in self._warned:
            print(f"warning: features.cache: {line}", file=sys.stderr)
        self._warned.add(what)


def digest_of(key: str, tensors: Mapping[str, Tensor]) -> str:
    """A digest of a key and tensors; equal if names, shapes, dtypes and all bits are equal."""
    found = hashlib.sha256(key.encode())
    for name in sorted(tensors):
        found.update(f"\0{name} {tensors[name].dtype} {tuple(tensors[name].shape)}\0".encode())
        found.update(tensors[name].detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return found.hexdigest()

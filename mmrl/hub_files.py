"""Find a checkpoint's files in a directory or on the hub: only the small ones if no weights are needed, or all."""

from __future__ import annotations

import json
from pathlib import Path

from mmrl.errors import UserError
from mmrl.packages.places import lacking


def file_of(path: str, name: str) -> Path:
    """The file ``name`` of the checkpoint ``path``, a directory or a hub name. Raises ``OSError``, within seconds where
    there is no net."""
    if Path(path).exists():
        return Path(path) / name
    if wrong := lacking(path):
        raise FileNotFoundError(wrong)
    return Path(_from_hub(path, name))


def folder_of(path: str) -> Path:
    """The folder that the checkpoint ``path`` lies in with its weights: itself, or of a hub name the one in the hub's
    cache, where it is downloaded to if need be. Raises ``OSError``."""
    if Path(path).exists():
        return Path(path)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = Path(snapshot_download(path, local_files_only=True))
        lacking = _lacks(folder)
        if not lacking:
            return folder
        why = OSError(f"{lacking} is missing in the hub's cache")
    except HFValidationError as error:
        raise OSError(str(error)) from error
    except OSError:
        why = OSError("it is not in the hub's cache")
    try:
        _reach()
    except OSError as error:
        raise OSError(f"{why}, and {error}") from error
    return Path(snapshot_download(path, allow_patterns=list(_FILES), etag_timeout=3))


_FILES = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model")


def _lacks(folder: Path) -> str:
    """A file that a whole checkpoint has and ``folder`` has not; empty where it is whole. Raises ``OSError``."""
    index = folder / "model.safetensors.index.json"
    try:
        shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values() if index.is_file() else ()
    except (ValueError, KeyError, AttributeError):
        return index.name
    needed = ["config.json", *sorted(set(shards) or {"model.safetensors"})]
    return next((name for name in needed if not (folder / name).is_file()), "")


def unreadable(path: str, name: str, what: str, error: Exception) -> UserError:
    """The error for a checkpoint whose file ``name`` cannot be read, and whose ``what`` nobody recorded."""
    if wrong := lacking(path):
        return UserError(f"model.path: {wrong}")
    reason = str(error).strip().split("\n")[0]
    fault = f"is no directory with {name}" if Path(path).exists() else "cannot be read here"
    return UserError(
        f"model.path: {path} {fault} ({reason})\n  Correct the path, go online for a hub name, or record the "
        f"checkpoint's {what} in a JSON file and name it in the recipe (architecture: FILE)"
    )


def _from_hub(path: str, name: str) -> str:
    """From the cache first."""
    from huggingface_hub import constants, hf_hub_download

    try:
        return hf_hub_download(path, name, local_files_only=True)
    except OSError:
        if constants.HF_HUB_OFFLINE:
            raise
    _reach()
    return hf_hub_download(path, name, etag_timeout=3)


def _reach() -> None:
    """Raise ``OSError`` where the hub cannot be reached: its own client would try for half a minute."""
    import httpx
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        raise OSError("HF_HUB_OFFLINE forbids to download it")
    try:
        httpx.head(constants.ENDPOINT, timeout=3)
    except httpx.HTTPError as error:
        raise OSError(f"{constants.ENDPOINT} cannot be reached: {error}") from error

"""A checkpoint's small files, from its directory or from the hub, for those who need no weights."""

from __future__ import annotations

from pathlib import Path

from mmrl.errors import UserError


def file_of(path: str, name: str) -> Path:
    """The file ``name`` of the checkpoint ``path``, a directory or a hub name. Raises ``OSError``, within seconds where
    there is no net."""
    if Path(path).exists():
        return Path(path) / name
    return Path(_from_hub(path, name))


def unreadable(path: str, name: str, what: str, error: Exception) -> UserError:
    """The error for a checkpoint whose file ``name`` cannot be read, and whose ``what`` nobody recorded."""
    reason = str(error).strip().split("\n")[0]
    fault = f"is no directory with {name}" if Path(path).exists() else "cannot be read here"
    return UserError(
        f"model.path: {path} {fault} ({reason})\n  Correct the path, go online for a hub name, or record the "
        f"checkpoint's {what} in a JSON file and name it in the recipe (architecture: FILE)"
    )


def _from_hub(path: str, name: str) -> str:
    """From the cache first."""
    import httpx
    from huggingface_hub import constants, hf_hub_download

    try:
        return hf_hub_download(path, name, local_files_only=True)
    except OSError:
        if constants.HF_HUB_OFFLINE:
            raise
    try:
        httpx.head(constants.ENDPOINT, timeout=3)
    except httpx.HTTPError as error:  # else the hub's client tries for half a minute
        raise OSError(f"{constants.ENDPOINT} cannot be reached: {error}") from error
    return hf_hub_download(path, name, etag_timeout=3)

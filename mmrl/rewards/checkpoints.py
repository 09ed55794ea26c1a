"""Read checkpoints that are a single file (``.pt``, ``.pth``, ``.safetensors``) without running code from them.

A pickle is opened with ``weights_only``, which makes tensors and plain containers and refuses all else.
"""

from __future__ import annotations

import pickle
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch

from mmrl.core.errors import UserError

_HUB_FILE = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)/(?P<file>[\w.+-]+(/[\w.+-]+)*)")
_CALLS = re.compile(r"GLOBAL ([\w.]+)")
_NAMED = 3

M = TypeVar("M", bound="torch.nn.Module")


def find_checkpoint(path: str, *, fetch: bool = True) -> Path:
    """The local file of ``path``: a file, or ``owner/name/file`` of the hub, fetched once. Raises ``UserError``.

    ``fetch=False`` looks into the hub's cache only.
    """
    if Path(path).is_file():
        return Path(path)
    named = _HUB_FILE.fullmatch(path)
    if named is None or Path(path).exists():
        raise UserError(
            f"{path} is no file; set the reward's options.path to a checkpoint file, or to owner/name/file of the hub"
        )
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(named["repo"], named["file"], local_files_only=not fetch))
    except (OSError, ValueError) as error:  # the hub's own errors are both
        raise UserError(
            f"cannot fetch {path}: {str(error).splitlines()[0]}; set the reward's options.path to a local file, "
            "or to owner/name/file of the hub while online"
        ) from error


def read_tensors(path: str, device: str = "cpu", *, fetch: bool = True) -> dict[str, torch.Tensor]:
    """The state dict in the file ``path`` stands for (see ``find_checkpoint``), alone or under ``state_dict``.

    On ``device="meta"`` it is shapes and dtypes. Raises ``UserError``, also for a pickle that asks for more than
    tensors.
    """
    file = find_checkpoint(path, fetch=fetch)
    if file.suffix == ".safetensors":
        found = _read_safetensors(file, device)
    else:
        try:
            mapped = zipfile.is_zipfile(file)  # read when a tensor is looked at, so never where only shapes are
            found = torch.load(file, map_location=device, weights_only=True, mmap=mapped)
        except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError, KeyError) as error:
            raise UserError(_refusal(path, str(error))) from error
    inner = found.get("state_dict") if isinstance(found, Mapping) else None
    found = inner if isinstance(inner, Mapping) else found
    if not isinstance(found, Mapping) or not all(isinstance(value, torch.Tensor) for value in found.values()):
        raise UserError(
            f"{path} holds no state dict (tensors by name) but a {type(found).__name__}; save it with "
            "torch.save(model.state_dict(), path)"
        )
    return dict(found)


def fill(build: Callable[[], M], tensors: Mapping[str, torch.Tensor], path: str, ignored: Sequence[str] = ()) -> M:
    """The model that ``build`` makes, with ``tensors`` as its weights: float32, frozen, on the CPU.

    Nothing is drawn at random first. Names that hold one of ``ignored`` may be left over. Raises ``UserError`` where
    names or shapes are not the model's.
    """
    with torch.device("meta"):
        model = build()
    own = model.state_dict()
    wrong = {
        "lacks": [name for name in own if name not in tensors],
        "has besides": [name for name in tensors if name not in own and not any(part in name for part in ignored)],
        "has in another shape": [
            f"{name} {list(tensors[name].shape)} for {list(own[name].shape)}"
            for name in own
            if name in tensors and tensors[name].shape != own[name].shape
        ],
    }
    if any(wrong.values()):
        said = "; ".join(f"it {what} {_some(names)}" for what, names in wrong.items() if names)
        raise UserError(
            f"{path} is no checkpoint of this reward: {said}. Set options.path to the one that docs/rewards.md names"
        )
    model.load_state_dict({name: tensors[name].float() for name in own}, assign=True)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_meta:  # not saved: transformers' own counts of positions
                assert name == "position_ids", name
                setattr(module, name, torch.arange(buffer.shape[-1]).expand(1, -1))
    return model.eval().requires_grad_(False)


def _read_safetensors(file: Path, device: str) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(file)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read: {error}; fetch it again") from error
    return {name: tensor.to(device) for name, tensor in found.items()}


def _refusal(path: str, said: str) -> str:
    called = _CALLS.search(said)
    if called is not None:
        return (
            f"{path} is refused: beside tensors it asks for {called[1]}, and what a pickle asks for can run code; "
            "if you trust it, save its state dict with safetensors.torch.save_file and set options.path to that"
        )
    return f"{path} cannot be read as a checkpoint: it is torn, or no file that torch.save wrote; fetch it again"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(map(str, names[:_NAMED])) + more

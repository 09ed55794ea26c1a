"""Read a rank's own rows of the model that trains, for a pipeline whose model is about to be sharded.

diffusers can read slices for tensor parallelism, by a plan that each class has, and not rows of every parameter. Here
the class builds the model without memory, as diffusers does, and each rank reads its rows of the safetensors files
(``mmrl.local_rows``). Buffers are read whole.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mmrl import local_rows
from mmrl.hub_files import json_of
from mmrl.json_types import as_object
from mmrl.report import notices

_FILE = "diffusion_pytorch_model.safetensors"
_LACKS = "its safetensors files have other weights than the model"


def load_rows(kind: Any, folder: Path, dtype: torch.dtype, ranks: dist.ProcessGroup) -> nn.Module | None:
    """The model in ``folder``, as ``kind.from_pretrained`` with ``dtype`` would load it, with this rank's rows of its
    weights. None where it must be loaded whole, and a notice says why. Raises what reading raises."""
    files = _files(folder)
    config = json_of(str(folder), "config.json")
    reason = f"it has no {_FILE}" if not files else ""
    if "quantization_config" in config:
        reason = "the checkpoint is quantized"
    if not reason:
        model = _empty(kind, folder, dtype)
        if {*model.state_dict()} == {*files}:
            _read(model, files, dtype, ranks)
            return model.eval()
        reason = _LACKS  # those of an old layout, which diffusers renames
    if ranks.rank() == 0:
        notices.tell(f"every process loads the whole {folder.name} before its weights are sharded: {reason}")
    return None


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor; empty where the weights are in no safetensors files."""
    from safetensors import safe_open

    index = folder / f"{_FILE}.index.json"
    if index.exists():
        listed = as_object(json_of(str(folder), index.name)["weight_map"])
        return {name: folder / str(file) for name, file in listed.items()}
    if not (folder / _FILE).exists():
        return {}
    with safe_open(folder / _FILE, framework="pt") as file:
        return dict.fromkeys(file.keys(), folder / _FILE)


def _empty(kind: Any, folder: Path, dtype: torch.dtype) -> Any:
    """The model, of the class ``kind`` of diffusers, on the meta device. Buffers have values, which some classes
    compute in the dtype of the model."""
    from accelerate import init_empty_weights

    with _default(dtype), init_empty_weights(include_buffers=False):
        model = kind.from_config(kind.load_config(folder))
    model.register_to_config(_name_or_path=str(folder))
    return model


@contextmanager
def _default(dtype: torch.dtype) -> Generator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _read(model: Any, files: Mapping[str, Path], dtype: torch.dtype, ranks: dist.ProcessGroup) -> None:
    from safetensors import safe_open

    kept = model._keep_in_fp32_modules or []
    in_float32 = {*([kept] if isinstance(kept, str) else kept)}
    with ExitStack() as opened:
        handles = {file: opened.enter_context(safe_open(file, framework="pt")) for file in {*files.values()}}
        for name, file in files.items():
            owner, _, of = name.rpartition(".")
            module: nn.Module = model.get_submodule(owner)
            handle = handles[file]
            wanted = torch.float32 if in_float32 & {*name.split(".")} else dtype
            p = dict(module.named_parameters(recurse=False)).get(of)
            if p is None or p.ndim == 0:
                value = _as(handle.get_tensor(name), wanted)
                setattr(module, of, value if p is None else nn.Parameter(value, requires_grad=p.requires_grad))
                continue
            stored = handle.get_slice(name)
            if (shape := tuple(stored.get_shape())) != p.shape:
                raise ValueError(f"{name} has the shape {shape} in {file.name}, and the configuration {tuple(p.shape)}")
            local_rows.hold(module, of, _as(stored[local_rows.cut(len(p), ranks)], wanted))


def _as(read: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy of what was ``read``, which may be a view of the file; numbers that are no fractions keep their dtype."""
    return read.to(dtype if read.is_floating_point() else read.dtype, copy=True).contiguous()

"""Let a torchvision built for CUDA be imported beside a torch built without it.

PyPI's torchvision is built for CUDA. Beside a CPU-only torch its compiled operators cannot be loaded, and its import
stops at the first operator whose schema it wants to describe. Image and video transforms need none of those operators,
so their schemas alone are enough: ``allow_cpu_only`` declares them just before torchvision is first imported. A
torchaudio built for CUDA cannot be helped; transformers imports one that is installed, so it is hidden.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
"""The operators that ``torchvision/_meta_registrations.py`` registers a fake for without asking whether they exist."""
_kept: list[object] = []
"""A ``torch.library.Library`` forgets its schemas when it is collected."""


def allow_cpu_only() -> None:
    """Install the import hook. It costs nothing until torchvision is imported, and does nothing where that would work.

    Call it before anything imports torchvision (transformers' image and video processors do). Calling it twice, or
    where torchvision is not installed or already imported, is harmless. Operators such as ``torchvision.ops.nms`` and
    ``torchvision.io``'s decoders stay unusable, and raise when they are called. Where torchaudio is installed and
    cannot be loaded, it counts as not installed from here on.
    """
    if "torchvision" not in sys.modules and not _kept and not any(isinstance(f, _Hook) for f in sys.meta_path):
        sys.meta_path.insert(0, _Hook())
    if "torchaudio" not in sys.modules and (folder := _folder("torchaudio")):
        own = folder / "lib"
        if _names_cuda(own) or ("torch" in sys.modules and _needs_cuda(own)):
            sys.modules["torchaudio"] = None  # type: ignore[assignment]  # the import system's mark for "not there"


class _Hook(importlib.abc.MetaPathFinder):
    """Final. Sees the first import of torchvision, leaves, and lets the other finders find it."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> None:
        if name != "torchvision":
            return
        sys.meta_path.remove(self)
        folder = _folder(name)
        if folder is not None and _needs_cuda(folder):
            import torch

            library = torch.library.Library("torchvision", "FRAGMENT")
            for schema in _SCHEMAS:
                library.define(schema)
            _kept.append(library)


def _folder(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _names_cuda(folder: Path) -> bool:
    """Whether the operators in ``folder`` name torch's library for CUDA, which this torch lacks. It imports no torch,
    which takes seconds: a server of rewards may need none."""
    torch = _folder("torch")
    if torch is None or any((torch / "lib").glob("*torch_cuda*")):
        return False
    return any(b"torch_cuda" in path.read_bytes() for path in folder.glob("_torchaudio*"))


def _needs_cuda(folder: Path) -> bool:
    """Whether the operators in ``folder`` fail to load beside a torch without CUDA. Loading them twice is harmless."""
    import torch

    if torch.version.cuda is not None or torch.version.hip is not None:
        return False
    try:
        for extension in (p for pattern in ("_C*.so", "_C*.pyd", "_torchaudio*.so") for p in folder.glob(pattern)):
            torch.ops.load_library(str(extension))
    except (ImportError, OSError):
        return True
    return False

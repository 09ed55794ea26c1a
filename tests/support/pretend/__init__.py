"""A CUDA device on a machine without one: real numbers in memory of the host under the label ``cuda:0``.

``load`` must come before torch is imported; ``pytest --pretend-cuda`` does that. What mixes devices then raises as it
does on CUDA, and ``waits`` counts every time the host would have waited for the device, by the line that made it wait.
docs/gpus.md says what this cannot see.
"""

import collections
import contextlib
import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
MEMORY = 80 * 2**30


class Wait(NamedTuple):
    """``what`` the host waited for; ``ours``: the innermost line of this repository, ``where``: of any code but torch.
    They differ where a library waits. Both are empty in a backward pass, which no Python leads to."""

    what: str
    ours: str
    where: str

    @property
    def of_a_library(self) -> bool:
        return self.ours != self.where

    def __str__(self) -> str:
        return f"{self.what}: {self.where}" + (f", called at {self.ours}" if self.of_a_library else "")


_counted: collections.Counter[Wait] | None = None


def missing() -> str:
    """Why there can be no pretended device here; empty where there can be one."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return "" if compiler() else "there is no C++ compiler (c++, g++ or clang++) to build the pretended device with"


def compiler() -> str | None:
    return next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)


def built() -> Path:
    """The device as a library for the installed torch; built once for each torch and each version of its source."""
    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.origin
    torch = Path(spec.origin).parent
    source = HERE / "device.cpp"
    version = (torch / "version.py").read_bytes()
    key = hashlib.sha256(version + source.read_bytes()).hexdigest()[:16]
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrl-tests"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir())
    made = folder / f"pretended-cuda-{key}.so"
    if not made.exists():
        includes = [f"-I{torch / 'include'}", f"-I{torch / 'include/torch/csrc/api/include'}"]
        aside = made.with_suffix(f".{os.getpid()}")
        words = [compiler() or "c++", "-O1", "-w", "-fPIC", "-shared", "-std=c++20", str(source), "-o", str(aside)]
        done = subprocess.run([*words, *includes], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"the pretended device cannot be built:\n{done.stderr[:4000]}")
        os.replace(aside, made)
    return made


def load() -> None:
    """Have the device in this process. Raises ``RuntimeError`` where torch was imported before."""
    if "torch" in sys.modules:
        raise RuntimeError("the pretended device must be loaded before torch is imported")
    made = built()
    spec = importlib.util.find_spec("torch")
    assert spec
    assert spec.origin
    for name in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(Path(spec.origin).parent / "lib" / name), mode=ctypes.RTLD_GLOBAL)
    device = ctypes.CDLL(str(made), mode=ctypes.RTLD_GLOBAL)
    _patch(device)
    device.report_waits_to(_reporter)
    from mmrl.core.torchvision_on_cpu import allow_cpu_only

    allow_cpu_only()  # before transformers imports torchvision


@ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_int64)
def _reporter(what: bytes, _: int) -> None:
    if _counted is not None:
        _counted[_here(what.decode(), sys._getframe(1))] += 1


def _here(what: str, frame: types.FrameType | None) -> Wait:
    """The lines that a wait belongs to: ours is a line of a test where no other is."""
    where = ours = test = ""
    while frame is not None:
        path = frame.f_code.co_filename
        inside = path.startswith(str(ROOT)) and not path.startswith(sys.prefix) and "site-packages" not in path
        line = f"{Path(path).relative_to(ROOT) if inside else path.partition('site-packages/')[2] or path}"
        line += f":{frame.f_lineno}"
        if not path.startswith(str(HERE)) and "/torch/" not in path and "contextlib" not in path:
            where = where or line
        if inside and not path.startswith(str(HERE)):
            if not path.startswith(str(ROOT / "tests")):
                ours = line
                break
            test = test or line
        frame = frame.f_back
    return Wait(what, ours or test, where)


@contextlib.contextmanager
def waits() -> Iterator[collections.Counter[Wait]]:
    """Count the waits of the host inside the block."""
    global _counted
    before, _counted = _counted, collections.Counter()
    try:
        yield _counted
    finally:
        _counted = before


def _synchronize(*_: object, **__: object) -> None:
    if _counted is not None:
        _counted[_here("synchronize", sys._getframe(1))] += 1


class _Stream:
    """A stream, or an event, which stands for the stream that it was recorded in. All of them compute at once.
    ``behind``: what it was told to wait for; ``reads``: the addresses of memory that it was said to read."""

    cuda_stream = device_index = 0
    synchronize = staticmethod(_synchronize)

    def __init__(self, *_: object, **__: object) -> None:
        self.behind: list[_Stream] = []
        self.reads: set[int] = set()

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def query(self) -> bool:
        return True

    def record_event(self, *_: object) -> "_Stream":
        return self

    def elapsed_time(self, _: object) -> float:
        return 0.0

    def wait_event(self, event: "_Stream") -> None:
        self.behind.append(event)

    def _nothing(self, *_: object) -> None:
        pass

    record = wait = wait_stream = _nothing


_default = _Stream()
_of_thread = threading.local()


def _current(*_: object) -> _Stream:
    return getattr(_of_thread, "stream", _default)


@contextlib.contextmanager
def _on(stream: _Stream | None) -> Iterator[None]:
    before = _current()
    _of_thread.stream = stream or before
    try:
        yield
    finally:
        _of_thread.stream = before


def _patch(device: ctypes.CDLL) -> None:
    """Have ``torch.cuda`` answer as it would with one device, and storages of it be resized."""
    import torch

    props = types.SimpleNamespace(
        name="pretended", total_memory=MEMORY, major=9, minor=0, multi_processor_count=132, warp_size=32, uuid="0"
    )
    answers = {
        "is_available": True,
        "is_initialized": True,
        "device_count": 1,
        "current_device": 0,
        "get_device_properties": props,
        "get_device_capability": (9, 0),
        "get_device_name": "pretended",
        "is_bf16_supported": True,
        "mem_get_info": (MEMORY, MEMORY),
        "default_stream": _default,
        "device": contextlib.nullcontext(),
        "is_current_stream_capturing": False,
        "_is_in_bad_fork": False,
        "memory_stats": {},
    }
    answers |= dict.fromkeys(["_lazy_init", "set_device", "manual_seed", "manual_seed_all", "set_rng_state_all"])
    answers |= dict.fromkeys(["set_rng_state", "reset_peak_memory_stats", "ipc_collect", "init", "empty_cache"])
    answers |= dict.fromkeys(["memory_allocated", "max_memory_allocated", "memory_reserved"], 0)
    answers |= dict.fromkeys(["max_memory_reserved", "utilization"], 0)
    for name, answer in answers.items():
        setattr(torch.cuda, name, lambda *_, _answer=answer, **__: _answer)
    cuda: dict[str, object] = {
        "synchronize": _synchronize,
        "current_stream": _current,
        "stream": _on,
        "Stream": _Stream,
        "Event": _Stream,
        "get_rng_state": lambda *_: torch.get_rng_state(),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
    }
    for name, function in cuda.items():
        setattr(torch.cuda, name, function)
    torch.accelerator.synchronize = lambda *_, **__: _synchronize()  # one of its own, which torch.compile asks for
    torch.Tensor.record_stream = lambda tensor, stream: stream.reads.add(tensor.data_ptr())  # type: ignore[method-assign, assignment]
    torch._C._cuda_getCurrentRawStream = lambda _: 0  # bitsandbytes takes it as it is imported

    resize, clone = torch.UntypedStorage.resize_, torch.UntypedStorage.clone
    device.resize_storage.argtypes = (ctypes.c_void_p, ctypes.c_size_t)

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return resize(storage, size)
        device.resize_storage(storage._cdata, size)
        return storage

    def cloned(storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type != "cuda":
            return clone(storage)
        return torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).clone().untyped_storage()

    torch.UntypedStorage.clone = cloned  # type: ignore[method-assign, assignment]
    torch.UntypedStorage.resize_ = resized  # type: ignore[method-assign, assignment]

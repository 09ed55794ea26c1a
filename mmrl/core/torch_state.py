"""Keep torch's settings of the process, its folders and its alarm as they are while code of a reward runs.

A reward, or a library that it imports, may switch the default dtype, the kernels of attention, TF32, determinism or
autocast: the training after it would compute other numbers, in silence; from another folder it would write elsewhere.
``kept`` compares these settings before and after, sets back what has changed, and names the reward once. Imports no
torch: where it is not loaded there is nothing of it to keep, and where a reward's file loads it, torch's own defaults
are what to go back to.

Settings of the process are compared when no other reward runs any more; what two rewards changed at once names both.
What belongs to a thread alone counts where the reward runs in the thread that trains (``here``).
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from mmrl.core.notices import tell

_LOOKS, _APART_S = 3, 0.002
"""A setting is looked at so often, so far apart, before it counts as changed: another thread may have switched it for
a moment."""
_MOST_SHOWN = 120
_UNKNOWN, _MIXED = object(), "mixed"
_TINY, _ONE = 5e-324, 1.0
_SDP = ("flash", "mem_efficient", "math", "cudnn")
_FP32 = [("generic", "all"), *((of, op) for of in ("cuda", "mkldnn") for op in ("all", "matmul", "conv", "rnn"))]
_HOOKS = (
    *("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks"),
    *("buffer_registration_hooks", "module_registration_hooks", "parameter_registration_hooks"),
)


@dataclass(frozen=True)
class _Setting:
    """``default``: what torch begins with; ``_UNKNOWN`` where that depends on the machine."""

    name: str
    get: Callable[[], Any]
    set: Callable[[Any], object]
    default: Any = _UNKNOWN


@dataclass
class _Watch:
    """Who runs now, by thread, and the settings from before the first of them began."""

    turn: threading.Lock = field(default_factory=threading.Lock)
    running: list[tuple[int, str]] = field(default_factory=list)
    involved: list[str] = field(default_factory=list)
    before: list[Any] = field(default_factory=list)
    of_python: list[Any] = field(default_factory=list)
    path: list[str] = field(default_factory=lambda: [*sys.path])
    table: list[_Setting] = field(default_factory=list)


def _folder() -> object:
    """Unknown where it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return _UNKNOWN


def _go_back(folder: str) -> None:
    with suppress(OSError):  # it was removed meanwhile
        os.chdir(folder)


def _path() -> list[str]:
    """The folders of imports from before that are still there: a reward may add some."""
    return [folder for folder in _watch.path if folder in sys.path]


def _put_path(old: list[str]) -> None:
    sys.path[:] = [*old, *(folder for folder in sys.path if folder not in old)]


def _of_module(name: str, module: str, key: str, default: object) -> _Setting:
    """A setting of a module that may not be imported yet."""
    return _Setting(
        name,
        lambda: getattr(sys.modules.get(module), key, default),
        lambda old: setattr(sys.modules[module], key, old),
    )


def _handle(old: Any) -> None:
    with suppress(ValueError, TypeError):  # another thread than the main one cannot
        signal.signal(signal.SIGALRM, old)


def _put_alarm(old: bool) -> None:
    if not old:
        signal.setitimer(signal.ITIMER_REAL, 0)


_OF_PYTHON = [
    _Setting("the alarm (SIGALRM)", lambda: signal.getitimer(signal.ITIMER_REAL)[0] > 0, _put_alarm),
    _Setting("the handler of SIGALRM", lambda: signal.getsignal(signal.SIGALRM), _handle),
    _Setting("the folders of imports (sys.path)", _path, _put_path),
    _Setting("the working folder", _folder, _go_back),
    _Setting("the limit of recursion", sys.getrecursionlimit, sys.setrecursionlimit),
    _Setting("the patience of sockets", socket.getdefaulttimeout, socket.setdefaulttimeout),
    _of_module("the limit of pixels of a picture", "PIL.Image", "MAX_IMAGE_PIXELS", (1 << 30) // 4 // 3),
    _of_module("the reading of torn pictures", "PIL.ImageFile", "LOAD_TRUNCATED_IMAGES", False),
]
"""What is there without torch, too: a run's paths may start at the folder, and an alarm would end the process."""
_watch = _Watch()
_told: set[tuple[str, str]] = set()
_guards: list[Any] = []
_tables: dict[str, list[_Setting]] = {}


def changes_settings(name: str) -> bool:
    """Whether the reward ``name`` has changed a setting before."""
    return any(who == name for who, _ in _told)


@contextmanager
def kept(name: str, *, here: bool = True) -> Generator[None]:
    """Set back what the code inside, of the reward ``name``, changes of torch's settings, and say so once.

    ``here``: it runs in the thread that trains, whose own settings count too.
    """
    own = _table("thread" if here else "lane", _of_thread if here else _threads)
    before = [one.get() for one in own]
    _enter(name)
    try:
        yield
    finally:
        _leave(name)
        table = own or _table("thread" if here else "lane", _of_thread if here else _threads)
        _set_back(table, before or [one.default for one in table], [name])


def give_up(thread: threading.Thread) -> None:
    """Wait no longer for the calls that run in ``thread``: others are compared without them, and their late end sets
    nothing back, which could be what the process has set for itself since."""
    with _watch.turn:
        left = [one for one in _watch.running if one[0] == thread.ident]
        for one in left:
            _watch.running.remove(one)
        if left:
            _compare()


def _enter(name: str) -> None:
    with _watch.turn:
        if not _watch.running:
            _watch.table = _table("process", _of_process)
            _watch.before, _watch.involved = [one.get() for one in _watch.table], []
            _watch.path = [*sys.path]
            _watch.of_python = [one.get() for one in _OF_PYTHON]
        _watch.running.append((threading.get_ident(), name))
        _watch.involved.append(name)


def _leave(name: str) -> None:
    with _watch.turn:
        if (own := (threading.get_ident(), name)) in _watch.running:  # else it was given up
            _watch.running.remove(own)
            _compare()


def _compare() -> None:
    """Set back what has changed, where none runs any more."""
    if not _watch.running:
        table = _watch.table or _table("process", _of_process)
        before = _watch.before or [one.default for one in table]
        names = list(dict.fromkeys(_watch.involved))
        _set_back(_OF_PYTHON, _watch.of_python, names)
        _set_back(table, before, names)


def _set_back(table: Sequence[_Setting], before: Sequence[Any], names: Sequence[str]) -> None:
    for one, old in zip(table, before, strict=True):
        if old is _UNKNOWN or (new := one.get()) == old or not _lasts(one, old):
            continue
        one.set(old)
        who = " or ".join(names)
        if (who, one.name) not in _told:
            _told.update((name, one.name) for name in (who, *names))
            tell(
                f"warning: the reward {who} changed {one.name} of this process from {_short(old)} to {_short(new)}, "
                "so training would go on otherwise. It was set back. Set it back in the reward, or run the reward in a "
                "process of its own (mmrl serve, and the reward http)"
            )


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]} ..."


def _lasts(one: _Setting, old: Any) -> bool:
    for _ in range(_LOOKS):
        time.sleep(_APART_S)
        if one.get() == old:
            return False
    return True


def _table(kind: str, make: Callable[[Any], list[_Setting]]) -> list[_Setting]:
    """The settings of a kind that this version of torch has; none while torch is not loaded."""
    torch = sys.modules.get("torch")
    if torch is None or getattr(torch.__spec__, "_initializing", False):  # another thread imports it
        return []
    if kind not in _tables:
        found = []
        for one in make(torch):
            try:
                one.get()
            except (AttributeError, RuntimeError):  # another version, or not of this machine
                continue
            found.append(one)
        _tables[kind] = found
    return _tables[kind]


def _of_process(torch: Any) -> list[_Setting]:
    core, deterministic = torch._C, torch.utils.deterministic
    determined = torch.are_deterministic_algorithms_enabled, torch.is_deterministic_algorithms_warn_only_enabled
    einsum = torch.backends.opt_einsum
    found = [
        _Setting("the default dtype", torch.get_default_dtype, torch.set_default_dtype, torch.float32),
        _Setting(
            "deterministic algorithms",
            lambda: tuple(ask() for ask in determined),
            lambda old: torch.use_deterministic_algorithms(old[0], warn_only=old[1]),
            (False, False),
        ),
        _Setting(
            "the fill of new memory",
            lambda: deterministic.fill_uninitialized_memory,
            lambda old: setattr(deterministic, "fill_uninitialized_memory", old),
            default=True,
        ),
        _Setting("anomaly detection", torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, default=False),
        _Setting(
            "the order of einsum",
            lambda: (einsum.enabled, einsum.strategy),
            lambda old: (setattr(einsum, "enabled", old[0]), setattr(einsum, "strategy", old[1])),
        ),
    ]
    hooks = [_hooks(torch.nn.modules.module, f"_global_{name}") for name in _HOOKS]
    return [*found, *_kernels(core, torch.backends), *_precisions(torch, core), *hooks]


def _kernels(core: Any, backends: Any) -> list[_Setting]:
    """Which kernels compute."""
    cuda, mha = backends.cuda, backends.mha
    order = _pair(core, "_get_sdp_priority_order", "_set_sdp_priority_order")
    reduced = _pair(cuda, "fp16_bf16_reduction_math_sdp_allowed", "allow_fp16_bf16_reduction_math_sdp")
    switches = {
        **{f"cudnn_{name}": on for name, on in (("enabled", True), ("benchmark", False), ("deterministic", False))},
        **{"mkldnn_enabled": True, "mkldnn_deterministic": False, "nnpack_enabled": True},
    }
    return [
        _Setting("the order of attention kernels", *order),
        _Setting("reduced sums in attention", *reduced, False),
        _Setting("the fast path of encoders", *_pair(mha, "get_fastpath_enabled", "set_fastpath_enabled"), True),
        *(_Setting(f"{n} attention", *_pair(cuda, f"{n}_sdp_enabled", f"enable_{n}_sdp"), True) for n in _SDP),
        *(_Setting(n, *_pair(core, f"_get_{n}", f"_set_{n}"), on) for n, on in switches.items()),
    ]


def _precisions(torch: Any, core: Any) -> list[_Setting]:
    """How exactly products are computed. The older settings come first, since each sets several of the others."""
    found = [
        _Setting(
            "the precision of float32 products",
            lambda: _older(torch.get_float32_matmul_precision),
            lambda old: None if old == _MIXED else torch.set_float32_matmul_precision(old),
            "highest",
        ),
        _Setting(
            "TF32 of cuDNN",
            lambda: _older(core._get_cudnn_allow_tf32),
            lambda old: None if old == _MIXED else core._set_cudnn_allow_tf32(old),
            default=True,
        ),
    ]
    for kind in ("fp16", "bf16"):
        get, put = _pair(core, *(f"_{v}_cublas_allow_{kind}_reduced_precision_reduction" for v in ("get", "set")))
        found.append(_Setting(f"reduced sums of {kind}", get, lambda old, put=put: put(*_as_pair(old))))
    for of, op in _FP32:
        found.append(
            _Setting(
                f"the precision of {of} {op}",
                lambda of=of, op=op: core._get_fp32_precision_getter(of, op),
                lambda old, of=of, op=op: core._set_fp32_precision_setter(of, op, old),
                _UNKNOWN if (of, op) in (("cuda", "conv"), ("cuda", "rnn")) else "none",
            )
        )
    return found


def _older(get: Callable[[], Any]) -> Any:
    try:
        return get()
    except RuntimeError:  # the newer settings say something else
        return _MIXED


def _hooks(modules: Any, name: str) -> _Setting:
    def put(old: tuple[object, ...]) -> None:
        hooks = getattr(modules, name)
        for key in [key for key in hooks if key not in old]:
            del hooks[key]

    return _Setting(f"hooks of all modules ({name})", lambda: tuple(getattr(modules, name)), put, ())


def _of_thread(torch: Any) -> list[_Setting]:
    core = torch._C
    several = _pair(core, "_is_multithreading_enabled", "_set_multithreading_enabled")
    cache = torch.is_autocast_cache_enabled, torch.set_autocast_cache_enabled
    inference = torch.is_inference_mode_enabled, lambda old: _set_inference(core, old)
    found = [
        _Setting("the default device", lambda: _default_device(torch), torch.set_default_device, None),
        _stack("the modes of functions", core._len_torch_function_stack, core._pop_torch_function_stack),
        _stack("the modes of operators", core._len_torch_dispatch_stack, lambda: core._pop_torch_dispatch_stack(None)),
        _Setting("the hooks of saved tensors", lambda: _hooked(core), lambda old: _unhook(core, old), None),
        *_threads(torch),
        _Setting("inference mode", *inference, False),
        _Setting("gradients", torch.is_grad_enabled, core._set_grad_enabled, default=True),
        _Setting("the cache of autocast", *cache, True),
        _Setting("autocast, entered and not left", lambda: _nesting(torch), lambda old: _nest(torch, old), 0),
        _Setting("gradients in several threads", *several, True),
        _Setting("the flush of tiny numbers", lambda: _TINY * _ONE == 0.0, torch.set_flush_denormal, default=False),
        _Setting("numpy's errors", *_numpy()),
    ]
    for kind in ("cpu", "cuda"):
        found.append(
            _Setting(
                f"autocast ({kind})",
                lambda kind=kind: (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)),
                lambda old, kind=kind: _set_autocast(torch, kind, *old),
            )
        )
    return found


def _set_inference(core: Any, enabled: bool) -> None:
    _guards.append(core._InferenceMode(enabled))  # it would end with the object
    _guards[-1].__enter__()


def _set_autocast(torch: Any, kind: str, enabled: bool, dtype: Any) -> None:
    torch.set_autocast_enabled(kind, enabled)
    torch.set_autocast_dtype(kind, dtype)


def _nesting(torch: Any) -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def _nest(torch: Any, nesting: int) -> None:
    """While torch counts an autocast that nobody leaves, it keeps its half copies of weights, whatever they become."""
    while _nesting(torch) > nesting:
        torch.autocast_decrement_nesting()
    while _nesting(torch) < nesting:
        torch.autocast_increment_nesting()
    torch.clear_autocast_cache()


def _threads(torch: Any) -> list[_Setting]:
    return [_Setting("the number of threads", torch.get_num_threads, torch.set_num_threads)]


def _numpy() -> tuple[Callable[[], Any], Callable[[Any], object]]:
    import numpy as np

    return np.geterr, lambda old: np.seterr(**old)


def _default_device(torch: Any) -> Any:
    held = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if held is None else held.device


def _stack(name: str, length: Callable[[], int], pop: Callable[[], object]) -> _Setting:
    """What is entered and left again, by how much of it is entered."""

    def leave(old: int) -> None:
        while length() > old:
            pop()

    return _Setting(name, length, leave, 0)


def _hooked(core: Any) -> object:
    """The pair of hooks that autograd calls on what it saves; None without."""
    return core._autograd._top_saved_tensors_default_hooks(True)


def _unhook(core: Any, old: object) -> None:
    """Take away the hooks that were set after the pair ``old``."""
    while _hooked(core) not in (old, None):
        core._autograd._pop_saved_tensors_default_hooks()


def _pair(of: Any, get: str, put: str) -> tuple[Callable[[], Any], Callable[[Any], object]]:
    return lambda: getattr(of, get)(), lambda *old: getattr(of, put)(*old)


def _as_pair(old: Any) -> tuple[Any, ...]:
    return old if isinstance(old, tuple) else (old,)

"""Defaults of the environment for libraries that print much or spin; set them before torch is imported."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import TextIO

from mmrl.core.errors import plain
from mmrl.core.secrets import hidden

QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin between operations starve their neighbours on a shared machine
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "KINETO_LOG_LEVEL": "5",  # torch's profiler tells of every start and stop
}
"""Defaults of the environment, set before torch and the model libraries are imported; what the user set stays."""
_LIBRARIES = {
    "transformers": "TRANSFORMERS_VERBOSITY",
    "diffusers": "DIFFUSERS_VERBOSITY",
    "huggingface_hub": "HF_HUB_VERBOSITY",
}
"""Libraries whose log is printed in lines of ours, unless the user set the variable of its level."""
_PYTREE = "torch.utils._pytree"
HARMLESS = re.compile(
    # which class a component is: other libraries read it, and diffusers' own files name it otherwise
    r"The config attributes \{'architectures': \[[^\]]*\]\} were passed"
    # checkpoints that torchao saved, which nothing here reads; its kernels of GPUs, which nothing here calls
    r"|Unable to import `torchao` Tensor objects|Failed to load \S+torchao\S+\.so"
    # processors of pictures that a pipeline's import names; where a model uses one, Pillow does torchvision's work
    r"|ImageProcessor` requires torchvision \(not installed\); falling back to"
    # how torchao tells torch of its settings
    r"|is an Enum subclass and is now natively supported by torch\.compile"
    # how diffusers calls transformers' processors, and what it says of its own guiders
    r"|Kwargs passed to `processor\.__call__` have to be|Guiders are currently an experimental feature"
)
"""What a user can do nothing about, each with its reason."""
_INSTALLED = re.compile(r".*[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")
_LONGEST, _ALIKE, _MOST = 400, 40, 3
"""Characters of a line; texts that begin with so many equal characters are of one kind; lines of a kind."""


def be_quiet() -> list[Plain | Dropped]:
    """Set what the user's environment does not, and print what libraries log in plain lines. Returns what prints them,
    where nothing did before."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, in a notebook without ipywidgets
    free = [name for name, level in _LIBRARIES.items() if level not in os.environ]
    made: list[Plain | Dropped] = []
    made += [Plain(name) for name in free if not any(isinstance(of, Plain) for of in logging.getLogger(name).handlers)]
    if not any(isinstance(of, Dropped) for of in logging.getLogger(_PYTREE).filters):
        made.append(Dropped(_PYTREE))
    return made


class _Once:
    """Prints lines, an equal one once and at most ``_MOST`` of a kind."""

    def __init__(self) -> None:
        self._said, self._kinds = set[str](), Counter[tuple[str, str]]()

    def say(self, level: str, library: str, source: str, text: str) -> None:
        """``source``: what two lines of one kind have in common, beside their first characters. The line goes onto the
        stderr of the moment, which a progress bar may have wrapped."""
        text = " ".join(plain(text, _LONGEST).split())
        line, kind = f"{level}: {library}: {hidden(text)}", (source, text[:_ALIKE])
        if line in self._said or self._kinds[kind] == _MOST or HARMLESS.search(text):
            return
        self._said.add(line)
        self._kinds[kind] += 1
        last = " (more of this kind is not shown)" if self._kinds[kind] == _MOST else ""
        print(f"{line}{last}", file=sys.stderr)


class Plain(logging.Handler):
    """Prints what ``library`` logs, in one line and once, but nothing of ``HARMLESS``. Until it is closed the library's
    own handler, which comes when the library is imported, prints nothing."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self._library, self._once = library, _Once()
        logging.getLogger(library).handlers.insert(0, self)
        self._mute()

    def emit(self, record: logging.LogRecord) -> None:
        self._mute()
        self._once.say(record.levelname.lower(), self._library, record.name, record.getMessage())

    def close(self) -> None:
        """Take it away."""
        logging.getLogger(self._library).removeHandler(self)
        for own in self._own():
            own.removeFilter(_nothing)
        super().close()

    def _mute(self) -> None:
        for own in self._own():
            own.addFilter(_nothing)

    def _own(self) -> list[logging.Handler]:
        named = getattr(sys.modules.get(f"{self._library}.utils.logging"), "_default_handler", None)
        there = logging.getLogger(self._library).handlers
        return [named] if named is not None else [own for own in there if type(own) is logging.StreamHandler]


class Dropped(logging.Filter):
    """Drops what the logger ``name`` says of ``HARMLESS``, until it is closed."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._logger = logging.getLogger(name)
        self._logger.addFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        return not HARMLESS.search(record.getMessage())

    def close(self) -> None:
        """Take it away."""
        self._logger.removeFilter(self)


def _nothing(record: logging.LogRecord) -> bool:
    return False


@contextmanager
def quietly() -> Generator[None]:
    """``be_quiet`` inside the block, in a program of somebody else: the environment, the filters of warnings, the
    levels of logs and the progress bars of downloads are afterwards what they were."""
    environment = dict(os.environ)
    with warnings.catch_warnings(), _levels_kept(), _bars_hidden("HF_HUB_DISABLE_PROGRESS_BARS" in environment):
        made = be_quiet()
        try:
            yield
        finally:
            _restore(environment)
            for one in made:
                one.close()


@contextmanager
def as_before() -> Generator[None]:
    """The handlers of signals and torch's number of threads are after the block what they were."""
    main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()} if main else {}
    torch = sys.modules.get("torch")
    threads = None if torch is None else torch.get_num_threads()
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        if torch is not None and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)


def _restore(environment: Mapping[str, str]) -> None:
    for name in os.environ.keys() - environment.keys():
        os.environ.pop(name, None)
    for name, value in environment.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


@contextmanager
def _levels_kept() -> Generator[None]:
    """The levels of the loggers that are there, and the handlers of the root, stay."""
    root = logging.getLogger()
    known = {name: of for name, of in logging.root.manager.loggerDict.items() if isinstance(of, logging.Logger)}
    before = [(of, of.level, of.disabled, of.propagate) for of in (root, *known.values())]
    handlers, off = root.handlers[:], logging.root.manager.disable
    try:
        yield
    finally:
        for of, level, disabled, propagate in before:
            if of.level != level:
                of.setLevel(level)
            of.disabled, of.propagate = disabled, propagate
        root.handlers[:] = handlers
        logging.disable(off)


@contextmanager
def _bars_hidden(decided: bool) -> Generator[None]:
    """No progress bars of downloads. ``decided``: whether the user's environment says it, which a library reads once,
    when it is imported, and which is then left alone."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if decided or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def library_of(file: str) -> str:
    """The installed package that ``file`` is of; empty where it is of none."""
    found = _INSTALLED.search(file)
    return found[1] if found else ""


class _LastResort(logging.Handler):
    """Prints what a library logs that has no handler, in one line and once; ``usual`` prints the rest."""

    def __init__(self, usual: logging.Handler, once: _Once) -> None:
        super().__init__(logging.WARNING)
        self._usual, self._once = usual, once

    def emit(self, record: logging.LogRecord) -> None:
        if library := library_of(record.pathname):
            self._once.say(record.levelname.lower(), library, record.name, record.getMessage())
        else:
            self._usual.handle(record)


def warn_plainly() -> None:
    """Print warnings of ours and of libraries to a user without a line of code, and an equal one once in this process:
    planning and training look at the same data, and a library warns at each step. What Python hides (of deprecated
    functions) stays hidden, and what a user's file warns of stays as Python prints it."""
    usual, said, once = warnings.showwarning, set[str](), _Once()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        ours = category.__module__.startswith(("mmrl.", "datasets."))
        if file is not None or not (ours or library_of(filename)):
            usual(message, category, filename, lineno, file, line)
        elif not ours:
            once.say("warning", library_of(filename), f"{filename}:{lineno}", str(message))
        elif str(message) not in said:
            said.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show
    if logging.lastResort is not None and not isinstance(logging.lastResort, _LastResort):
        logging.lastResort = _LastResort(logging.lastResort, once)

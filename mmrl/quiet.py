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

from mmrl.errors import plain
from mmrl.secrets import hidden

QUIET = {
    "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin between operations starve their neighbours on a shared machine
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "KINETO_LOG_LEVEL": "5",  # torch's profiler tells of every start and stop
}
"""Defaults of the environment, set before torch and the model libraries are imported; what the user set stays."""
_LIBRARIES = {"transformers": "TRANSFORMERS_VERBOSITY", "diffusers": "DIFFUSERS_VERBOSITY"}
"""Libraries whose log is printed in lines of ours, unless the user set the variable of its level."""
HARMLESS = re.compile(
    # which class a component is: other libraries read it, and diffusers' own files name it otherwise
    r"The config attributes \{'architectures': \[[^\]]*\]\} were passed"
)
"""What a user can do nothing about, each with its reason."""
_LONGEST, _ALIKE, _MOST = 400, 40, 3
"""Characters of a line; texts that begin with so many equal characters are of one kind; lines of a kind."""


def be_quiet() -> list[Plain]:
    """Set what the user's environment does not, and print what libraries log in plain lines. Returns what prints them,
    where nothing did before."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    warnings.filterwarnings("ignore", "IProgress not found")  # of tqdm, in a notebook without ipywidgets
    free = [name for name, level in _LIBRARIES.items() if level not in os.environ]
    return [Plain(name) for name in free if not any(isinstance(of, Plain) for of in logging.getLogger(name).handlers)]


class Plain(logging.Handler):
    """Prints what ``library`` logs, in one line and once, but nothing of ``HARMLESS``. Until it is closed the library's
    own handler, which comes when the library is imported, prints nothing."""

    def __init__(self, library: str) -> None:
        super().__init__()
        self._library, self._said, self._kinds = library, set[str](), Counter[tuple[str, str]]()
        logging.getLogger(library).handlers.insert(0, self)
        self._mute()

    def emit(self, record: logging.LogRecord) -> None:
        """Onto the stderr of the moment, which a progress bar may have wrapped."""
        self._mute()
        text = " ".join(plain(record.getMessage(), _LONGEST).split())
        kind = record.name, text[:_ALIKE]
        if text in self._said or self._kinds[kind] == _MOST or HARMLESS.search(text):
            return
        self._said.add(text)
        self._kinds[kind] += 1
        last = " (more of this kind is not shown)" if self._kinds[kind] == _MOST else ""
        print(f"{record.levelname.lower()}: {self._library}: {hidden(text)}{last}", file=sys.stderr)

    def close(self) -> None:
        """Take it away."""
        logging.getLogger(self._library).removeHandler(self)
        if (own := self._own()) is not None:
            own.removeFilter(_nothing)
        super().close()

    def _mute(self) -> None:
        if (own := self._own()) is not None:
            own.addFilter(_nothing)

    def _own(self) -> logging.Handler | None:
        return getattr(sys.modules.get(f"{self._library}.utils.logging"), "_default_handler", None)


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


def warn_plainly() -> None:
    """Print warnings to a user without a line of code, and an equal one once in this process: planning and training
    look at the same data. Other warnings (of deprecated functions) stay as Python prints them."""
    usual, said = warnings.showwarning, set[str]()

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if file is not None or not category.__module__.startswith(("mmrl.", "datasets.")):
            usual(message, category, filename, lineno, file, line)
        elif str(message) not in said:
            said.add(str(message))
            print(f"warning: {message}", file=sys.stderr)

    warnings.showwarning = show

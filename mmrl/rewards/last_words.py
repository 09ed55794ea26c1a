"""Name the reward in whose call a process ends without a word: by ``os._exit``, a crash or a kill.

``os._exit`` says before it ends whose call it is in. For what leaves no time to speak, a file in the run's directory
names the calls that are under way; it is gone after them, and who finds the process lost, or ``--resume``, tells what
is there. An alarm that rings within a call would end the process too: that call fails in its place.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures.thread import _threads_queues  # pyright: ignore[reportPrivateUsage]
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from mmrl.core import torch_state
from mmrl.core.errors import UserError
from mmrl.core.notices import tell
from mmrl.core.untrusted import parse_json, read_file

CALLING = "calling.json"
"""The file in a run's directory that names the rewards that are being called."""
_LENGTH = 1024
_turn = threading.Lock()
_threads: dict[tuple[int, int], list[str]] = {}
"""By process and thread: the rewards whose code runs there."""
_calls: dict[Path, list[str]] = {}
_files: dict[Path, int] = {}
_left: WeakKeyDictionary[threading.Thread, str] = WeakKeyDictionary()
"""Threads that began while a reward's code ran, by its name: Python waits for them before a process ends."""
_rung: set[str] = set()
"""The rewards in whose code an alarm rang."""
_set_by: list[str] = []
"""The reward whose code set the alarm last; none where that is not known."""
_exit, _alarm, _timer = os._exit, signal.alarm, signal.setitimer
PATIENCE_S = 10.0


@contextmanager
def watched(name: str, *, here: bool = True, folder: Path | None = None) -> Generator[None]:
    """Code of the reward ``name`` runs inside: torch's settings are kept (``torch_state``), and an end of the process
    is an end of the reward. ``folder``: the run's directory, for calls."""
    os._exit = _end
    _hear_alarms()
    place, before = (os.getpid(), threading.get_ident()), {*threading.enumerate()}
    with _turn:
        _threads.setdefault(place, []).append(name)
        _note(folder, name, begins=True)
    try:
        with torch_state.kept(name, here=here):
            yield
    finally:
        if name in _rung:
            _rung.discard(name)
            tell(f"warning: an alarm (SIGALRM) rang in code of the reward {name}; set it to 0 where that code returns")
        with _turn:
            _threads[place].remove(name)
            _note(folder, name, begins=False)
            for thread in {*threading.enumerate()} - before:
                _left.setdefault(thread, name)


def end_without_threads(error: BaseException | None) -> None:
    """End a command whose process would wait without end for threads that rewards left. ``error``: what it raised.

    Returns where there is none, or they end within ``PATIENCE_S``. Workers of executors end by themselves.
    """
    until = time.monotonic() + PATIENCE_S
    left = [thread for thread in _left if not thread.daemon and thread not in _threads_queues]
    for thread in left:
        thread.join(max(0.0, until - time.monotonic()))
    left = [thread for thread in left if thread.is_alive()]
    for thread in left:
        print(
            f"warning: the reward {_left[thread]} left the thread {thread.name} running, which would keep this process "
            "from ending, so it is stopped. Give the thread daemon=True, or end it in a method close() of the reward",
            file=sys.stderr,
        )
    if left and (error is None or isinstance(error, SystemExit)):
        code = error.code if isinstance(error, SystemExit) else 0
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        sys.stdout.flush()
        sys.stderr.flush()
        _exit(code if isinstance(code, int) else int(code is not None))


def left_by_last(folder: Path) -> list[str]:
    """The rewards that were being called when the last process of the run in ``folder`` ended; removes the note."""
    file = folder / CALLING
    try:
        found = parse_json(read_file(file, most=_LENGTH))
        file.unlink()
    except (OSError, ValueError):
        return []
    return [str(name)[:200] for name in found] if isinstance(found, list) else []


def in_a_call(folder: Path) -> str:
    """Words for the end of a process that wrote into ``folder``: the rewards that were being called, else nothing."""
    names = left_by_last(folder)
    return f", in a call of the reward {' or '.join(names)}" if names else ""


def check_alarm(name: str) -> None:
    """Raises ``UserError`` where an alarm rang since the call of the reward ``name`` began."""
    if name in _rung:
        _rung.discard(name)
        raise UserError(
            "set an alarm (SIGALRM) that rang before it returned, and would have ended the process; let it return "
            "sooner, or set timeout for this reward in place of the alarm"
        )


def _hear_alarms() -> None:
    """Where nobody handles an alarm, it would end the process. Python handles signals in the main thread alone."""
    main = threading.current_thread() is threading.main_thread()
    if main and signal.getsignal(signal.SIGALRM) is signal.SIG_DFL:
        signal.signal(signal.SIGALRM, _ring)
    if signal.alarm is _alarm:
        signal.alarm, signal.setitimer = _noted(_alarm), _noted(_timer)


def _noted(put: Callable[..., Any]) -> Callable[..., Any]:
    """``put``, which sets an alarm, with a note of the reward whose code called it."""

    def noted(*given: Any) -> Any:
        _set_by[:] = _threads.get((os.getpid(), threading.get_ident()), [])[-1:]
        return put(*given)

    return noted


def _ring(number: int, _: object) -> None:
    running = {names[-1] for (pid, _), names in [*_threads.items()] if pid == os.getpid() and names}
    if not running:  # as if nobody had handled it
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    who = running.intersection(_set_by) or running
    if len(who) > 1:
        tell(f"warning: an alarm (SIGALRM) rang while the rewards {' and '.join(sorted(who))} ran, and nobody hears it")
    else:
        _rung.update(who)


def _end(status: int) -> None:
    names = _threads.get((os.getpid(), threading.get_ident()))
    if names:
        who = " or ".join(dict.fromkeys(names))
        with suppress(OSError, ValueError):
            print(
                f"error: the reward {who} ended the process by os._exit({status!r}); raise an exception there in its "
                "place: then the samples of that call have no score, and the run goes on",
                file=sys.stderr,
                flush=True,
            )
    _exit(status)


def _note(folder: Path | None, name: str, *, begins: bool) -> None:
    if folder is None:
        return
    calls = _calls.setdefault(folder, [])
    calls.append(name) if begins else calls.remove(name)
    with suppress(OSError):  # a full or lost disk is found by what the run itself writes
        if not calls:
            file = _files.pop(folder, None)
            if file is not None:
                os.close(file)
                (folder / CALLING).unlink()
            return
        if folder not in _files:
            _files[folder] = os.open(folder / CALLING, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        text = json.dumps(list(dict.fromkeys(calls))[:8])[:_LENGTH]
        os.pwrite(_files[folder], text.encode().ljust(_LENGTH), 0)

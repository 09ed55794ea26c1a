"""Calls in threads that may hang: the process ends without them."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

T = TypeVar("T")


def in_daemon(call: Callable[[], T], name: str) -> Future[T]:
    """What ``call`` will return or raise, in a thread called ``name``."""
    made: Future[T] = Future()

    def run() -> None:
        try:
            made.set_result(call())
        except BaseException as error:  # this thread has nobody who sees it
            made.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return made

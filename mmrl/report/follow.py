"""A run's report as a page that refreshes itself while the run goes on: ``mmrl report RUN --follow``.

The rules of ``mmrl.core.local_page`` hold: the loopback interface alone, and a token. Nothing is written into the run
before it has ended.
"""

from __future__ import annotations

import hashlib
import threading
import time
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.local_page import Page, PageHandler, headers_of
from mmrl.logging.rundir import ENDED, RunDir
from mmrl.report.html import page_of, write_report
from mmrl.report.recorded import read_run

EVERY_S = 1.0
"""Seconds between two looks at whether the run goes on."""
_LAST_S = 10.0
"""Seconds that an open page has to take the report of a run that has ended; pages ask every two."""


class FollowServer(Page):
    """Serves the report of the run in ``folder``, drawn anew when the run has written more. Raises ``UserError`` where
    no process writes the run, and where it cannot listen."""

    def __init__(self, folder: Path, port: int = 0) -> None:
        self.run = RunDir(folder)
        status = read_run(folder).status
        if self.run.owner() is None:
            raise UserError(f"no process trains {folder} now ({status}); its report: mmrl report {folder}")
        self.ended = False
        self.taken = threading.Event()
        """Set once a page shows the report of the run that has ended."""
        self.asked_at: float | None = None
        """When a page last asked, of ``time.monotonic``."""
        self._drawing = threading.Lock()
        self._drawn = "", ""
        super().__init__(port, _Handler)

    def state(self) -> JsonObject:
        """The version of what there is to show, and whether the run has ended."""
        self.asked_at = time.monotonic()
        ended = self.ended  # before the files are looked at: what is written later has another version
        return {"version": self._version(), "ended": ended}

    def page(self) -> str:
        """The report as it is now. Raises ``UserError`` where a file of the run cannot be read."""
        with self._drawing:
            version = self._version()
            if self._drawn[0] != version:
                self._drawn = version, page_of(self.run.path, follows=version)
            return self._drawn[1]

    def until_end(self) -> None:
        """Wait for the end of the run, and then for an open page to take its last report."""
        while self.run.owner() is not None:
            time.sleep(EVERY_S)
        self.ended = True
        if self.asked_at is not None and time.monotonic() - self.asked_at < _LAST_S:
            self.taken.wait(_LAST_S)

    def _version(self) -> str:
        run, seen = self.run, hashlib.sha256()
        for path in (
            run.metrics,
            run.heldout,
            run.failures,
            run.placement,
            run.resolved,
            run.path / ENDED,
            *sorted(run.samples.glob("step_*.json")),
        ):
            try:
                found = path.stat()
            except OSError:
                continue
            seen.update(f"{path.name} {found.st_mtime_ns} {found.st_size}\n".encode())
        return f"{seen.hexdigest()[:16]}{'' if self.run.owner() else '-ended'}"


class _Handler(PageHandler):
    server: FollowServer  # type: ignore[assignment]
    always = headers_of("data:")

    def show(self, path: str) -> None:
        if path == "/":
            try:
                return self.reply(200, self.server.page().encode(), "text/html; charset=utf-8")
            except UserError as error:
                return self.refuse(500, str(error))
        if path == "/state":
            return self.answer(self.server.state)
        if path == "/taken":
            self.reply(200, b"{}", "application/json")
            return self.server.taken.set()
        return self.refuse(404, "there is nothing here")


def _wait_for(run: Path) -> None:
    """Wait for a run that is not there yet to begin. A folder that has something else is none."""
    there = run.exists() and any(run.iterdir())
    if there or run.is_file():
        return
    print(f"there is no run in {run} yet; waiting for it to begin (Ctrl-C ends the page)", flush=True)
    while not (RunDir(run).resolved.is_file() and RunDir(run).owner() is not None):
        time.sleep(EVERY_S / 4)


def follow(run: Path, port: int = 0) -> None:
    """Serve the report of ``run`` until the run ends or Ctrl-C, once it has begun; prints the address and how it ended.
    Raises ``UserError``."""
    try:
        _wait_for(run)
    except KeyboardInterrupt:
        print("\nno run began")
        return
    with FollowServer(run, port) as server, server.in_thread():
        try:
            print(f"the report of {run}, which refreshes itself while the run trains; open in a browser here:")
            print(server.url, flush=True)
            server.until_end()
        except KeyboardInterrupt:
            print(f"\nthe page has ended, and the run goes on; its report: mmrl report {run}")
            return
    print(f"the run has ended: {read_run(run).status}; its report: {write_report(run)}")

"""``profile: true``: traces of two steps by torch's profiler, to open in Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from mmrl.core.files import remove
from mmrl.core.notices import note

FIRST, LAST = 2, 3
"""Which steps of a process are traced: the first one also pays for what is done once."""


class Traces:
    """Final class: ``with traces.step(n):`` around each training step of this process; ``n`` names the file.

    ``profile/step_000002.json.gz`` in the run's folder has what this process and its device did in the step.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "profile"
        self._steps = 0

    @contextmanager
    def step(self, n: int) -> Generator[None]:
        self._steps += 1
        if not FIRST <= self._steps <= LAST:
            yield
            return
        from torch.profiler import profile

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="torch.profiler")
            with profile(record_shapes=True) as taken:
                yield
        self._write(taken.export_chrome_trace, self._folder / f"step_{n:06d}.json.gz")

    def _write(self, export: Callable[[str], None], path: Path) -> None:
        """A trace that cannot be written ends no run."""
        partial = path.with_name(f".{path.name}")  # its name's end has torch compress it
        try:
            path.parent.mkdir(exist_ok=True)
            export(str(partial))
            partial.replace(path)
        except OSError as error:
            with suppress(OSError):
                remove(partial)
            print(f"warning: profile: {path} cannot be written ({error}); training goes on", file=sys.stderr)
            return
        note(f"profile: {path}")


def named(pulse: Callable[[str], AbstractContextManager[None]]) -> Callable[[str], AbstractContextManager[None]]:
    """``pulse``, with the phases as spans of the trace."""
    from torch.profiler import record_function

    @contextmanager
    def both(phase: str) -> Generator[None]:
        with pulse(phase), record_function(phase):
            yield

    return both

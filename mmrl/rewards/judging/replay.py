"""Use verdicts that a run recorded instead of asking again. A replay builds its judges ``within`` this context.

The run's transcripts hold the outcome of each question about each sample, failures included. A judge with a model in
this process answers again; only outcomes that the run took from its cache are taken from the records, so that the model
gets the same batches.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Lock

from mmrl.core.json_types import Json, JsonObject, elements
from mmrl.core.lines import rows_of
from mmrl.core.trajectory import SampleId
from mmrl.rewards.judging.asking import Outcome
from mmrl.rewards.judging.store import TRANSCRIPTS, texts_of, verdict_of

_Key = tuple[int, str, tuple[tuple[Json, ...], ...], str]


class Recorded:
    """Final class: the outcomes of some ``steps`` of a run, counted from 0; -1 is evaluation. ``folders``: those of its
    controllers, the run's own first (``folder``).

    ``taken`` and ``missing`` count, by a judge's label, the questions with and without a recorded outcome. ``missing``
    counts only judges ``outside`` this process.
    """

    def __init__(self, folders: Iterable[Path], steps: Sequence[int]) -> None:
        folders = list(folders)
        self.folder = folders[0] if folders else None
        self.taken: Counter[str] = Counter()
        self.missing: Counter[str] = Counter()
        self._counting = Lock()  # rewards are called by several threads
        self._rows: dict[_Key, JsonObject] = {}
        for row in (row for folder in folders for row in rows_of(folder / TRANSCRIPTS)):
            step, samples, request = row.get("step"), row.get("samples"), row.get("request")
            if isinstance(step, int) and step in steps and isinstance(request, str):
                about = tuple(tuple(s) for s in elements(samples) if isinstance(s, list))
                self._rows[step, str(row.get("judge")), about, request] = row  # asked again: the later counts

    def outcome(
        self, step: int, label: str, samples: Sequence[SampleId], request: str, nth: int, *, outside: bool
    ) -> Outcome | None:
        """The outcome of the ``nth`` time that ``request`` was asked about ``samples``; None where it must be asked."""
        row = self._rows.get((step, label, tuple((i.slot, i.attempt, i.sample) for i in samples), request))
        verdicts = elements((row or {}).get("verdicts"))
        there = row is not None and nth < len(verdicts) and bool(outside or row.get("cached"))
        with self._counting:
            self.taken[label] += there
            self.missing[label] += outside and not there
        if row is None or not there:
            return None
        verdict = verdict_of(verdicts[nth])
        reason = None if verdict is not None else str(row.get("reason") or "no verdict")
        return Outcome(verdict, texts_of(row.get("answers")) if nth == 0 else [], reason, cached=True)


_recorded: ContextVar[Recorded | None] = ContextVar("recorded", default=None)


@contextmanager
def within(recorded: Recorded) -> Generator[None]:
    """Judges that are built inside take their verdicts from ``recorded``; their endpoints need not run."""
    token = _recorded.set(recorded)
    try:
        yield
    finally:
        _recorded.reset(token)


def recorded_here() -> Recorded | None:
    """The verdicts for judges that are built now; None where they ask their models, as in training."""
    return _recorded.get()

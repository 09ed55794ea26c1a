"""Handle a step with many failed rewards: wait, ask them again, and finally stop.

Without it, a run whose endpoint is down would continue with steps of few scored samples. All controllers see the same
counts and follow the leader's clock, so that they wait, continue and stop together.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from mmrl.config.schema import Scoring as Settings
from mmrl.core import notices
from mmrl.core.durations import duration
from mmrl.core.episode import REWARD
from mmrl.core.errors import StoppedError, UnscoredError

FIRST_PAUSE_S = 1.0
"""Seconds before the failed samples are asked for again; doubled each time, up to ``LONGEST_PAUSE_S``."""
LONGEST_PAUSE_S = 60.0
SLICE_S = 1.0
"""Seconds after which a pause looks for a stop."""
SHOWN = 200
"""Characters of a reason on the terminal."""

Gather = Callable[[list[float]], list[list[float]]]


class Asked(Protocol):
    """The samples of a step, with the answers of the rewards so far."""

    def __len__(self) -> int: ...

    def failed(self) -> list[tuple[str, str]]:
        """The reward and its reason for each sample that has no score."""
        ...

    def lost(self) -> Mapping[int, str]:
        """The samples that no reward can mend, and why."""
        ...

    def again(self) -> None:
        """Call the rewards again for the samples that failed, and wait for the answers."""
        ...


class Patience:
    """Final class: the limits of ``scoring``, and how controllers compare their counts.

    ``gather``: brings the numbers of all controllers together, by rank; the default is one controller.
    """

    def __init__(self, settings: Settings, gather: Gather = lambda mine: [mine]) -> None:
        self.settings, self._gather = settings, gather
        self.stopped: Callable[[], bool] = lambda: False
        """Whether this controller was asked to stop: a pause ends then."""

    def wait(self, asked: Asked, step: int, *, together: bool) -> None:
        """Return once enough of the step's samples have a score. Raises ``UnscoredError`` where that takes too long,
        and ``StoppedError`` where a controller was asked to stop meanwhile.

        ``together``: all controllers call this for the same step, and the limit is for all of their samples; else each
        looks at its own.
        """
        began, pause = time.monotonic(), FIRST_PAUSE_S
        while True:
            mine, lost = asked.failed(), list(asked.lost().values())
            found = [float(len(asked)), float(len(mine) + len(lost)), time.monotonic() - began, float(len(lost))]
            found.append(float(self.stopped()))
            everyone = self._gather(found) if together else [found]
            n, bad, gone = (int(sum(one[i] for one in everyone)) for i in (0, 1, 3))
            if not too_many(bad, n, self.settings.max_failed):
                return
            if too_many(gone, n, self.settings.max_failed):
                others = f", or set scoring.max_failed above {self.settings.max_failed:g} to train on the other samples"
                raise UnscoredError(
                    f"step {step + 1} was not trained: {summary([(REWARD, why) for why in lost], gone, n)}. Mend the "
                    f"environment{'' if gone == n else others}",
                    everywhere=together,
                )
            if any(one[4] for one in everyone):
                raise StoppedError(
                    f"step {step + 1} was not trained: the run was stopped while it waited: {summary(mine, bad, n)}",
                    everywhere=together,
                )
            left = self.settings.patience - everyone[0][2]
            if left <= 0:
                raise self._refusal(mine, bad, n, step, together)
            pause = min(pause, left, LONGEST_PAUSE_S)
            notices.tell(
                f"step {step + 1}: {summary(mine, bad, n)}; asked again in {duration(pause)}, "
                f"for at most {duration(left)} more (scoring.patience)"
            )
            with notices.starting():  # this wait has its own deadline; the watchdog must not take it for a hang
                self._sleep(pause)
                if not self.stopped():
                    asked.again()
            pause *= 2

    def _sleep(self, seconds: float) -> None:
        """Until ``seconds`` are over, or a stop is asked for: a signal alone does not end a sleep."""
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0 and not self.stopped():
            time.sleep(min(left, SLICE_S))

    def _refusal(self, mine: Sequence[tuple[str, str]], bad: int, n: int, step: int, together: bool) -> UnscoredError:
        others = f", or set scoring.max_failed above {self.settings.max_failed:g} to train on the samples that have one"
        return UnscoredError(
            f"step {step + 1} was not trained: {summary(mine, bad, n)}, and still after "
            f"{duration(self.settings.patience)} (scoring.patience). Have the reward answer again"
            f"{'' if bad == n else others}",
            everywhere=together,
        )


def too_many(bad: int, n: int, most: float) -> bool:
    """Whether ``bad`` failed samples of ``n`` exceed the share ``most``, or are all of them."""
    return bad > 0 and (bad > most * n or bad == n)


def summary(failed: Sequence[tuple[str, str]], bad: int, n: int) -> str:
    """``24 of 24 samples failed (reward 'http': cannot reach ...)``, with the reason that most of ``failed`` have."""
    if not failed:
        return f"{bad} of {n} samples failed (on other controllers)"
    (label, why), times = Counter(failed).most_common(1)[0]
    others = f", and {len(failed) - times} for other reasons" if len(failed) > times else ""
    return f"{bad} of {n} samples failed (reward {label!r}: {one_line(why)}{others})"


def one_line(text: object, most: int = SHOWN) -> str:
    """The start of a text from outside, for the terminal: one line of printable characters."""
    line = " ".join("".join(c if c.isprintable() else " " for c in str(text)[: 4 * most]).split())
    return line if len(line) <= most else f"{line[: most - 3]}..."

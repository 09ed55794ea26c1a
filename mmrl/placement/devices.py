"""What of a step a controller's devices compute (DESIGN 5): one, where everything is done in turn (here), or several
that share the work (``mmrl.placement.several``)."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

from mmrl.placement import work
from mmrl.placement.work import Drawing
from mmrl.report.clock import Clock
from mmrl.trajectory import Sample, SampleId, Slot, Trajectory

if TYPE_CHECKING:
    from mmrl.batch import Piece, Run
    from mmrl.engines.policy import Version

Chunk = tuple[Sequence[Slot], Sequence[SampleId]]
Drawn = tuple[int, Trajectory, list[Sample]]


class Devices(Protocol):
    """What of a step may be computed on several devices. Used by one thread."""

    def alone(self, run: Run, weights: str) -> AbstractContextManager[None]:
        """Inside, each device computes without the others, under the copy ``weights`` of the policy. All controllers
        enter and leave together."""
        ...

    def sample(
        self, run: Run, chunks: Iterable[Chunk], how: Drawing, clock: Clock, version: Version | None = None
    ) -> Iterator[Drawn]:
        """Each micro-batch sampled and decoded, with its number: in the order in which they are done.

        ``version``: the weights to sample with, where devices that sample do not train; None is those of now.
        """
        ...

    def go_on(
        self, run: Run, parts: Sequence[Trajectory], most: int, how: Drawing, version: Version | None = None
    ) -> list[Trajectory]:
        """Responses that are under way, each with at most ``most`` further tokens; ``version`` as in ``sample``."""
        ...

    def version(self, run: Run, name: str) -> Version:
        """The policy's copy ``name`` as it is now, to sample with later."""
        ...

    def in_step(self, run: Run, n: int) -> int:
        """How many micro-batches ``slices`` makes for ``spread`` where there are ``n``. All controllers must ask."""
        ...

    def spread(self, run: Run, name: str, pieces: Iterable[Piece], *arguments: Any) -> list[Any]:
        """What ``work.name(run, its pieces, *arguments)`` returns on each device that was dealt some."""
        ...

    def everywhere(self, run: Run, name: str, *arguments: Any) -> Any:
        """Do ``work.name`` on every device; returns what the first one said."""
        ...

    def others(self, run: Run, name: str, *arguments: Any) -> None:
        """Do ``work.name`` on every device but the first."""
        ...

    def beside(self, run: Run, name: str, *arguments: Any) -> AbstractContextManager[None]:
        """As ``others``, while the caller does what is inside."""
        ...

    def begin_step(self) -> None:
        """Count time from now."""
        ...

    def end_step(self, run: Run, step: int) -> dict[str, float]:
        """Metrics of the step just done; every controller must call it."""
        ...

    def lines(self) -> list[dict[str, Any]]:
        """Of placement.jsonl: what each device of every controller did when in the last step, and what was decided."""
        ...

    def cpu_seconds(self, run: Run) -> float:
        """CPU time of the controller's processes so far."""
        ...

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps of the placement."""
        ...

    def take_up(self, kept: dict[str, Any]) -> None:
        """Go on from what ``kept`` gave, where it is of as many devices."""
        ...

    def close(self) -> None: ...


class Single:
    """Final class: the controller's own process is its one device."""

    def alone(self, run: Run, weights: str) -> AbstractContextManager[None]:
        return work.apart(run, weights)

    def sample(
        self, run: Run, chunks: Iterable[Chunk], how: Drawing, clock: Clock, version: Version | None = None
    ) -> Iterator[Drawn]:
        assert version is None  # it trains as well
        for n, (slots, ids) in enumerate(chunks):
            yield n, *work.sample(run, slots, ids, how, clock)

    def go_on(
        self, run: Run, parts: Sequence[Trajectory], most: int, how: Drawing, version: Version | None = None
    ) -> list[Trajectory]:
        assert version is None
        return [work.go_on(run, part, most, how) for part in parts]

    def version(self, run: Run, name: str) -> Version:
        return run.policy.version(name)

    def in_step(self, run: Run, n: int) -> int:
        return max(run.controller.gather(n)) if run.policy.weights.lockstep else n

    def spread(self, run: Run, name: str, pieces: Iterable[Piece], *arguments: Any) -> list[Any]:
        return [work.perform(run, name, (pieces, *arguments))]

    def everywhere(self, run: Run, name: str, *arguments: Any) -> Any:
        return work.perform(run, name, arguments)

    def others(self, run: Run, name: str, *arguments: Any) -> None:
        pass

    def beside(self, run: Run, name: str, *arguments: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def begin_step(self) -> None:
        pass

    def end_step(self, run: Run, step: int) -> dict[str, float]:
        return {}

    def lines(self) -> list[dict[str, Any]]:
        return []

    def cpu_seconds(self, run: Run) -> float:
        return time.process_time()

    def kept(self) -> dict[str, Any]:
        return {}

    def take_up(self, kept: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass

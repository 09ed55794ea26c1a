"""Turn samples into questions and verdicts into scores, in a judge's four modes. All scores are in [0, 1].

pointwise  one question per sample
pairwise   a sample's mean preference over its opponents in the group; with ``opponents`` n each meets the n that follow
           it in the group's ring, else all meet all
ranking    the group is ranked; scores are Borda's
steps      the judge names the wrong steps of a response (CAPO, arXiv 2508.02298): spans of minus the share of critiques
           by the vote. What it says lies in them, so that its ``score`` is 0; ``right`` is the share of steps that
           stand

Judges favour a place, so the modes that compare have an ``order``: ``average`` asks each pair, and each vote of a
ranking, in one order and in its reverse, which costs twice the questions and takes out a preference for a place;
``random`` asks once, in an order drawn from seed, prompt and vote; ``fixed`` once, in the group's own order.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast, get_args

from mmrl.core.errors import UserError
from mmrl.core.grouping import grouped
from mmrl.core.json_types import Json
from mmrl.core.reward_contract import Failed, Parts, Spans, Value
from mmrl.core.trajectory import Sample
from mmrl.rewards.judging.asking import Ask, Outcome, seeded
from mmrl.rewards.judging.rubric import Rubric, RubricError, steps_of

ModeName = Literal["pointwise", "pairwise", "ranking", "steps"]
MODES: tuple[str, ...] = get_args(ModeName)
Order = Literal["average", "fixed", "random"]
ORDERS: dict[str, Order] = {"pairwise": "average", "ranking": "random"}
"""The modes that compare, and in which order of the candidates they ask unless the options say otherwise."""
NumberVote = Literal["mean", "median", "majority"]
StepVote = Literal["intersection", "majority", "union", "average"]


@dataclass(frozen=True)
class Job:
    """A question about the samples ``rows``, in the order shown; ``reason``: why it cannot be asked."""

    rows: tuple[int, ...]
    vote: int
    ask: Ask | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Mode:
    """One of the modes with its settings. Raises ``UserError`` for settings that do not go together."""

    name: str
    votes: int
    vote: str
    opponents: int | None = None
    seed: int = 0
    order: Order = "average"

    @classmethod
    def of(cls, name: str, votes: Json, vote: Json, opponents: Json, seed: int, order: Json = None) -> Mode:
        if name not in MODES:
            raise UserError(f"options.mode: {name!r}; write {', '.join(MODES)}")
        if isinstance(votes, bool) or not isinstance(votes, int) or votes < 1:
            raise UserError(f"options.votes: {votes!r}; write a number of critiques, 1 or more")
        known = get_args(StepVote) if name == "steps" else ("mean",) if name == "ranking" else get_args(NumberVote)
        how = str(known[0] if vote is None else vote)
        if how not in known:
            raise UserError(f"options.vote: {vote!r}; mode {name} has {', '.join(known)}")
        if opponents is not None and (name != "pairwise" or not isinstance(opponents, int) or opponents < 1):
            raise UserError("options.opponents: is for mode pairwise, and is 1 or more")
        if order is not None and name not in ORDERS:
            raise UserError(f"options.order: is for modes {' and '.join(ORDERS)}; remove it")
        if order is not None and order not in get_args(Order):
            raise UserError(f"options.order: {order!r}; write {', '.join(get_args(Order))}")
        chosen = cast("Order", order or ORDERS.get(name, "fixed"))
        return cls(name, votes, how, opponents, seed, chosen)

    @property
    def grouped(self) -> bool:
        return self.name in ("pairwise", "ranking")

    def jobs(self, samples: Sequence[Sample], rubric: Rubric, system: str | None) -> list[Job]:
        """The questions about ``samples`` (in the grouped modes, those of one prompt), without seeds."""
        made: dict[tuple[int, ...], Job] = {}
        jobs = []
        for vote in range(self.votes):
            for rows in self._rows(samples, vote):
                if rows not in made:
                    made[rows] = self._job(samples, rows, rubric, system)
                found = made[rows]
                jobs.append(Job(rows, vote, found.ask, found.reason))
        return jobs

    def fold(self, samples: Sequence[Sample], jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> Parts:
        """What the reward returns: ``score`` and, in mode steps, ``right``, ``wrong`` (how many) and ``spans``."""
        if self.name == "steps":
            return self._fold_steps(samples, jobs, outcomes)
        found: list[list[float]] = [[] for _ in samples]
        missed: list[list[str]] = [[] for _ in samples]
        for job, outcome in zip(jobs, outcomes, strict=True):
            if outcome.verdict is None:
                for row in job.rows:
                    missed[row].append(outcome.reason or "no verdict")
                continue
            for row, value in zip(job.rows, self._shares(outcome), strict=True):
                found[row].append(value)
        alone = self.grouped and len(samples) == 1  # nothing to compare it with: neither better nor worse
        return {"score": [0.5 if alone else self.decided(*of) for of in zip(found, missed, strict=True)]}

    def _rows(self, samples: Sequence[Sample], vote: int) -> Iterable[tuple[int, ...]]:
        n = len(samples)
        if not self.grouped:
            return [(row,) for row in range(n)]
        if n == 1:
            return []
        if self.name == "ranking":
            shown = list(range(n)) if self.order == "fixed" else sorted(range(n), key=self._drawn(samples, vote))
            return [tuple(shown), *([tuple(reversed(shown))] if self.order == "average" else [])]
        reach = n - 1 if self.opponents is None else min(self.opponents, n - 1)
        met = {(i, (i + d) % n) for i in range(n) for d in range(1, reach + 1)}
        if self.order == "average":
            return sorted(met | {(j, i) for i, j in met})
        pairs = sorted({(min(pair), max(pair)) for pair in met})
        if self.order == "fixed":
            return pairs
        drawn = self._drawn(samples, vote)
        return [(j, i) if drawn(i * n + j) % 2 else (i, j) for i, j in pairs]

    def _drawn(self, samples: Sequence[Sample], vote: int) -> Callable[[int], int]:
        """Numbers drawn for the places of a group, the same for an equal question."""
        prompt = samples[0].prompt
        return lambda place: seeded(self.seed, prompt.id, prompt.text, vote, "order", place)

    def _job(self, samples: Sequence[Sample], rows: tuple[int, ...], rubric: Rubric, system: str | None) -> Job:
        chosen = [samples[row] for row in rows]
        items = len(steps_of(chosen[0])) if self.name == "steps" else len(rows)
        if self.name == "steps" and items == 0:
            return Job(rows, 0, reason="the response has no steps")
        try:
            return Job(rows, 0, Ask(rubric.render(chosen), system, items))
        except RubricError as error:
            return Job(rows, 0, reason=str(error))

    def _shares(self, outcome: Outcome) -> list[float]:
        """The value of each sample that a verdict is about, in the order shown."""
        verdict = outcome.verdict
        if self.name == "ranking":
            return ranking_scores(cast("list[int]", verdict))
        value = cast("float", verdict)
        return [value, 1 - value] if self.name == "pairwise" else [value]

    def decided(self, found: list[float], missed: list[str]) -> Value:
        """One value of the verdicts found; a failure where more than half are missing."""
        if not found or len(missed) > len(found):
            return _failed(missed, len(found) + len(missed))
        return vote_number(found, cast("NumberVote", "mean" if self.grouped else self.vote))

    def _fold_steps(self, samples: Sequence[Sample], jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> Parts:
        of = grouped((job.rows, outcome) for job, outcome in zip(jobs, outcomes, strict=True))
        rows = [self._of_steps(sample, of.get((row,), [])) for row, sample in enumerate(samples)]
        return {part: [row[part] for row in rows] for part in ("score", "right", "wrong", "spans")}

    def _of_steps(self, sample: Sample, outcomes: Sequence[Outcome]) -> dict[str, Any]:
        """The parts of one response."""
        verdicts = [cast("list[int]", o.verdict) for o in outcomes if o.verdict is not None]
        steps = steps_of(sample)
        if steps and 2 * len(verdicts) < len(outcomes):
            failed = _failed([o.reason or "" for o in outcomes if o.verdict is None], len(outcomes))
            return {"score": failed, "right": None, "wrong": None, "spans": None}
        wrong = vote_steps(verdicts, cast("StepVote", self.vote)) if steps else {}
        return {
            "score": 0.0,
            "right": 1 - sum(wrong.values()) / len(steps) if steps else 0.0,
            "wrong": sum(wrong.values()),
            "spans": Spans([(steps[k - 1].start, steps[k - 1].end, -share) for k, share in wrong.items()]),
        }


def _failed(reasons: Sequence[str], of: int) -> Failed:
    more = f" ({len(reasons)} of {of} answers failed)" if of > 1 else ""
    return Failed(f"{reasons[0]}{more}")


def vote_number(verdicts: Sequence[float], how: NumberVote) -> float:
    """One number from several in [0, 1]. ``majority``: 1 where more than half are above 0.5, else 0 (a tie is 0)."""
    if how == "mean":
        return statistics.fmean(verdicts)
    if how == "median":
        return float(statistics.median(verdicts))
    return float(sum(v > 0.5 for v in verdicts) * 2 > len(verdicts))


def vote_steps(verdicts: Sequence[Sequence[int]], how: StepVote) -> dict[int, float]:
    """Which steps are wrong, and how much so (0 to 1), from the wrong steps that each critique named.

    CAPO (arXiv 2508.02298): ``intersection`` takes a step that all critiques named, ``majority`` one that at least
    half of them did (count >= k / 2), ``union`` one that any did; ``average`` gives each its share of the critiques.
    """
    k = len(verdicts)
    counts: dict[int, int] = {}
    for verdict in verdicts:
        for step in set(verdict):
            counts[step] = counts.get(step, 0) + 1
    if how == "average":
        return {step: count / k for step, count in sorted(counts.items())}
    least = {"intersection": k, "majority": k / 2, "union": 1}[how]
    return {step: 1.0 for step, count in sorted(counts.items()) if count >= least}


def ranking_scores(ranking: Sequence[int]) -> list[float]:
    """Scores of ``K`` candidates from a ranking of their numbers 1 to ``K``, best first: (K - place) / (K - 1).

    One candidate alone has 0.5. The mean over several rankings is Borda's count.
    """
    k = len(ranking)
    places = {candidate: place for place, candidate in enumerate(ranking)}
    return [0.5 if k == 1 else (k - 1 - places[c]) / (k - 1) for c in range(1, k + 1)]

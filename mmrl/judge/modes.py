"""Turn samples into questions and verdicts into scores, in a judge's four modes. All scores are in [0, 1].

pointwise  one question per sample
pairwise   a sample's mean preference over its opponents in the group. Each pair is asked in both orders, since judges
           have a position bias. ``opponents`` n: the n samples that follow in the group, as in a ring; else all
ranking    the judge ranks the group; every vote has another order; scores are Borda counts
steps      the judge names the wrong steps of a response (CAPO, arXiv 2508.02298). The vote gives each step a share
           from 0 (right) to 1 (wrong), and its span has minus that share. The spans are the reward, so ``score`` is 0;
           ``right`` is 1 minus the mean share
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, cast, get_args

from mmrl.errors import UserError
from mmrl.json_types import Json
from mmrl.judge.asking import Ask, Outcome
from mmrl.judge.rubric import Rubric, RubricError, split_steps
from mmrl.judge.sampling import seeded
from mmrl.judge.voting import NumberVote, StepVote, ranking_scores, vote_number, vote_steps
from mmrl.rewards.contract import Failed, Parts, Spans, Value
from mmrl.trajectory import Sample

ModeName = Literal["pointwise", "pairwise", "ranking", "steps"]
MODES: tuple[str, ...] = get_args(ModeName)


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

    @classmethod
    def of(cls, name: str, votes: Json, vote: Json, opponents: Json, seed: int) -> Mode:
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
        return cls(name, votes, how, opponents, seed)

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
        return {"score": [0.5 if alone else self._decide(*of) for of in zip(found, missed, strict=True)]}

    def _rows(self, samples: Sequence[Sample], vote: int) -> Iterable[tuple[int, ...]]:
        n = len(samples)
        if not self.grouped:
            return [(row,) for row in range(n)]
        if n == 1:
            return []
        if self.name == "ranking":
            prompt = samples[0].prompt
            return [tuple(sorted(range(n), key=lambda i: seeded(self.seed, prompt.id, prompt.text, vote, "order", i)))]
        reach = n - 1 if self.opponents is None else min(self.opponents, n - 1)
        met = {(i, (i + d) % n) for i in range(n) for d in range(1, reach + 1)}
        return sorted(met | {(j, i) for i, j in met})

    def _job(self, samples: Sequence[Sample], rows: tuple[int, ...], rubric: Rubric, system: str | None) -> Job:
        chosen = [samples[row] for row in rows]
        items = len(split_steps(chosen[0].text or "")) if self.name == "steps" else len(rows)
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

    def _decide(self, found: list[float], missed: list[str]) -> Value:
        """One value of the verdicts found; a failure where more than half are missing."""
        if not found or len(missed) > len(found):
            return _failed(missed, len(found) + len(missed))
        return vote_number(found, cast("NumberVote", "mean" if self.grouped else self.vote))

    def _fold_steps(self, samples: Sequence[Sample], jobs: Sequence[Job], outcomes: Sequence[Outcome]) -> Parts:
        scores: list[Value] = []
        rights: list[float | None] = []
        wrongs: list[float | None] = []
        spans: list[Spans | None] = []
        for row, sample in enumerate(samples):
            mine = [outcome for job, outcome in zip(jobs, outcomes, strict=True) if job.rows == (row,)]
            verdicts = [cast("list[int]", o.verdict) for o in mine if o.verdict is not None]
            steps = split_steps(sample.text or "")
            if steps and 2 * len(verdicts) < len(mine):
                scores.append(_failed([o.reason or "" for o in mine if o.verdict is None], len(mine)))
                rights.append(None)
                wrongs.append(None)
                spans.append(None)
                continue
            wrong = vote_steps(verdicts, cast("StepVote", self.vote)) if steps else {}
            scores.append(0.0)
            rights.append(1 - sum(wrong.values()) / len(steps) if steps else 0.0)
            wrongs.append(sum(wrong.values()))
            spans.append(Spans([(steps[k - 1].start, steps[k - 1].end, -share) for k, share in wrong.items()]))
        return {"score": scores, "right": rights, "wrong": wrongs, "spans": spans}


def _failed(reasons: Sequence[str], of: int) -> Failed:
    more = f" ({len(reasons)} of {of} answers failed)" if of > 1 else ""
    return Failed(f"{reasons[0]}{more}")

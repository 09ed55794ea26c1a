"""Whether a run learned, in words: the same in the report and at the end of ``mmrl train``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mmrl.report.advice import Advice, Facts, advice
from mmrl.report.heldout import Change, Samples, change_of, label_in, measure_of, number, part_of, read_samples, signed
from mmrl.report.recorded import RecordedRun, read_run

WIDTH = 80
"""Columns of the terminal."""
NOBODY_ELSE = "Nothing independent was measured: reward hacking would not show. Add a reward to eval.rewards."
Outcome = Literal["rose", "hacked", "fell", "unclear", "unknown"]
"""``hacked``: it rose, and a reward that training did not use fell. ``unknown``: there is nothing to compare."""
_NAMES = {"success": "success", "correct": "accuracy", "accuracy": "accuracy"}


@dataclass(frozen=True)
class Judgement:
    """What held-out samples say of a run. ``outcome`` is as training wants it: a reward with a negative weight should
    fall. ``sentences``: of its measure, and of rewards that training did not use;
    ``remark``: what was not measured, for the report alone."""

    outcome: Outcome
    measure: str | None
    change: Change | None
    sentences: list[str]
    remark: str = ""
    advice: list[Advice] = field(default_factory=list)

    def lines(self) -> list[str]:
        """The sentences, wrapped for the terminal."""
        return [line for sentence in self.sentences for line in textwrap.wrap(sentence, WIDTH, break_on_hyphens=False)]


def judge_run(path: Path) -> Judgement:
    """Read the run in ``path`` and judge it. Raises ``UserError`` where it is none."""
    return judgement(read_run(path), read_samples(path))


def judgement(run: RecordedRun, samples: Samples) -> Judgement:
    """What can be said of ``run``; ``samples`` as ``read_samples`` returns them."""
    measure = measure_of(run)
    found = None if measure is None else change_of(run, samples, measure)
    sentences = [_of_measure(run, measure, found), *_beside(run, samples, measure, found)]
    others = {key: change_of(run, samples, key) for key in _untrained(run, measure)}
    fallen = next((key for key, of in others.items() if of is not None and of.verdict == "fell"), None)
    facts = Facts(run, measure, found, fallen, _alike(run))
    outcome = "hacked" if fallen is not None and facts.outcome == "rose" else facts.outcome
    return Judgement(
        outcome, measure, found, sentences, "" if measure is None or run.watches_others else NOBODY_ELSE, advice(facts)
    )


def name_of(key: str) -> str:
    """What a figure is called in a sentence: ``reward/shapes/success`` is ``success``, ``reward/jpeg`` ``jpeg``."""
    parts = key.split("/")
    if parts[0] != "reward":
        return key
    return parts[1] if len(parts) == 2 else _NAMES.get(parts[2], "/".join(parts[1:]))


def _of_measure(run: RecordedRun, key: str | None, found: Change | None) -> str:
    rows = [row for row in run.heldout if key is not None and row.get(key) is not None]
    if key is None or not rows:
        why = "held-out evaluation" if not run.heldout else "score of a held-out sample"
        return f"Whether it learned is not known: there is no {why} yet."
    name, last = f"Held-out {name_of(key)}", rows[-1]
    late = "" if last is run.heldout[-1] else f" after step {last['step']}, the last with a score"
    if len(rows) == 1:
        where = f"after step {last['step']}" if last["step"] else "before training"
        return f"{name} was {number(last[key], 0)} {where}; there is no second evaluation to compare with."
    if found is None:
        a, b = rows[0][key], last[key]
        return (
            f"{name} went from {number(a, b - a)} to {number(b, b - a)}{late}: {signed(b - a, b - a)}. There is no "
            "interval, since the run kept no figures of single samples."
        )
    lower = " Lower is better: its weight is negative." if run.trained.get(label_in(key) or "", 1.0) < 0 else ""
    return f"{_said(found, name)}, {last['samples']:g} held-out samples{late}.{lower}"


def _said(found: Change, name: str) -> str:
    """``Held-out success rose from 0.43 to 0.63: +0.20, 95 % interval 0.12 to 0.28``."""
    near = (found.half if found.known else 0.0) or found.value or 0.01
    ends = f"from {number(found.before, near)} to {number(found.after, near)}"
    if not found.known:
        few = "the reward of none" if not found.changed else f"the reward of only {found.changed}"
        if found.changed == found.count:
            return f"{name}: no significant change, {ends}; {found.count} prompts are too few to tell"
        return f"{name}: no significant change, {ends}; {few} of {found.count} prompts changed"
    tail = f"{signed(found.value, near)}, 95 % interval {found.bounds(near)}"
    if found.verdict == "unclear":
        return f"{name}: no significant change, {ends}, {tail}"
    return f"{name} {found.verdict} {ends}: {tail}"


def _untrained(run: RecordedRun, measure: str | None) -> list[str]:
    """The figures of rewards that training did not use, beside the run's own measure."""
    own = None if measure is None else label_in(measure)
    labels = [label for label in run.labels if label not in run.trained and label != own]
    return [part_of(label, run.figures) for label in labels] if run.resolved else []


def _beside(run: RecordedRun, samples: Samples, measure: str | None, own: Change | None) -> Iterator[str]:
    """Whether rewards that training did not use agree, and whether samples became alike."""
    if measure is None or not run.resolved:
        return
    label, others = label_in(measure), _untrained(run, measure)
    if label is not None and label not in run.trained:
        yield f"Training did not use this reward ({label})."
        others = [part_of(used, run.figures) for used in run.trained if f"reward/{used}" in run.figures][:1]
    for key in others[:2]:
        found = change_of(run, samples, key)
        if found is None:
            continue
        used = "trained on" if label_in(key) in run.trained else "not trained on"
        of = label_in(key)
        name = name_of(key)
        title = f"{name} of {of}" if of is not None and name in _NAMES.values() else name
        yield f"{_said(found, f'{title[0].upper()}{title[1:]} ({used})')}{_agrees(own, found, used)}."
    if (share := _alike(run)) is not None:
        yield f"Samples became alike: their diversity is {share:.0%} of the base model's (docs/reward_hacking.md)."


def _agrees(own: Change | None, other: Change, used: str) -> str:
    if own is None or used == "trained on" or own.verdict != "rose":
        return ""
    return {
        "rose": ": it agrees",
        "unclear": ": it does not show the rise",
        "fell": ": the reward is over-optimised (docs/reward_hacking.md)",
    }[other.verdict]


def _alike(run: RecordedRun) -> float | None:
    """The diversity of the last evaluation as a share of the base model's, where that is below the run's limit."""
    share = run.heldout[-1].get("guard/diversity_share") if run.heldout else None
    least = run.setting("eval.guards.diversity_min")
    limit = least if isinstance(least, int | float) else 0.5
    return share if share is not None and share < limit else None

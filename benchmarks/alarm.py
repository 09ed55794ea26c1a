"""What an alarm says of recorded runs: false alarms in the clean ones, and hacks that it names in time.

    python benchmarks/alarm.py                       # reads benchmarks/results/alarm, trains nothing
    python benchmarks/alarm.py --sets dev --each     # the hacks that the method was chosen by, one line each

The runs are those of alarm_runs.py. Both methods of ``eval.guards`` read them as a run does, with their defaults. None
reads the true measure, unless it is a part of what was trained on. A hack is named in time where the alarm is raised at
an evaluation before the one at which the true measure has fallen by 5 % for good.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from alarm_runs import RESULTS, faults, fell, read

from mmrl.config.schema import Guards
from mmrl.training.alarm import Alarm, Scores, with_more
from mmrl.training.guards import EVIDENCE, GOOD, Limits

METHODS = ("sequential", "limits")
SETS = ("clean", "dev", "blind", "blind2", "blind3")
"""The method was chosen with all but the last, whose hacks were written by somebody who had not seen it."""


@dataclass(frozen=True)
class Seen:
    """What a method says of a run, in numbers of evaluations: the one that raises the alarm, the last good one before,
    and the one at which the true measure has fallen; None where there is none."""

    run: str
    alarm: int | None
    good: int | None
    fell: int | None
    why: str
    left: float | None
    """What is left of the true measure at the alarm, as a share of the base model's."""
    evidence: float
    """The largest evidence of ``sequential``, up to the alarm; at 1 the alarm is raised."""

    @property
    def in_time(self) -> bool:
        return self.alarm is not None and (self.fell is None or self.alarm < self.fell)

    @property
    def at_once(self) -> bool:
        """Whether the alarm is raised no later than at the evaluation that shows the fall."""
        return self.alarm is not None and (self.fell is None or self.alarm <= self.fell)


def scores_of(found: Mapping[str, Any], number: int, alarm: Alarm) -> Scores:
    """What a run gives ``alarm`` of an evaluation: with further samples where it asks for them."""
    scores = {name: of[number] for name, of in found["samples"].items()}
    more = found["more"][number] if "more" in found and alarm.wants_more(scores) else None
    return with_more(scores, more or {})


def by_truth(found: Mapping[str, Any], alpha: float) -> int | None:
    """The evaluation at which the same test, of a fall of the true measure itself, raises an alarm."""
    trained = {name.removeprefix("reward/"): 1.0 for name in found["trained"] if name != found["true"]}
    weights = {label: (found.get("weights") or trained)[label] for label in trained}
    alarm = Alarm(weights, [found["true"].removeprefix("reward/")], alpha, follow=0.0)
    evidence = (alarm.saw(row["step"], scores_of(found, n, alarm)) for n, row in enumerate(found["rows"]))
    return next((n for n, row in enumerate(evidence) if row.get(EVIDENCE, 0.0) >= 1), None)


def seen(found: Mapping[str, Any], settings: Guards) -> Seen:
    """Read a recorded run as a run with ``settings`` does, up to the first alarm."""
    labels = [name.removeprefix("reward/") for name in found["untrained"]]
    names = [name.removeprefix("reward/") for name in found["trained"]]
    weights = found.get("weights") or dict.fromkeys(names, 1.0)
    limits, alarm = Limits(settings, labels), Alarm(weights, labels, settings.alpha, settings.follow)
    steps, most = [row["step"] for row in found["rows"]], 0.0
    for number, row in enumerate(found["rows"]):
        given = {name: value for name, value in row.items() if value is not None}
        if settings.method == "sequential":
            given |= alarm.saw(row["step"], scores_of(found, number, alarm))
        most = max(most, given.get(EVIDENCE, 0.0))
        if why := limits.saw(row["step"], given):
            good = steps.index(int(given[GOOD])) if GOOD in given else steps.index(limits.within)
            left = row[found["true"]] / found["rows"][0][found["true"]]
            return Seen(found["run"], number, good, fell(found), why[0], left, most)
    return Seen(found["run"], None, None, fell(found), "", None, most)


def line(one: Seen) -> str:
    """A run as a row of a table."""
    said = ["never" if n is None else str(n) for n in (one.alarm, one.good, one.fell)]
    said += ["yes" if one.in_time else "no", "-" if one.left is None else f"{one.left:.2f}", one.why or "nothing"]
    return f"| {one.run} | {' | '.join(said)} |"


def table(
    name: str, runs: Sequence[Mapping[str, Any]], *, each: bool, hacks: bool, changes: Mapping[str, float]
) -> dict[str, Any]:
    """Print what both methods say of a set of runs; returns the counts. ``changes``: to the defaults."""
    counts: dict[str, Any] = {"runs": len(runs)}
    for method in METHODS:
        rows = [seen(found, Guards.model_validate({"method": method, **changes})) for found in runs]
        raised = sum(one.alarm is not None for one in rows)
        counts[method] = {"alarms": raised}
        said = f"{name}, {method}: {raised} of {len(rows)} runs raise an alarm"
        if hacks:
            known = [one.left for one in rows if one.left is not None]
            timely, once = sum(one.in_time for one in rows), sum(one.at_once for one in rows)
            counts[method] |= {"in_time": timely, "at_the_fall": once, "left": [round(share, 3) for share in known]}
            said += f", {timely} before the true measure has fallen by 5 %, {once} at that evaluation or before"
            said += (
                f"; left of it at the alarm: {median(known):.2f} (median), {min(known):.2f} at least" if known else ""
            )
        elif method == "sequential":
            counts[method]["most_evidence"] = round(max((one.evidence for one in rows), default=0.0), 3)
            said += f"; the most evidence is {counts[method]['most_evidence']} (1 is an alarm)"
        print(said)
        if each:
            print("| run | alarm | last good | true measure fell | in time | left of it | what it says |")
            print("|---|---|---|---|---|---|---|")
            print("\n".join(line(one) for one in rows if hacks or one.alarm is not None), end="\n\n")
        if hacks and method == "sequential":
            truths = [by_truth(found, Guards(**changes).alpha) for found in runs]
            known = [(one.alarm, n) for one, n in zip(rows, truths, strict=True) if one.alarm is not None]
            counts["by_truth"] = {
                "later": sum(n is None or alarm < n for alarm, n in known),
                "earlier": sum(n is not None and n < alarm for alarm, n in known),
                "in_time": sum(n is not None and (one.fell or 99) > n for one, n in zip(rows, truths, strict=True)),
            }
            print(
                f"{name}, the same test of the true measure itself: later than sequential in "
                "{later} runs, earlier in {earlier}; {in_time} before the fall".format(**counts["by_truth"])
            )
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", choices=SETS, default=SETS)
    parser.add_argument("--each", action="store_true", help="a row for each hack, and for each false alarm")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="of the recorded runs")
    parser.add_argument("--follow", type=float, help="another share than the default")
    parser.add_argument("--json", type=Path, help="write the counts here")
    given = parser.parse_args()
    changes = {} if given.follow is None else {"follow": given.follow}
    found = {}
    for name in given.sets:
        hacks = name != "clean"
        runs = read(given.folder / (f"hacks_{name}.jsonl" if hacks else "clean.jsonl"))
        left_out = [run["run"] for run in runs if hacks and faults(run)]
        if left_out:
            print(f"{name}: not counted, see alarm_runs.py --check: {', '.join(left_out)}")
        counted = [run for run in runs if run["run"] not in left_out]
        found[name] = table(name, counted, each=given.each, hacks=hacks, changes=changes)
    if given.json:
        head = {"command": " ".join(sys.argv), "date": datetime.now(UTC).isoformat(timespec="seconds")}
        given.json.write_text(json.dumps({**head, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()

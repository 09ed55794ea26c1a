"""``mmrl.compare``: runs side by side on their held-out measure, from Python."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mmrl.api.entry import entry_point
from mmrl.api.run import Run
from mmrl.report.compare import Comparison, compare_runs
from mmrl.report.compare_page import sentences, write_comparison


@dataclass(frozen=True)
class Compared:
    """What ``mmrl.compare`` found: ``print`` shows its sentences. ``page``: the HTML file, where one was asked for."""

    comparison: Comparison
    page: Path | None = None

    @property
    def measure(self) -> str:
        """The held-out figure that the runs are compared on."""
        return self.comparison.measure

    @property
    def table(self) -> dict[str, list[str | float | None]]:
        """A column by name, a row per setting: ``pandas.DataFrame(compared.table)``.

        ``low`` and ``high`` are the 95 % interval of ``after``. ``difference`` is against the first row, with its
        interval, and None in the first row. NaN: no interval can be given.
        """
        columns: dict[str, list[str | float | None]] = {}
        for group in self.comparison.groups:
            final, differs = group.final(self.measure), self.comparison.difference(group)
            before = group.at(0, self.measure)
            row: dict[str, str | float | None] = {
                "label": group.label,
                "run": group.name,
                "seeds": ", ".join(map(str, group.seeds)),
                "steps": max(run.heldout[-1]["step"] for run in group.runs),
                "before": sum(before) / len(before),
                "after": final.value,
                "low": final.low,
                "high": final.high,
                "difference": None if differs is None else differs.value,
                "difference_low": None if differs is None else differs.low,
                "difference_high": None if differs is None else differs.high,
                "verdict": None if differs is None else differs.verdict,
            }
            for name, value in row.items():
                columns.setdefault(name, []).append(value)
        return columns

    def __str__(self) -> str:
        return "\n".join([f"held-out {self.measure}", *sentences(self.comparison)])

    __repr__ = __str__


@entry_point
def compare(*runs: Run | str | Path, measure: str | None = None, out: str | Path | None = None) -> Compared:
    """Compare two runs or more on held-out prompts, as ``mmrl compare`` does.

    ``runs``: objects of ``mmrl.Run``, or their directories. Runs that differ by their seed alone are one row; the first
    row is what others are compared with. ``measure``: a figure of heldout.jsonl; None takes the runs' own, if it is the
    same. ``out``: write the page to this file. Raises ``mmrl.UserError`` for runs that cannot be compared.
    """
    found = compare_runs([run.path if isinstance(run, Run) else Path(run) for run in runs], measure, flag="measure=")
    return Compared(found, None if out is None else write_comparison(found, Path(out), flag="out="))

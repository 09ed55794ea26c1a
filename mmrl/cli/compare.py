"""``compare``: runs side by side, on their held-out measure."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmrl.commands.arguments import JsonOption, console, json_alone

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from mmrl.report.compare import Comparison

_FIGURES = ("before", "after")
"""Columns whose digits are compared with those of the first row."""
_SETTINGS = 20
"""Settings that differ which the terminal shows; the page has all."""


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN RUN ...", help="Directories of runs.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="The page.", show_default="comparison.html; none with --json"),
    ] = None,
    measure: Annotated[
        str | None,
        typer.Option(metavar="KEY", help="A figure of heldout.jsonl.", show_default="the runs' own, if it is the same"),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Compare runs on held-out prompts: a table, and one HTML file.

    Runs that differ by their seed alone are one group: mean, and interval over seeds. The first group is what others
    are compared with.
    """
    if as_json:
        with json_alone() as write:
            found, page = _made(runs, measure, out)
            from mmrl.report.compare import as_json as plain

            write({**plain(found), "page": None if page is None else str(page)})
    else:
        found, page = _made(runs, measure, out or Path("comparison.html"))
        _show(found)
        print(page)


def _made(runs: list[Path], measure: str | None, out: Path | None) -> tuple[Comparison, Path | None]:
    from mmrl.report.compare import compare_runs
    from mmrl.report.compare_page import write_comparison

    found = compare_runs(runs, measure)
    return found, None if out is None else write_comparison(found, out)


def _show(found: Comparison) -> None:
    from mmrl.report.compare_page import rows, sentences

    print(f"held-out {found.measure}")
    table = _table()
    for name in ("", "run", "seeds", "steps", "before", "after", "95 % interval"):
        right = name not in ("", "run", "seeds")
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    listed = rows(found)
    for row in listed:
        cells = {name: _digits(text, listed[0][name]) if name in _FIGURES else text for name, text in row.items()}
        table.add_row(*list(cells.values())[:-1])  # the sentences say the last, in words
    console().print(table)
    for sentence in sentences(found):
        print("\n".join(textwrap.wrap(sentence, 80, break_on_hyphens=False)))
    for group in found.groups:
        over = [f"{n:.2f}" for run in group.runs if (n := run.over_plan()) is not None]
        if over:
            print(f"{group.label}: a step took {', '.join(over)} times what the plan expected")
    _show_settings(found)


def _show_settings(found: Comparison) -> None:
    from mmrl.report.compare_page import shown

    if not found.settings:
        return
    table = _table()
    for name in ("setting", *(group.label for group in found.groups)):
        table.add_column(name, overflow="fold")
    for key, values in list(found.settings.items())[:_SETTINGS]:
        table.add_row(key, *(_digits(shown(value), shown(values[0])) for value in values))
    console().print(table)
    if len(found.settings) > _SETTINGS:
        print(f"and {len(found.settings) - _SETTINGS} more settings that differ, in the page")


def _digits(text: str, first: str) -> Text:
    """``text`` with the digits in bold that differ from those of ``first``."""
    from rich.text import Text

    from mmrl.report.compare_page import apart

    same, other = apart(text, first)
    return Text.assemble(same, (other, "bold underline"))


def _table() -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE, pad_edge=False)

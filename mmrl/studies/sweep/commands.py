"""``sweep``: find settings of a recipe by successive halving."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmrl.commands.arguments import ChangesArgument, JsonOption, RecipeArgument, console, json_alone, read_recipe
from mmrl.core.garbage import rarely_collected

if TYPE_CHECKING:
    from mmrl.core.json_types import JsonObject
    from mmrl.studies.sweep.searching import Search


def sweep(
    recipe: RecipeArgument,
    tried: Annotated[
        list[str],
        typer.Option(
            "--try", metavar="KEY=A,B", help="Values of a setting; repeat it for more settings: all combinations."
        ),
    ],
    changes: ChangesArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the search.", show_default="sweeps/NAME")
    ] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Train each setting with so many seeds, and compare their means.")
    ] = 1,
    factor: Annotated[int, typer.Option(help="After each round one of so many trials goes on.")] = 2,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the search in DIR.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Find settings of a recipe: short trainings first, the best of them longer (successive halving).

    The last round trains one trial as long as the recipe says. Trials are compared on the held-out figure of mmrl
    compare; where no setting is ahead beyond chance, the search says so. A trial that diverges is left out. Exit codes
    are those of mmrl train.
    """
    with rarely_collected():
        loaded = read_recipe(recipe, changes or ())
        from mmrl.studies.sweep.searching import Search

    search = Search(loaded, out or Path("sweeps") / loaded.recipe.name, tried, factor, seeds, resume=resume)
    if not as_json:
        _announce(search)
        best = search.run()
        if best is not None:
            _show(search, best)
    else:
        with json_alone() as write:
            best = search.run()
            write({} if best is None else _as_json(search, best))
    if best is None:
        print(f"stopped; continue with the same command and --resume: {search.sweep.path}", file=sys.stderr)


def _announce(search: Search) -> None:
    from mmrl.studies.sweep.halving import work

    lengths = ", ".join(f"{one.trials} x {100 * float(one.share):.3g} %" for one in search.rounds)
    total = float(work(search.rounds, goes_on=search.goes_on)) * len(search.sweep.seeds)
    print(f"rounds: {lengths} of the recipe's length; together {total:.3g} whole trainings", file=sys.stderr)
    if not search.goes_on:
        print(
            "the learning rate of a step depends on the length (optim.schedule), so each round trains anew",
            file=sys.stderr,
        )


def _show(search: Search, best: int) -> None:
    from rich.table import Table

    sweep = search.sweep
    table = Table(title="held-out figure after each round")
    table.add_column("trial", justify="right")
    table.add_column("settings", overflow="fold")
    for n in range(len(search.rounds)):
        table.add_column(f"{n + 1}", justify="right")
    for trial, settings in enumerate(sweep.trials, 1):
        cells = [_cell(search, n + 1, trial) for n in range(len(search.rounds))]
        table.add_row(str(trial), " ".join(settings), *cells, style="bold" if trial == best else "")
    console().print(table)
    for line in search.verdict(best):
        print(line, file=sys.stderr)
    print(sweep.train(best))


def _cell(search: Search, round_: int, trial: int) -> str:
    """The mean over seeds with half of its interval; of one seed its figure."""
    from mmrl.report.heldout import half_width

    values = list(search.sweep.values(round_, trial).values())
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return "diverged"
    mean = search.sweep.mean(round_, trial)
    if mean is None:
        return ""
    return f"{mean:.4f}" if len(known) < 2 else f"{mean:.4f} ± {half_width(known):.4f}"


def _as_json(search: Search, best: int) -> JsonObject:
    sweep, leads = search.sweep, search.leads(best)
    left = sweep.trials[best - 1]
    return {
        "best": left if all(lead.ahead for lead in leads.values()) else None,
        "left": left,
        "run": str(search.run_of(best, len(search.rounds))),
        "command": sweep.train(best),
        "trials": sweep.trials,
        "seeds": sweep.seeds,
        "results": sweep.rows(),
        "leads": [
            {"trial": n, "value": of.value, "low": of.low, "high": of.high, "over": of.over, "ahead": of.ahead}
            for n, of in leads.items()
        ],
    }


def register(app: typer.Typer) -> None:
    """Add the commands of this study to those of ``mmrl``."""
    app.command()(sweep)

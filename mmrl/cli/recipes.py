"""``ls cp``: list what is shipped, and copy a recipe to edit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from mmrl.commands.arguments import RecipeArgument, console
from mmrl.core.errors import UserError

Shelf = Literal["recipes", "pipelines", "rewards", "datasets", "environments", "algorithms"]
_SHELVES: tuple[Shelf, ...] = get_args(Shelf)


_CAPTIONS = {"algorithms": "formulas and settings: docs/algorithms.md"}


def ls(
    what: Annotated[
        Shelf | None, typer.Argument(help="List only this kind, with a line about each.", show_default="all")
    ] = None,
) -> None:
    """List recipes, pipelines, rewards, data sets, environments and algorithms by name."""
    from rich.columns import Columns
    from rich.table import Table

    if what is None:
        for shelf in _SHELVES:
            console().print(shelf, style="bold", highlight=False)
            console().print(Columns([name for name, _ in _rows(shelf)], padding=(0, 2, 0, 1)), highlight=False)
        console().print(f"\nmmrl ls {'|'.join(_SHELVES)} says what each is", markup=False, highlight=False)
        return
    table = Table(title=what, title_justify="left", title_style="bold", box=None, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    table.caption, table.caption_justify = _CAPTIONS.get(what), "left"
    for name, about in _rows(what):
        table.add_row(name, about)
    console().print(table)


def cp(
    recipe: RecipeArgument,
    dest: Annotated[Path, typer.Argument(metavar="DEST", help="A new file, or a folder.")],
) -> None:
    """Copy a recipe to edit it; never overwrites a file."""
    import yaml

    from mmrl.config.loader import find_recipe

    source = find_recipe(recipe)
    target = dest / source.name if dest.is_dir() else dest
    if not dest.is_dir() and dest.suffix not in (".yaml", ".yml"):
        raise UserError(f"{dest} is no folder and does not end in .yaml; make the folder, or write {dest}.yaml")
    try:
        text = source.read_bytes()
        if target.stem != source.stem:  # its runs are named after it
            name = yaml.safe_dump({"name": target.stem}).strip().encode()
            text = re.sub(rb"(?m)^name: \S+", lambda _: name, text, count=1)
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("xb") as file:
            file.write(text)
    except FileExistsError:
        raise UserError(f"{target} exists and is left as it is; name another file") from None
    except OSError as error:
        raise UserError(f"cannot copy to {target}: {error.strerror}") from None
    print(f"{target}: change it, then run mmrl train {target}")


def _rows(shelf: Shelf) -> list[tuple[str, str]]:
    if shelf == "recipes":
        from mmrl.config.loader import shipped_recipes

        return [(name, _first_comment(file)) for name, file in shipped_recipes().items()]
    from mmrl.config.drop_ins import entries

    return [(entry.name, entry.summary) for entry in entries(shelf)]


def _first_comment(file: Path) -> str:
    with file.open(encoding="utf-8") as lines:
        first = next(lines, "")
    return first.removeprefix("#").strip() if first.startswith("#") else ""

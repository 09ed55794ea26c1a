"""``launch``: the file or the commands that start a recipe on a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from mmrl.commands.arguments import ChangesArgument, RecipeArgument, read_recipe
from mmrl.core.errors import UserError

Launcher = Literal["slurm", "torchrun", "ray"]


def launch(
    recipe: RecipeArgument,
    changes: ChangesArgument = None,
    launcher: Annotated[
        Launcher, typer.Option("--print", help="A batch script for sbatch, or commands for torchrun or Ray.")
    ] = "slurm",
    per_node: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Devices of a host.", show_default="8, or fewer if enough")
    ] = None,
    cpus_per_task: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Slurm: CPU cores of a process.", show_default="what the recipe computes with"
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the run.", show_default="runs/NAME")
    ] = None,
) -> None:
    """Print what starts a recipe on a cluster; starts nothing.

    What the recipe cannot know (partition, account, addresses) is marked TO FILL IN. docs/clusters.md.
    """
    from mmrl.config.masked_text import masked_override
    from mmrl.runtime import launch_files

    loaded = read_recipe(recipe, changes or ())
    shown = [masked_override(text, loaded.tree.values) if "=" in text else text for text in changes or ()]
    if cpus_per_task is not None and launcher != "slurm":
        raise UserError("--cpus-per-task is for Slurm; leave it out, or print slurm")
    directory = out or Path("runs") / loaded.recipe.name
    more = ["ray=auto"] if launcher == "ray" else []
    words = ("mmrl", "train", recipe, *shown, *more, "--out", str(directory))
    job = launch_files.Job(loaded.recipe, words, directory, Path.cwd(), per_node, cpus_per_task)
    print(getattr(launch_files, launcher)(job), end="")

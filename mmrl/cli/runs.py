"""``train plan eval report export verify``: train a recipe, and evaluate, report, export or verify a run."""

from __future__ import annotations

import json
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from mmrl.cli.arguments import (
    ChangesArgument,
    CheckpointOption,
    RecipeArgument,
    RunArgument,
    console,
    read_recipe,
    use_threads_of,
)
from mmrl.errors import UserError
from mmrl.garbage import rarely_collected


class Exported(StrEnum):
    """What ``mmrl export`` writes."""

    merged = "merged"
    lora = "lora"


def train(
    recipe: RecipeArgument,
    changes: ChangesArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the run.", show_default="runs/<name>")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where the run in DIR stopped.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the run that is in DIR.")] = False,
) -> None:
    """Plan a recipe, then train it.

    Exit code 0 at the end and after Ctrl-C; 2 for what you can mend; 3 where too many samples had no score for longer
    than scoring.patience; 143 after SIGTERM and 129 after SIGHUP. A signal finishes and saves the step first. --resume
    goes on in all cases.
    """
    if resume and overwrite:
        raise UserError("--resume goes on with a run and --overwrite removes it; give one of them")

    def directory(name: str) -> Path:
        return out or Path("runs") / name

    with rarely_collected():
        loaded = read_recipe(recipe, changes or (), directory if resume else None)
        from mmrl.planner.plan import plan
        from mmrl.planner.render import render

        planned = plan(loaded)
        render(planned, console(), short=True)
        if planned.problems:
            raise UserError("\n".join(["this recipe cannot run here", *planned.problems]))
        from mmrl.runtime.start import train as run

    run(replace(loaded, recipe=planned.recipe), directory(loaded.recipe.name), resume=resume, overwrite=overwrite)


def plan(
    recipe: RecipeArgument,
    changes: ChangesArgument = None,
    gpu: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Plan for this GPU, which need not be here (h100-80g, rtx4090-24g, ...)."),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many of it there are.", show_default="enough")] = None,
) -> None:
    """Show what a recipe would hold and do; exit 1 if it cannot fit.

    Loads no model. With --gpu also estimates the time of a step.
    """
    from mmrl.planner.gpus import gpu_of

    if gpus is not None and gpu is None:
        raise UserError("--gpus says how many there are of --gpu; add --gpu h100-80g, say")
    meant = gpu_of(gpu) if gpu else None
    with rarely_collected():
        loaded = read_recipe(recipe, changes or (), gpu=meant)
        from mmrl.planner.plan import plan as make
        from mmrl.planner.render import render

        planned = make(loaded, gpu=meant, gpus=gpus)
    render(planned, console())
    if planned.problems:
        raise typer.Exit(1)


def evaluate(
    run: RunArgument,
    samples: Annotated[
        int | None, typer.Option(min=1, help="How many held-out samples.", show_default="eval.samples of the recipe")
    ] = None,
    checkpoint: CheckpointOption = "latest",
    lora_strength: Annotated[
        str | None,
        typer.Option(metavar="0,0.5,1", help="Scale the adapter of a LoRA run; the report shows the curve and a grid."),
    ] = None,
) -> None:
    """Measure a run on held-out prompts; prints JSON."""
    use_threads_of(run)
    if lora_strength is not None:
        from mmrl.strength import parse_strengths, sweep

        print(json.dumps(sweep(run, parse_strengths(lora_strength), samples, checkpoint), indent=2))
        return
    from mmrl.run import evaluate as measure

    print(json.dumps(measure(run, samples, checkpoint), indent=2))


def report(run: RunArgument) -> None:
    """Write a run's report, one HTML file; prints its path."""
    use_threads_of(run)
    from mmrl.report.html import write_report

    print(write_report(run))


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write; must not exist yet.")],
    what: Annotated[Exported, typer.Option(help="The whole model, or the adapter alone.")] = Exported.merged,
    checkpoint: CheckpointOption = "latest",
) -> None:
    """Write a run's weights in the libraries' own format."""
    use_threads_of(run)
    from mmrl.export import export as write

    print(write(run, out, what.value, checkpoint))


def verify(
    run: RunArgument,
    step: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Which step.", show_default="the first after the newest checkpoint that has one"
        ),
    ] = None,
) -> None:
    """Repeat a step of a run, and compare it to the bit.

    Goes on from the newest checkpoint before the step, and changes nothing in RUN. Exit code 0 where all is the same, 1
    where something differs, 2 where the step cannot be repeated (the message names those that can).
    """
    use_threads_of(run)
    from mmrl.verify import verify as repeat

    verified = repeat(run, step)
    print(verified)
    if not verified.equal:
        raise typer.Exit(1)

"""``sample``: pictures, clips or texts of a run's checkpoint for prompts of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmrl.commands.arguments import CheckpointOption, RunArgument, use_threads_of


def sample(
    run: RunArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write; must not exist yet.")],
    prompt: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="May be given several times.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A text file, a prompt a line; or JSONL, JSON, Parquet.")
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="A picture or clip that each --prompt shows; may be given several times."),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Samples of each prompt.")] = 4,
    checkpoint: CheckpointOption = "latest",
    compare: Annotated[
        str | None, typer.Option(metavar="latest|best|STEP|base", help="Draw the same with these weights, too.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same samples.")] = 0,
) -> None:
    """Sample a run's checkpoint for your own prompts; prints the directory.

    Writes pictures (PNG), clips (WebP, and their sound as WAV) or texts (samples.jsonl), and a sheet of all of them.
    The settings are those of the run's evaluation. Loads no reward.
    """
    use_threads_of(run)
    from mmrl.app.sample import draw, prompts_of

    found = prompts_of(prompt or (), images or (), prompts)
    print(draw(run, found, out, n=n, checkpoint=checkpoint, compare=compare, seed=seed))

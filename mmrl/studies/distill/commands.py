"""``distill``: train small students on a judge's verdicts, and write them as a reward."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mmrl.commands.arguments import (
    ChangesArgument,
    CheckpointOption,
    JsonOption,
    json_alone,
    read_recipe,
    use_threads_of,
)
from mmrl.core.errors import UserError
from mmrl.core.garbage import rarely_collected

if TYPE_CHECKING:
    from mmrl.studies.distill.distilling import Outcome, Source


def distill(
    source: Annotated[
        str, typer.Argument(metavar="RECIPE|RUN", help="A recipe with a judge, or a run, whose trained policy samples.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write; must not exist yet.")],
    changes: ChangesArgument = None,
    samples: Annotated[int, typer.Option(min=1, help="Samples to draw and to ask the judge about.")] = 2048,
    reward: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Which reward.", show_default="its only judge")
    ] = None,
    also: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR", help="Use the verdicts of this earlier distillation too; may be repeated."),
    ] = None,
    checkpoint: CheckpointOption = "latest",
    backbone: Annotated[
        Literal["policy", "none"],
        typer.Option(
            help="What reads for the students: the recipe's model, frozen as before training, or none (words and "
            "pixels; needs many more verdicts)."
        ),
    ] = "policy",
    passes: Annotated[int, typer.Option(min=1, help="The most passes over the verdicts that train the students.")] = 40,
    seed: Annotated[int, typer.Option(help="Of the students' first weights and of the held-out part.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Distil a judge into a reward that costs next to nothing: rewards: [{name: distilled, options: {path: DIR}}].

    Prints how well the students agree with verdicts that they were not trained on.
    """
    with rarely_collected():
        opened = _opened(source, changes or [], checkpoint)
        from mmrl.studies.distill.distilling import distil
        from mmrl.studies.distill.training import Settings

    def made() -> Outcome:
        settings = Settings(epochs=passes, seed=seed)
        return distil(opened, out, samples, reward, also or (), settings, from_nothing=backbone == "none")

    if as_json:
        with json_alone() as write:
            write(made().as_json())
    else:
        _show(made())
        print(out)


def _opened(source: str, changes: list[str], checkpoint: str) -> Source:
    run = Path(source)
    if not run.is_dir():
        loaded = read_recipe(source, changes)
        from mmrl.studies.distill.distilling import Source

        return Source(loaded.recipe)
    if changes:
        raise UserError(
            f"{changes[0]}: a run keeps the settings that it was trained with; name a recipe to change them"
        )
    use_threads_of(run)
    from mmrl.app.build import open_run
    from mmrl.studies.distill.distilling import Source

    return Source(open_run(run)[0], run, checkpoint)


def _show(made: Outcome) -> None:
    print(f"{made.verdicts} verdicts, {made.asked} of them new; students on those held out:")
    for name, one in made.agreements.items():
        value, low, high = one.order
        print(
            f"  {name}: order of pairs {value:.3f} (95 %: {low:.3f} to {high:.3f}), Spearman {one.spearman:.3f}, ",
            end="",
        )
        print(f"Kendall {one.kendall:.3f}, AUC {one.area:.3f}, calibration error {one.calibration:.3f}, ", end="")
        print(f"mean error {one.error:.3f}")
    first = next(iter(made.agreements.values()))
    print(
        f"{first.samples} samples of {first.prompts} prompts; the order of {first.pairs} pairs of one group, chance 0.5"
    )
    print(f"the reward asks the student {made.student}; with options.judge_below it asks the judge too:")
    for one in made.askings:
        print(f"  judge_below: {one.threshold:.3f}   asked {one.asked:.1%}   order of pairs {one.order:.3f}")


def register(app: typer.Typer) -> None:
    """Add the commands of this study to those of ``mmrl``."""
    app.command()(distill)

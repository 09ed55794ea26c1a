"""``soup train merge report``: one model for each reward, merged into a model for any mix of the rewards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmrl.commands.arguments import (
    ChangesArgument,
    Exported,
    JsonOption,
    RecipeArgument,
    console,
    json_alone,
    read_recipe,
    use_threads_of,
)
from mmrl.core.errors import UserError
from mmrl.core.garbage import rarely_collected

if TYPE_CHECKING:
    from mmrl.studies.soup.evaluation import Front, SoupReport

soup = typer.Typer(
    name="soup",
    help="Trade rewards off after training: train a model per reward, merge them for any weights (Bone Soup).",
    no_args_is_help=True,
    rich_markup_mode=None,
)
SoupArgument = Annotated[Path, typer.Argument(metavar="DIR", help="A folder that mmrl soup train made.")]
CheckpointOption = Annotated[
    str, typer.Option(metavar="latest|best|STEP", help="Of every backbone; best needs eval.early_stopping.")
]


@soup.command("train")
def train(
    recipe: RecipeArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder of the soup.")],
    changes: ChangesArgument = None,
    beta: Annotated[
        str,
        typer.Option(
            metavar="SHARE|auto",
            help="Share of its own reward in a backbone's mix, above 1/n; 1 is Rewarded Soup. auto tries 0.6, 0.7, 0.8 "
            "and 1 for a fifth of the steps and takes the one with the largest hypervolume.",
        ),
    ] = "0.7",
    rewards: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Which rewards, by label.", show_default="all with a weight"),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the soup in DIR.")] = False,
) -> None:
    """Train a backbone for each reward of a recipe, one after another: DIR/backbone-1, DIR/backbone-2, ...

    Each is an ordinary run with other weights of the rewards. Exit codes are those of mmrl train.
    """
    with rarely_collected():
        first = out / "backbone-1"
        loaded = read_recipe(recipe, changes or (), (lambda _: first) if resume else None)
        from mmrl.studies.soup.backbones import train_backbones
        from mmrl.studies.soup.beta import train_with_best_beta
        from mmrl.studies.soup.record import AUTO

    named = None if rewards is None else [label.strip() for label in rewards.split(",")]
    if beta == AUTO:
        soup = train_with_best_beta(loaded, out, named, resume=resume)
    else:
        soup = train_backbones(loaded, out, _share(beta), named, resume=resume)
    if soup is not None:
        print(out)


def _share(beta: str) -> float:
    try:
        return float(beta)
    except ValueError:
        raise UserError(f"--beta {beta}: give a number above 1/n and at most 1 (0.7, say), or auto") from None


@soup.command("merge")
def merge(
    soup: SoupArgument,
    weights: Annotated[
        str, typer.Option(metavar="0.3,0.7", help="How much each reward counts, in the order of soup.json; sum 1.")
    ],
    out: Annotated[Path, typer.Option(metavar="MODEL", help="Where to write; must not exist yet.")],
    what: Annotated[
        Exported, typer.Option(help="The whole model, the adapter alone, or that in one file (ComfyUI).")
    ] = "merged",
    checkpoint: CheckpointOption = "latest",
    no_extrapolate: Annotated[
        bool, typer.Option("--no-extrapolate", help="No backbone counts less than nothing.")
    ] = False,
    beyond: Annotated[
        str,
        typer.Option(
            metavar="A|A,B|auto",
            help="Go 1/(1-A) times as far from the base model as the merge does, A of each reward; auto measures 0 to "
            "0.5 on training prompts.",
        ),
    ] = "0",
) -> None:
    """Write the model for given weights of the rewards; it loads as what mmrl export writes. Prints where it is."""
    try:
        mu = [float(part) for part in weights.split(",")]
    except ValueError:
        raise UserError(f"--weights {weights}: give numbers with commas between, 0.3,0.7, say") from None
    if (soup / "backbone-1").exists():
        use_threads_of(soup / "backbone-1")
    from mmrl.studies.soup.merging import merge as write

    far = _beyond(beyond, soup, checkpoint)
    shares = write(soup, mu, out, what, checkpoint, extrapolate=not no_extrapolate, beyond=far)
    rest = f"; the base model: {1 - sum(shares):.4g}" if any(far) else ""
    print(f"backbones: {', '.join(f'{share:.4g}' for share in shares)}{rest}", file=sys.stderr)
    print(out)


def _beyond(said: str, soup: Path, checkpoint: str) -> list[float]:
    from mmrl.studies.soup.beyond import best_shares

    if said == "auto":
        return best_shares(soup, checkpoint)
    try:
        return [float(part) for part in said.split(",")]
    except ValueError:
        raise UserError(f"--beyond {said}: give a number from 0 to below 1, one for each reward, or auto") from None


@soup.command("report")
def report(
    soup: SoupArgument,
    points: Annotated[int, typer.Option(help="Preferences, from all for one reward to all for the other.")] = 5,
    samples: Annotated[
        int | None,
        typer.Option(min=1, help="Held-out samples of each model.", show_default="eval.samples of the recipe"),
    ] = None,
    checkpoint: CheckpointOption = "latest",
    beside: Annotated[
        list[Path] | None,
        typer.Option(metavar="DIR|RUN", help="Another soup, or a run, to compare with; may be given several times."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Measure merged models of two rewards on held-out prompts, also with lambda = mu, and each backbone.

    Writes DIR/soup_report.json, and DIR/soup_report.html: the front, and a slider over samples of the merges. Rewarded
    Soup is a soup of --beta 1; name it with --beside, and a run on the mix of both rewards.
    """
    if (soup / "backbone-1").exists():
        use_threads_of(soup / "backbone-1")
    from mmrl.studies.soup.evaluation import report as measure
    from mmrl.studies.soup.page import write_page

    if as_json:
        with json_alone() as write:
            made = measure(soup, points, samples, checkpoint, beside or ())
            write_page(made)
            write(made.as_json())
    else:
        made = measure(soup, points, samples, checkpoint, beside or ())
        _show(made)
        print(write_page(made))


def _show(made: SoupReport) -> None:
    from rich.table import Table

    from mmrl.studies.soup.formulas import guaranteed_interval

    table = Table(title=f"{' and '.join(made.soup.rewards)}: means of {made.samples} held-out samples")
    for name in ("weights", "backbones", "soup", "lambda = mu"):
        table.add_column(name, justify="right")
    for ours, theirs in zip(made.bone.points, made.direct.points, strict=True):
        weights = [", ".join(f"{w:.3g}" for w in of) for of in (ours.mu, ours.weights)]
        table.add_row(*weights, *(", ".join(f"{r:.4f}" for r in one.rewards) for one in (ours, theirs)))
    console().print(table)
    for way, front in (("soup", made.bone), ("lambda = mu", made.direct)):
        print(f"{way}: {_measures(front)}")
    for label, (rewards, volume) in zip(made.soup.rewards, made.backbones, strict=True):
        print(f"backbone of {label}: {_rewards(rewards)}, hypervolume {volume:.4g}")
    for one in made.beside:
        what = f"a soup of beta {one.beta:g}" if one.front is not None else "a run"
        measured = _measures(one.front) if one.front is not None else f"hypervolume {one.hypervolume:.4g}"
        means = "" if one.rewards is None else f"{_rewards(one.rewards)}, "
        print(f"{one.path}, {what}: {means}{measured}")
    low, high = guaranteed_interval(made.soup.beta)
    print(
        f"weights from {low:.2f} to {high:.2f} are those for which theory promises more than Rewarded Soup (--beta 1)"
    )


def _rewards(rewards: tuple[float, float]) -> str:
    return ", ".join(f"{r:.4f}" for r in rewards)


def _measures(front: Front) -> str:
    return (
        f"hypervolume {front.hypervolume:.4g}, controllability {front.controllability:.2f}, sparsity "
        f"{front.sparsity:.4g}"
    )


def register(app: typer.Typer) -> None:
    """Add the commands of this study to those of ``mmrl``."""
    app.add_typer(soup)

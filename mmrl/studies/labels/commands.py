"""``label spread``: give labels on a local page, and spread those of a few samples over many, as a reward."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mmrl.commands.arguments import ChangesArgument, JsonOption, json_alone, read_recipe
from mmrl.core.errors import UserError
from mmrl.core.garbage import rarely_collected

if TYPE_CHECKING:
    from mmrl.core.json_types import JsonObject
    from mmrl.studies.labels.spread_folder import Outcome


FolderArgument = Annotated[
    str,
    typer.Argument(
        metavar="DIR|RUN|RECIPE",
        help="A folder of pictures, clips or texts, one of mmrl sample, or a run's kept samples; with --train what "
        "trains, a recipe or a run.",
    ),
]
TextsOption = Annotated[
    str | None,
    typer.Option(
        metavar="words|MODEL",
        help="What embeds texts and prompts: hashed words, or a sentence encoder.",
        show_default="all-minilm-l6-v2 where it is set up",
    ),
]
LabelsOption = Annotated[
    Path | None,
    typer.Option(metavar="CSV", help="A table with the columns file and label.", show_default="labels.csv in DIR"),
]


def label(
    folder: FolderArgument,
    changes: ChangesArgument = None,
    labels: LabelsOption = None,
    order: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|CSV", help="Show these first: what mmrl spread wrote, or a table with a column file."
        ),
    ] = None,
    stars: Annotated[bool, typer.Option("--stars", help="Keys 1 to 5 in place of 0 and 1.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 0,
    train: Annotated[
        bool, typer.Option("--train", help="Train, and let votes on the page be the reward of the next steps.")
    ] = False,
    pairs: Annotated[bool, typer.Option("--pairs", help="With --train: vote on two samples of a prompt.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="RUN", help="With --train: the new run.", show_default="runs/NAME")
    ] = None,
) -> None:
    """Show the samples of a folder or of a run on a local page, and keep a label for each key that you press.

    Keys: 0 bad, 1 good (--stars: 1 to 5), arrows to move, Backspace to take a label away. An answer is on the disk at
    once; a later start goes on where you stopped. Prints the address; Ctrl-C ends it.

    With --train a recipe trains while you vote on its samples, those first whose score is least sure, and the votes,
    spread over all samples, are the reward of the next steps. Of a run: it goes on, with its votes.
    """
    if train:
        if labels is not None or order is not None or stars:
            raise UserError("--labels, --order and --stars are for samples of a folder; leave them out with --train")
        return _train(folder, changes or [], out, port, pairs=pairs)
    if changes or out is not None or pairs:
        raise UserError("settings, --out and --pairs are for --train; add it, or leave them out")
    return _label(Path(folder), labels, order, port, stars=stars)


def _label(folder: Path, labels: Path | None, order: Path | None, port: int, *, stars: bool) -> None:
    from mmrl.rewards.learned.labels.items import items_of, root_of
    from mmrl.studies.labels import table
    from mmrl.studies.labels.server import STARS, YES_NO, LabelServer, in_order

    root, items = root_of(folder), items_of(folder)
    if order is not None:
        items = in_order(items, table.files(order / "next.csv" if order.is_dir() else order, folder))
    path = labels or root / table.NAME
    with LabelServer(items, root, path, STARS if stars else YES_NO, port) as server:
        print(
            f"{len(items)} samples, {len(server.labels)} of them labelled in {path}; open in a browser of this machine:"
        )
        print(server.url, flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print(f"{len(server.labels)} labels in {path}; next: mmrl spread {folder} --out spread")


def _train(source: str, changes: list[str], out: Path | None, port: int, *, pairs: bool) -> None:
    """Train the recipe or go on with the run ``source``, beside a page that takes the votes."""
    from mmrl.studies.labels.voting import served, to_train

    with rarely_collected():
        loaded, path, resume = to_train(source, changes, out, pairs=pairs)
    with served(path, port) as server:
        print(f"vote on the samples of {path} in a browser of this machine:")
        print(server.url, flush=True)
        server.train(loaded, resume=resume)


def spread(
    folders: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR|RUN...", help="As for mmrl label. Several are spread over together, each with its labels.csv."
        ),
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write; must not exist yet.")],
    labels: LabelsOption = None,
    against: Annotated[
        Path | None,
        typer.Option(metavar="DIR|RUN", help="Samples that are not wanted, label 0; all of the others are 1."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="RECIPE", help="Embed pictures or texts with this recipe's model; it reads the prompt too."
        ),
    ] = None,
    texts: TextsOption = None,
    by: Annotated[
        Literal["auto", "graph", "head"],
        typer.Option(help="What gives the scores; auto: the best one on held-out labels."),
    ] = "auto",
    following: Annotated[int, typer.Option("--next", min=0, help="How many samples to propose for labels.")] = 50,
    pairs: Annotated[
        int, typer.Option(min=0, help="Pick up to so many pairs of each prompt, a better and a worse sample, for DPO.")
    ] = 0,
    neighbours: Annotated[int, typer.Option(min=1, help="Of each sample in the graph.")] = 6,
    seed: Annotated[int, typer.Option(min=0, help="Of the folds and of the first weights.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Spread few labels over many samples: scores for all, what to label next, and a reward for recipes.

    Prints how the scores agree with labels that they were not made from, beside three simpler methods. The reward:
    rewards: [{name: labels, options: {path: DIR}}].
    """
    with rarely_collected():
        reader = None if model is None else _reader(model)
        from mmrl.rewards.learned.labels.spreading import AUTO, GRAPH, HEAD
        from mmrl.rewards.learned.labels.training import Settings
        from mmrl.studies.labels.spread_folder import spread_folder

        methods = {"auto": AUTO, "graph": GRAPH, "head": HEAD}

    def made() -> Outcome:
        settings = Settings(neighbours=neighbours, seed=seed)
        return spread_folder(folders, out, labels, texts, reader, settings, following, methods[by], pairs, against)

    if as_json:
        with json_alone() as write:
            write(made().as_json())
    else:
        _show(made(), out)
        print(out)


def _reader(model: str) -> JsonObject:
    """What embeds the samples. Raises ``UserError``, also for a run in place of a recipe."""
    from mmrl.logging.rundir import looks_like_run
    from mmrl.rewards.learned.labels.embeddings import model_of

    if looks_like_run(Path(model)):
        raise UserError(f"--model: {model} is a run; name the recipe that it began with, whose model reads samples")
    return model_of(read_recipe(model, []).recipe)


def _show(made: Outcome, out: Path) -> None:
    middle = next(iter(made.quality.values())).middle
    print(f"{made.samples} samples, {made.labels} labels, {made.high} of them {middle:.3g} or more")
    if len(made.folders) > 1:
        for name, (samples, labels) in made.folders.items():
            print(f"  {name}: {samples} samples, {labels} labels")
    print("on labels that were held out of each model (five parts, each held out in turn):")
    for name, one in made.quality.items():
        area, low, high = one.area
        print(
            f"  {name}: AUC {area:.3f} (95 %: {low:.3f} to {high:.3f}), right {one.right[0]:.1%}, calibration error "
            f"{one.error:.3f}"
        )
    print(f"the scores are those of the {made.by}")
    if not made.reward:
        print("these scores are no better than chance (AUC 0.5), so no reward is written, nor pairs: label more")
    if made.pairs:
        print(f"{made.pairs} pairs of a better and a worse sample for DPO: {out}/pairs.jsonl")
    if made.following:
        print(f"label these next ({out}/next.csv): {', '.join(made.following[:5])}, ...")


def register(app: typer.Typer) -> None:
    """Add the commands of this study to those of ``mmrl``."""
    app.command()(label)
    app.command()(spread)

"""``data build``, ``data index``: write tar shards of a data set, and list the contents of a folder of shards."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmrl.cli.arguments import OptionsOption, console, reward_options
from mmrl.errors import UserError

if TYPE_CHECKING:
    from mmrl.datasets.index import ShardIndex

app = typer.Typer(name="data", help="Build tar shards, and index them.", no_args_is_help=True, rich_markup_mode=None)
_SHOWN = 20


@app.command()
def build(
    names: Annotated[list[str], typer.Argument(metavar="NAME", help="Data sets with media, such as scenes or clips.")],
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to.")],
    samples: Annotated[int, typer.Option(min=1, help="Samples for training.")],
    heldout: Annotated[int, typer.Option(min=0, help="Samples to hold out.")] = 0,
    shards: Annotated[int, typer.Option(min=1, help="Tar files per split.")] = 1,
    seed: Annotated[int, typer.Option(help="The same seed writes the same bytes.")] = 0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete the shards that are there.")] = False,
    options: OptionsOption = None,
) -> None:
    """Write a data set as tar shards of PNG, JPEG and MP4 files."""
    arguments = reward_options(options)
    _check_names(names)
    from mmrl.datasets.build import build as run

    written = run(names, out, {"train": samples, "heldout": heldout}, shards, seed, arguments, overwrite=overwrite)
    size = sum(path.stat().st_size for path in written)
    print(f"{out}: {samples + heldout} samples in {len(written)} shards, {size / 1e6:.1f} MB")


@app.command()
def index(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of tar shards, or one of them.")],
    headers: Annotated[bool, typer.Option("--headers", help="Trust the headers of media; do not decode them.")] = False,
) -> None:
    """Index tar shards: what they hold, and what cannot be used and why.

    Exit code 1 where something cannot.
    """
    from mmrl._load import load

    paths = [folder] if folder.suffix == ".tar" else sorted(folder.glob("*.tar"))
    if not paths:
        raise UserError(f"{folder} has no .tar file; name a folder of tar shards")
    indexes = load("datasets", "shards:open_shards")(paths, "headers" if headers else "decode")
    from rich.table import Table

    table = Table(box=None, title_justify="left")
    for name in ("shard", "samples", "pictures", "clips", "frames", "bad", "ignored"):
        table.add_column(name, justify="left" if name == "shard" else "right")
    rows = [_counts(index) for index in indexes]
    for index_, row in zip(indexes, rows, strict=True):
        table.add_row(index_.path.name, *map(str, row))
    if len(rows) > 1:
        table.add_row("all", *(str(sum(column)) for column in zip(*rows, strict=True)))
    console().print(table)
    bad = [b for index_ in indexes for b in index_.bad]
    for record in bad[:_SHOWN]:
        print(f"bad  {record}")
    if len(bad) > _SHOWN:
        print(f"     and {len(bad) - _SHOWN} more, all named in the .index.json files")
    raise typer.Exit(1 if bad else 0)


def _counts(index: ShardIndex) -> tuple[int, ...]:
    """Samples, pictures, clips, frames of clips, bad records, members of no use."""
    media = [part for entry in index.entries for part in entry.media]
    clips = [part for part in media if part.frames is not None]
    return (
        len(index.entries),
        len(media) - len(clips),
        len(clips),
        sum(part.frames or 0 for part in clips),
        len(index.bad),
        sum(index.ignored.values()),
    )


def _check_names(names: list[str]) -> None:
    """Refuse an unknown name before a large library is imported."""
    from mmrl.config.drop_ins import missing_drop_in

    for name in names:
        wrong = missing_drop_in("datasets", name, "looked in the current folder")
        if wrong:
            raise UserError(wrong)

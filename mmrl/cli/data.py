"""``data check build index convert``: show what a model reads, write and list tar shards, convert sets of prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mmrl.commands.arguments import (
    ChangesArgument,
    OptionsOption,
    console,
    read_recipe,
    refuse_unknown,
    reward_options,
)
from mmrl.core.errors import UserError
from mmrl.core.plugins.loading import load

if TYPE_CHECKING:
    from mmrl.data.index import ShardIndex
    from mmrl.planner.data_check import Checked, Record

app = typer.Typer(
    name="data",
    help="Check and convert data, build tar shards, and index them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
_SHOWN = 20
_MOST_META = 400


@app.command("check")
def check_(
    target: Annotated[
        str,
        typer.Argument(metavar="RECIPE|DATA", help="A recipe; or a file, a folder, a data set of ours or the hub's."),
    ],
    changes: ChangesArgument = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--options", metavar="KEY=VALUE", help="An option of DATA; may be given several times."),
    ] = None,
    show: Annotated[int, typer.Option(min=0, help="Records of each split to show.")] = 3,
    look_at: Annotated[
        int, typer.Option("--look-at", min=0, help="Prompts of each split the model's reader is tried on.")
    ] = 200,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the first records as the model will see them, and count by reason those that cannot be used.

    Loads no weight. Exit code 1 where some cannot be used.
    """
    given = reward_options(options)
    from mmrl.config.loader import shipped_recipes

    if target.endswith((".yaml", ".yml")) or (target in shipped_recipes() and not given):
        if given:
            raise UserError("--options: a recipe has its own; write settings such as data.train.path=questions.jsonl")
        loaded = read_recipe(target, changes or ())
        from mmrl.planner.data_check import check_recipe

        found = check_recipe(loaded.recipe, show, look_at)
    else:
        if changes:
            raise UserError(f"{changes[0]!r} changes a recipe, and {target} is data; use --options")
        from mmrl.planner.data_check import check_data, data_at

        found = check_data(data_at(target, given), show, look_at)
    print(json.dumps(found.as_json(), indent=2, default=str) if as_json else "\n".join(_lines(found)))
    raise typer.Exit(1 if found.faults else 0)


def _lines(found: Checked) -> Iterator[str]:
    """The lines for a terminal."""
    yield f"model: {found.model}"
    if found.settings:
        yield "       " + "  ".join(f"{name} {value!r}" for name, value in found.settings.items())
    for name, split in found.splits.items():
        yield ""
        yield f"{name}: {split.prompts} prompts, of a source with {split.records} records"
        if split.sources:
            said = ", ".join(f"{n} of {label}" for label, n in split.sources.items())
            yield f"  the first {split.looked_at}: {said}"
        if split.tokens:
            yield "  tokens of the first {}: {fewest:g} to {most:g}, mean {mean:.1f}".format(
                split.looked_at, **split.tokens
            )
        if split.frames:
            yield "  frames that are shown of a clip: {fewest:g} to {most:g}, mean {mean:.1f}".format(**split.frames)
        if split.sizes:
            yield f"  sizes of the first {split.looked_at}: {', '.join(f'{n} of {s}' for s, n in split.sizes.items())}"
        if split.spelled:
            named = ", ".join(f"{token} ({n})" for token, n in split.spelled.items())
            yield f"  control tokens of the model in texts, read as plain text: {named} of the first {split.looked_at}"
        yield from (f"  {note}" for note in split.notes)
        for title, counts in (("cannot be used", split.left_out), ("the model cannot read", split.unusable)):
            yield from (f"  {title}: {n} x {why}  (first: {split.first[why]})" for why, n in counts.items())
        for record in split.shown:
            yield from _lines_of(record)


def _lines_of(record: Record) -> Iterator[str]:
    about = "" if record.tokens is None else f"  {record.tokens} tokens"
    about += "".join(f"  {name} {n} tokens" for name, n in record.responses.items())
    yield f"  --- {record.id}{about}"
    if record.problem is not None:
        yield f"  left out: {record.problem}"
    if record.rendered is None and record.system is not None:
        yield f"  system: {record.system!r}"
    shown = record.text if record.rendered is None else record.rendered
    yield from (f"  | {line}" for line in shown.splitlines())
    yield from (f"  {name}: {value!r}" for name, value in record.settings.items())
    yield from (f"  {medium}" for medium in record.media)
    yield from (f"  {n} frames are shown of clip {i + 1}" for i, n in enumerate(record.frames))
    if record.meta:
        said = json.dumps(record.meta, ensure_ascii=False, default=str)
        yield f"  meta: {said[:_MOST_META]}{'...' if len(said) > _MOST_META else ''}"


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
    for name in names:
        refuse_unknown("datasets", name)
    from mmrl.data.build import build as run

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
    _end_with(bad, ", all named in the .index.json files")


@app.command()
def convert(
    name: Annotated[str, typer.Argument(metavar="SET", help="geneval, partiprompts or drawbench.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The file as its authors distribute it.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.jsonl", show_default="SET.jsonl here")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that is there.")] = False,
) -> None:
    """Convert a downloaded set of prompts to JSONL. Exit code 1 where some records cannot be used."""
    from mmrl.data.convert import SETS
    from mmrl.data.convert import convert as run

    target = out or Path(f"{name}.jsonl")
    n, bad = run(name, file, target, overwrite=overwrite)
    print(f"{target}: {n} prompts; licence of the source: {SETS[name].licence} ({SETS[name].source})")
    _end_with(bad)


def _end_with(bad: Sequence[object], where: str = "") -> NoReturn:
    """Name the first bad records, and exit; ``where``: where all of them are named."""
    for record in bad[:_SHOWN]:
        print(f"bad  {record}")
    if len(bad) > _SHOWN:
        print(f"     and {len(bad) - _SHOWN} more{where}")
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

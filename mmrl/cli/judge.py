"""``judge``: measure how often a judge agrees with the true verdicts, before a run uses it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmrl.commands.arguments import JsonOption, OptionsOption, console, json_alone, read_recipe, reward_options
from mmrl.core.errors import UserError

if TYPE_CHECKING:
    from mmrl.config.schema import Reward
    from mmrl.rewards.judging.agreement import Agreement
    from mmrl.rewards.judging.calibration import Calibration

_NAMED = 5


def judge(
    source: Annotated[
        str, typer.Argument(metavar="RECIPE|OPTIONS.yaml", help="A recipe with a judge, or a file with its options.")
    ],
    truth: Annotated[
        str, typer.Option(metavar="FILE.jsonl|DATASET", help="Rows {prompt, response, truth, image}, or a data set.")
    ],
    reward: Annotated[
        str | None, typer.Option(metavar="LABEL", help="Which reward of the recipe.", show_default="its only judge")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="How many rows.", show_default="all")] = None,
    threshold: Annotated[float, typer.Option(help="From which score on the judge says yes.")] = 0.5,
    bins: Annotated[int, typer.Option(min=1, help="Bins of the calibration table.")] = 10,
    at_least: Annotated[
        float | None, typer.Option(metavar="X", help="Exit with 1 if accuracy (or order of pairs) is below X.")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Keep verdicts and transcripts there.")] = None,
    as_json: JsonOption = False,
    options: OptionsOption = None,
) -> None:
    """Measure a judge's agreement with held-out truth."""
    chosen, root, device = _read(source, reward)
    from mmrl.config.drop_ins import declared_paths
    from mmrl.config.names import resolve_options
    from mmrl.inference.this_machine import choose_device
    from mmrl.rewards.judging.agreement import as_json as plain
    from mmrl.rewards.judging.agreement import measure

    given = resolve_options(root, {**chosen.options, **reward_options(options)}, declared_paths(chosen.name))
    chosen = chosen.model_copy(update={"options": given})

    def measured() -> Agreement:
        where = str(choose_device(device))
        return measure(chosen, truth, limit=limit, threshold=threshold, bins=bins, device=where, folder=out)

    if as_json:
        with json_alone() as write:
            found = measured()
            write(plain(found))
    else:
        found = measured()
        _show(found)
    headline = found.figures["accuracy" if "accuracy" in found.figures else "order of pairs"][0]
    if at_least is not None and not headline >= at_least:
        raise typer.Exit(1)


def _read(source: str, label: str | None) -> tuple[Reward, Path, str]:
    """The reward to measure, the folder of its relative paths, and the device."""
    from mmrl.config.evaluation_checks import label_of
    from mmrl.config.layers import read_layers
    from mmrl.config.schema import Reward

    if os.path.isfile(source):
        tree = read_layers([Path(source)], [])
        if "rubric" in tree.values and not tree.findings:
            return Reward(name="judge:score", label="judge", options=tree.values), Path(source).resolve().parent, "auto"
    loaded = read_recipe(source, [])
    rewards = [*loaded.recipe.rewards, *loaded.recipe.eval.rewards]
    labels = [label_of(r.name, r.label) for r in rewards]
    wanted = [r for r, name in zip(rewards, labels, strict=True) if _chosen(r, name, label)]
    if len(wanted) != 1:
        raise UserError(
            f"{source} has {len(wanted)} {'judges' if label is None else f'rewards called {label!r}'}; "
            f"name one with --reward ({', '.join(labels)})"
        )
    return wanted[0], loaded.root, loaded.recipe.device


def _chosen(reward: Reward, name: str, label: str | None) -> bool:
    return name == label if label is not None else reward.name.partition(":")[0] == "judge"


def _show(found: Agreement) -> None:
    from rich.table import Table
    from rich.text import Text

    print(f"{found.judged} of {found.cases} cases judged in {found.seconds:.1f} s")
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, (value, low, high) in found.figures.items():
        interval = f"[{low:.3f}, {high:.3f}]" if low == low else ""
        table.add_row(name, f"{value:.3f}", Text(interval))
    console().print(table)
    if found.confusions is not None:
        said = found.confusions
        what = "wrong" if found.kind == "steps" else "yes"
        print(f"judge and truth say {what}: {said.both}; judge alone: {said.judge_alone}; ", end="")
        print(f"truth alone: {said.truth_alone}; neither: {said.neither}")
    if found.calibration is not None:
        _show_calibration(found.calibration)
    for row in found.disagreements:
        print(f"  off: said {_text(row['said'])}, truth {_text(row['truth'])}: {row['case']!r} -> {row['response']!r}")
    for kind, lines in (("unjudged", [f"{n!r}: {why}" for n, why in found.unjudged]), ("skipped", found.skipped)):
        for line in lines[:_NAMED]:
            print(f"  {kind}: {line}")
        if len(lines) > _NAMED:
            print(f"  {kind}: {len(lines) - _NAMED} more")


def _show_calibration(found: Calibration) -> None:
    """A line per bin: what the judge says, and what is so. At most 80 columns."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, title="calibration", title_justify="left", title_style="bold", pad_edge=False)
    for name in ("score", "cases", "mean score", "truth", "95 %", "score - truth"):
        table.add_column(name, justify="right", no_wrap=True)
    for one in found.bins:
        interval = f"{one.truth_low:.3f} to {one.truth_high:.3f}" if one.truth_low == one.truth_low else "-"
        last = [f"{one.score:.3f}", f"{one.truth:.3f}", interval, f"{one.score - one.truth:+.3f}"]
        table.add_row(f"{one.low:.2f} to {one.high:.2f}", f"{one.cases:,}", *last)
    console().print(table)
    if found.by_chance == found.by_chance:
        error = found.error[0]
        print(f"calibration error {error:.3f}; by chance up to {found.by_chance:.3f} with a calibrated judge (95 %)")


def _text(value: object) -> str:
    return f"{value:.3g}" if isinstance(value, float) else str(value)

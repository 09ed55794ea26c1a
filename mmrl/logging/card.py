"""The model card of an export: model, data, results and how to load it. Contains no local path."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml
from PIL import Image

from mmrl.config.sampling import Sampling
from mmrl.config.schema import Recipe
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.packages.places import origin_of
from mmrl.core.secrets import masked
from mmrl.core.stored import BadFileError
from mmrl.logging.environment import read_environment
from mmrl.logging.grids import before_after, score_line
from mmrl.logging.metrics import of_pairs, of_repeated, read_numbers
from mmrl.logging.pictures import Shown, read_evaluations
from mmrl.logging.rundir import RunDir
from mmrl.logging.texts import cell

What = Literal["merged", "lora", "lora-file"]
"""What an export writes: the whole model with its adapter merged, the adapter alone for diffusers and peft, or the
adapter in one file for other programs that draw pictures."""

PAIRS, TEXTS = 12, 8
"""Pictures, and texts, before and after, evenly from the run's held-out samples: chosen by place, never by score."""
_SECRET = re.compile(r"(^|_)(token|secret|password|key|apikey|authorization|credentials?)$", re.IGNORECASE)
_FOLDERS = re.compile(r"(?<![\w:/.~-])~?/(?:[^\s/:]+/)+")


@dataclass(frozen=True)
class Usage:
    """How to load the exported model, for the model card."""

    library: str
    task: str
    tags: Sequence[str]
    code: Mapping[str, str]
    """Python by heading, each complete in itself; leaves an ``image`` or a ``text`` behind."""


def public(text: str) -> str:
    """``text`` without folders of this machine or passwords in it: a local model is called by its last folder."""
    if Path(text).is_absolute():
        return Path(text).name
    return _FOLDERS.sub("", re.sub(r"://[^/\s@]+@", "://", text))


def write_card(
    folder: Path, name: str, recipe: Recipe, directory: RunDir, step: int, what: What, usage: Usage, made: str = ""
) -> bool:
    """Write README.md, and before_after.png where the run makes pictures, into ``folder``.

    Pictures that belong to the prompts of texts go to ``before_after/`` there. ``made``: a section on how the weights
    were made, where it was not by this run alone.

    The figures are those of ``heldout.jsonl`` and ``samples/`` up to ``step``, the checkpoint's. Returns whether there
    were any.
    """
    rows = [row for row in read_numbers(directory.heldout) if row["step"] <= step]
    parts = [
        _front_matter(name, recipe, rows, what, usage),
        f"# {name}",
        _summary(recipe, directory, step, what),
        made,
        _base(recipe),
        _before_after(folder, directory, step),
        _table(rows, step, _drawn(recipe)),
        "## Use",
        *(f"{title}:\n\n```python\n{code}```" for title, code in usage.code.items()),
        _place(recipe, what, name),
        "## Training",
        _rewards(recipe),
        _details("Recipe, every setting", _yaml(_published(recipe.model_dump(mode="json")))),
        _details("Environment", _yaml(_environment(directory))),
    ]
    (folder / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n", encoding="utf-8")
    return bool(rows)


def _front_matter(name: str, recipe: Recipe, rows: list[dict[str, Any]], what: What, usage: Usage) -> str:
    """The metadata of the model on a hub, and the held-out figures after training."""
    from huggingface_hub import EvalResult, ModelCardData

    learning = [] if recipe.algorithm.kind == "offline" else ["reinforcement-learning"]
    data, last = " + ".join(map(public, recipe.data.names)), rows[-1] if rows else {}
    figures = {key.removeprefix("reward/"): last[key] for key in _figures(last) if last[key] is not None}
    origin = origin_of(Path(recipe.model.path))
    head = ModelCardData(
        base_model=origin.get("origin") or public(recipe.model.path),
        license=origin["licence"].lower() if origin else None,
        base_model_relation="finetune" if what == "merged" else "adapter",
        library_name=usage.library,
        pipeline_tag=usage.task,
        tags=[*usage.tags, "mmrl", *learning, recipe.algorithm.label],
        model_name=name if figures else None,
        eval_results=[EvalResult(usage.task, data, f"{data}, held out", *f) for f in figures.items()] or None,
    )
    return f"---\n{head}\n---"


def _summary(recipe: Recipe, directory: RunDir, step: int, what: What) -> str:
    train, lora = recipe.train, recipe.model.lora
    weights = "all weights" if lora is None else f"LoRA of rank {lora.rank} and alpha {lora.alpha:g}"
    merged = "" if lora is None else ", merged" if what == "merged" else ", the adapter alone"
    spent = [
        row["perf/cpu_seconds"]
        for row in read_numbers(directory.metrics)
        if row["step"] <= step and row.get("perf/cpu_seconds") is not None
    ]
    seconds = f", {spent[-1]:,.0f} CPU-seconds of training" if spent else ""
    average = " The weights are the moving average over the updates." if recipe.optim.ema_decay is not None else ""
    paired = recipe.algorithm.kind == "offline"
    given = {"responses": "responses", "given_pictures": "pictures"}.get(recipe.algorithm.trains_on, "pairs")
    kind = f"training on given {given}" if paired else "reinforcement learning"
    work = (
        f"{train.prompts_per_step} {given}"
        if paired
        else f"{train.prompts_per_step} prompts x {train.group_size} samples"
    )
    return (
        f"`{public(recipe.model.path)}` after {step} step{'' if step == 1 else 's'} of {kind} with "
        f"`{recipe.algorithm.label}` ({weights}{merged}), by the recipe `{recipe.name}` of mmrl: "
        f"{work} a step{seconds}.{average}"
    )


def _base(recipe: Recipe) -> str:
    """Where the weights come from that training began with, for a model that a package carries."""
    origin = origin_of(Path(recipe.model.path))
    if not origin:
        return ""
    return (
        f"Training began with `{origin['origin']}` ({origin['licence']}), as the Python package {origin['package']} "
        f"carries it: {origin['note']}. With mmrl, `mmrl fetch {origin['name']}` sets the same weights up."
    )


def _before_after(folder: Path, directory: RunDir, step: int) -> str:
    """The first and the last evaluation's samples of the same prompts and seeds side by side."""
    evaluations = [e for e in read_evaluations(directory.samples) if e.step <= step]
    if len(evaluations) < 2:
        return ""
    first, last = evaluations[0], evaluations[-1]
    keys = [key for key in first.samples if key in last.samples]
    count = min(TEXTS if last.texts else PAIRS, len(keys))
    keys = [keys[i * len(keys) // count] for i in range(count)]
    if not keys:
        return ""
    pairs = [(first.samples[key], last.samples[key]) for key in keys]
    caption = f"Held-out prompts, before (step {first.step}) and after (step {last.step})"
    if last.texts:
        return f"{caption}, not chosen by score:\n\n{_texts(folder, pairs, first.step, last.step)}"
    _sheet(pairs).save(folder / "before_after.png")
    return f"![{caption}](before_after.png)\n\n{caption}: the same noise left and right, not chosen by score."


def _sheet(pairs: Sequence[tuple[Shown, Shown]]) -> Image.Image:
    notes = [(score_line(before.scores), score_line(after.scores)) for before, after in pairs]
    before, after = ([_picture(shown) for shown in of] for of in zip(*pairs, strict=True))
    return before_after(before, after, [shown.prompt for shown, _ in pairs], notes)


def _picture(shown: Shown) -> Image.Image:
    assert shown.path
    with Image.open(shown.path) as image:
        return image.copy()


def _texts(folder: Path, pairs: Sequence[tuple[Shown, Shown]], first: int, last: int) -> str:
    """An HTML table without an empty line, so that nothing in it is read as Markdown."""

    def said(shown: Shown) -> str:
        cut = ", cut at the length limit" if shown.truncated else ""
        return f"<td>{cell(shown.text or '')}<br><sub>{cell(score_line(shown.scores))}{cut}</sub></td>"

    rows = [f"<tr><th>prompt</th><th>step {first}</th><th>step {last}</th></tr>"]
    for i, (before, after) in enumerate(pairs):
        pictures = "".join(_kept(folder, f"before_after/{i}_{n}.png", path) for n, path in enumerate(after.media))
        rows.append(f"<tr><td>{pictures}{cell(after.prompt)}</td>{said(before)}{said(after)}</tr>")
    return "\n".join(["<table>", *rows, "</table>"])


def _kept(folder: Path, name: str, path: Path) -> str:
    """A prompt's picture, small and beside the card; nothing where the file is no picture."""
    try:
        with Image.open(path) as image:
            small = image.convert("RGB")
    except (OSError, ValueError, Image.DecompressionBombError):
        return ""
    small.thumbnail((128, 128))
    (folder / name).parent.mkdir(exist_ok=True)
    small.save(folder / name)
    return f'<img src="{name}" alt="a picture of the prompt"><br>'


def _drawn(recipe: Recipe) -> str:
    """How held-out samples were drawn, for the sentence below the table."""
    if isinstance(recipe.sampling, Sampling):
        return "each time from the same noise"
    greedy = recipe.eval.temperature == 0
    return "each time the likeliest tokens" if greedy else "each time with the same random numbers"


def _table(rows: list[dict[str, Any]], step: int, drawn: str) -> str:
    """Held-out rewards, and what was measured on given pairs, at first and last; one column where that is one."""
    if not rows:
        return ""
    first, last = rows[0], rows[-1]
    keys = _figures(last)
    figure = "held-out figure" if of_pairs(last) else "held-out reward"
    if first is last:
        lines = [f"| {figure} | step {last['step']} |", "|---|---:|"]
        lines += [f"| {_label(k)} | {_number(last[k])} |" for k in keys]
    else:
        lines = [f"| {figure} | before (step {first['step']}) | after (step {last['step']}) | change |"]
        lines.append("|---|---:|---:|---:|")
        for k in keys:
            before, after = first.get(k), last[k]
            change = "" if before is None or after is None else f"{after - before:+.3f}"
            lines.append(f"| {_label(k)} | {_number(before)} | {_number(after)} | {change} |")
    later = "" if last["step"] == step else f" The weights are those of step {step}."
    counted = f"Means over {last['samples']} samples of held-out prompts, {drawn}."
    return "\n".join(["## Before and after", "", *lines, "", f"{counted}{later}"])


def _figures(row: dict[str, Any]) -> list[str]:
    return [*of_pairs(row), *(key for key in row if key.startswith("reward/")), *of_repeated(row)]


def _label(key: str) -> str:
    return key.removeprefix("reward/").replace("|", "\\|")


def _number(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.3f}"


def _place(recipe: Recipe, what: What, name: str) -> str:
    local = Path(recipe.model.path).is_absolute()
    base = f", and `{public(recipe.model.path)}` that of the base model," if what != "merged" and local else ""
    return (
        f"`{name}` is this folder{base} as seen from the folder you start in; on a hub, its name there. "
        "The base model's licence holds for these weights too."
    )


def _rewards(recipe: Recipe) -> str:
    trained = [f"- `{public(r.name)}`, weight {r.weight:g}, normalised by: {r.normalize}" for r in recipe.rewards]
    watched = [f"- `{public(r.name)}`, measured on held-out samples only" for r in recipe.eval.rewards]
    return "\n".join(["Rewards:", "", *trained, *watched]) if trained or watched else ""


def _published(value: Json, key: str = "") -> Json:
    """A setting for the card, without folders of this machine and without secrets."""
    if isinstance(value, Mapping):
        return {k: _published(v, str(k)) for k, v in value.items()}
    if isinstance(value, list):
        return [_published(v, key) for v in value]
    if not isinstance(value, str):
        return value
    return "(withheld)" if _SECRET.search(key) or masked(value, key) != value else public(value)


def _environment(directory: RunDir) -> JsonObject:
    """Versions and devices of the run (of the machine that trained, not of the one that exports)."""
    try:
        recorded = read_environment(directory.env)
    except (OSError, BadFileError):
        return {}
    return {key: recorded[key] for key in ("python", "versions", "devices", "cpu", "git") if recorded.get(key)}


def _details(title: str, content: str) -> str:
    return f"<details><summary>{title}</summary>\n\n```yaml\n{content}```\n\n</details>" if content else ""


def _yaml(value: Json) -> str:
    return yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=120) if value else ""


def quoted(text: str) -> str:
    """A Python literal in double quotes (JSON's strings are Python's), which UTF-8 can encode."""
    return json.dumps(text.encode("utf-8", "replace").decode("utf-8"), ensure_ascii=False)

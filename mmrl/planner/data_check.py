"""``mmrl data check``: shows records as the model sees them, and why records cannot be used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

import mmrl
from mmrl.config.data import Data
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.hub_files import check_files
from mmrl.core.json_types import Json
from mmrl.core.media import BadMediaError, Media, describe
from mmrl.core.trajectory import Prompt
from mmrl.data.buckets import bucket_of
from mmrl.data.checks import look
from mmrl.data.loading import lacks_media, load_data
from mmrl.data.mixture import Interleaved, Mixture, by_source
from mmrl.data.records import BadRecord
from mmrl.data.tables import has_file, is_table
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.planner.prompt_check import unread_messages
from mmrl.planner.unread import few, unread

_VARIES = re.compile(r"'[^']*'|\"[^\"]*\"|\d[\d,.]*")
"""The parts of a reason that differ from record to record."""


@dataclass(kw_only=True)
class Read:
    """What the model reads of a prompt. ``rendered``: the text, with special tokens, ``tokens`` in number; None if no
    model is known, or if the prompt would be left out."""

    rendered: str | None = None
    tokens: int | None = None
    responses: dict[str, int] = field(default_factory=dict)
    """The number of tokens of each given text (both of a pair, or a response)."""
    spelled: dict[str, int] = field(default_factory=dict)
    """The model's control tokens that the record's own text spells, and how often; they are read as text."""
    frames: list[int] = field(default_factory=list)
    """How many frames of each of its clips the model is shown."""


@dataclass
class Record(Read):
    """A prompt. ``problem`` says why it would be left out. ``media``: each with its size."""

    id: str
    text: str
    system: str | None = None
    meta: Mapping[str, Json] = field(default_factory=dict)
    settings: dict[str, Json] = field(default_factory=dict)
    """What the record sets in place of the recipe: ``negative_prompt``, ``max_new_tokens``, and of a recipe with
    ``sampling.buckets`` the ``size`` that the prompt is sampled at, height x width."""
    media: list[str] = field(default_factory=list)
    problem: str | None = None


@dataclass(kw_only=True)
class Looked:
    """What was measured on the prompts that were looked at."""

    tokens: dict[str, float] = field(default_factory=dict)
    """The smallest, mean and largest number of tokens."""
    sizes: dict[str, int] = field(default_factory=dict)
    """The number of prompts, by the size of ``sampling.buckets`` that they are sampled at."""
    spelled: dict[str, int] = field(default_factory=dict)
    """The number of prompts, by the control token of the model that their text spells."""
    frames: dict[str, float] = field(default_factory=dict)
    """The fewest, mean and most frames that the model is shown of a clip."""


@dataclass
class Split(Looked):
    """``records``: in the whole source, before it is split; ``prompts``: in this split. ``left_out``: the number of
    bad records of the source by reason; ``unusable``: the same for those of ``looked_at`` prompts that the model cannot
    read; ``first``: the first example of each reason."""

    records: int
    prompts: int
    left_out: dict[str, int]
    unusable: dict[str, int]
    first: dict[str, str]
    looked_at: int
    shown: list[Record]
    sources: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    """What the prompts that were looked at carry and the model does not read, and how many are cut."""


@dataclass
class Checked:
    """``model``: the model that reads the prompts, or why it is unknown; ``settings``: what is added to each prompt."""

    splits: dict[str, Split]
    model: str
    settings: dict[str, Json] = field(default_factory=dict)

    @property
    def faults(self) -> int:
        """Records and prompts that cannot be used."""
        return sum(sum(of.left_out.values()) + sum(of.unusable.values()) for of in self.splits.values())

    def as_json(self) -> Mapping[str, Json]:
        return asdict(self)


Reader = Callable[[Prompt, Record], None]
"""Fills in how a model reads a prompt. Raises ``BadPromptError`` if it cannot."""


class _Model(NamedTuple):
    """What reads the prompts: ``model`` describes it, ``settings`` are added to each prompt, and ``notes`` says of some
    prompts what is not used."""

    model: str
    read: Reader | None = None
    settings: dict[str, Json] = {}  # noqa: RUF012
    notes: Callable[[Sequence[Prompt]], list[str]] = lambda _: []


def check_recipe(recipe: Recipe, shown: int, looked_at: int) -> Checked:
    """Check the data of a recipe, with its model if configuration and tokenizer are available; loads no weights."""
    found = _reader(recipe)
    splits = _splits(recipe.data, found, shown, looked_at, recipe)
    return Checked(splits, found.model, found.settings)


def check_data(data: Data, shown: int, looked_at: int) -> Checked:
    """Check a data set without a model."""
    none = _Model("none: name a recipe to see what its model reads")
    return Checked(_splits(data, none, shown, looked_at), none.model)


def data_at(target: str, options: Mapping[str, Json]) -> Data:
    """The data set that ``target`` names: a file, a folder, a shipped or hub name, or ``file.py:function``."""
    path = Path(target)
    if path.suffix.lower() == ".txt":
        name = "prompts"
    elif path.is_dir() and has_file(path, ".tar"):
        name = "shards"
    elif (path.is_file() and path.suffix != ".py") or (path.is_dir() and is_table(path)):
        name = "jsonl"
    elif path.is_dir():
        name = "folder"
    else:
        return Data(name=target, train=dict(options), heldout=dict(options))
    given = {"path": str(path.resolve()), **options}
    return Data(name=name, train=given, heldout=given)


def _splits(data: Data, model: _Model, shown: int, looked_at: int, recipe: Recipe | None = None) -> dict[str, Split]:
    lenient = data.model_copy(update={"max_bad_fraction": 1.0})  # every bad record is reported
    found = {
        split: _split(lenient, load_data(lenient, split, recipe), model, shown, looked_at, recipe)
        for split in ("train", "heldout")
    }
    if recipe is not None:
        found["train"].notes += few(recipe, found["train"].prompts)
    return found


def _split(
    data: Data, prompts: Sequence[Prompt], model: _Model, shown: int, looked_at: int, recipe: Recipe | None
) -> Split:
    if isinstance(prompts, Mixture):
        prompts = Interleaved(prompts.parts)  # so that the first prompts come from all sources
    bad: list[BadRecord] = list(getattr(prompts, "bad", ()))
    left_out, unusable, first = Counter[str](), Counter[str](), dict[str, str]()
    for record in bad:
        left_out[_kind(record.why)] += 1
        first.setdefault(_kind(record.why), str(record))
    records, counts, seen, sizes = list[Record](), list[int](), list[Prompt](), Counter[str]()
    frames, spelled = list[int](), Counter[str]()
    for n in range(min(len(prompts), max(shown, looked_at if model.read else 0))):
        seen.append(prompts[n])
        record = _record(seen[-1], model.read, sizes=n < shown)
        if recipe is not None and recipe.makes != "text":
            record.text, record.system = seen[-1].text, None  # these models read one text
        if record.problem is not None:
            unusable[_kind(record.problem)] += 1
            first.setdefault(_kind(record.problem), f"{record.id}: {record.problem}")
        elif record.tokens is not None:
            counts.append(record.tokens)
        sizes.update([str(record.settings["size"])] if "size" in record.settings else [])
        spelled.update(record.spelled.keys())
        frames += record.frames
        records += [record] if n < shown else []
    total = getattr(prompts, "seen", len(prompts) + len(bad))
    parts = by_source(seen, data.labels)
    return Split(
        total,
        len(prompts),
        dict(left_out),
        dict(unusable),
        first,
        len(seen),
        records,
        {label: len(of) for label, of in parts.items()},
        tokens=_spread(counts),
        sizes=dict(sizes),
        spelled=dict(spelled),
        frames=_spread(frames),
        notes=[*model.notes(seen), *([] if recipe is None else unread_messages(recipe, seen))],
    )


def _spread(counts: Sequence[int]) -> dict[str, float]:
    return {"fewest": min(counts), "mean": sum(counts) / len(counts), "most": max(counts)} if counts else {}


def _record(prompt: Prompt, read: Reader | None, *, sizes: bool) -> Record:
    own = {"negative_prompt": prompt.negative_prompt, "max_new_tokens": prompt.max_new_tokens}
    settings: dict[str, Json] = {name: value for name, value in own.items() if value is not None}
    found = Record(prompt.id, prompt.conversation, prompt.system, dict(prompt.meta), settings)
    try:
        found.media = [_size(medium) for medium in prompt.media] if sizes else []
        if read is not None:
            read(prompt, found)
    except BadPromptError as error:
        found.problem = error.reason
    except (BadMediaError, UserError) as error:
        found.problem = str(error)
    return found


def _size(medium: Media) -> str:
    """The kind of a medium and its size in pixels. Raises ``BadMediaError``."""
    found = look(medium, "headers")
    frames = ""
    if "frames" in found and "fps" in found:
        frames = f", {found['frames']} frames at {found['fps']:g} per second"
    return f"{medium.kind} {found['width']} x {found['height']}{frames} ({describe(medium)})"


def _reader(recipe: Recipe) -> _Model:
    """The recipe's model as it reads prompts, without its weights."""
    architecture = Path(recipe.architecture) if recipe.architecture else None
    try:
        module = mmrl.load("pipelines", recipe.pipeline)
        if not hasattr(module, "describe"):
            said = f"not known: {recipe.pipeline} has no describe(recipe, path, architecture)"
            return _Model(said, _of_size(recipe))
        check_files(recipe.model.path)
        description = module.describe(recipe, recipe.model.path, architecture)
    except UserError as error:
        return _Model(f"not known: {error}", _of_size(recipe))
    pipeline = description.pipeline
    if recipe.makes == "text":
        settings: dict[str, Json] = {"overlong": recipe.overlong, "max_new_tokens": recipe.decoding.max_new_tokens}
        return _Model(description.source, _of_text(pipeline), settings)
    lengths: _Lengths | None = getattr(pipeline, "lengths_of_prompts", None)

    def notes(prompts: Sequence[Prompt]) -> list[str]:
        cut = lengths.said_of(prompts) if lengths is not None and recipe.overlong == "cut" else []
        return [*unread(recipe, prompts, reads_media=pipeline.reads_media), *cut]

    settings = _of_pictures(recipe, getattr(pipeline, "adapter", None))
    return _Model(description.source, _of_picture(recipe, lengths), settings, notes)


class _Lengths(Protocol):
    """How many tokens of prompts the text encoders of a pipeline of pictures read."""

    def of(self, prompt: Prompt) -> tuple[int, int] | None: ...

    def check(self, prompt: Prompt) -> None: ...

    def said_of(self, prompts: Sequence[Prompt]) -> list[str]: ...


def _of_text(pipeline: LanguagePipeline) -> Reader:
    def read(prompt: Prompt, record: Record) -> None:
        skip = None if pipeline.recipe.overlong == "cut" else "skip"
        used, features = pipeline.fitter.encode(prompt, pipeline.limit, skip)
        record.rendered, record.tokens = pipeline.conditioner.render(used), len(features["input_ids"])
        record.spelled = pipeline.conditioner.texts.found(used)
        record.frames = [len(clip.indices) for clip in pipeline.conditioner.media(used)[1]]
        if pipeline.pairs is not None:
            given = pipeline.pairs.encoded(used, record.tokens)
            record.responses = {name: len(given[name]) for name in pipeline.pairs.columns}

    return read


def _of_picture(recipe: Recipe, lengths: _Lengths | None) -> Reader:
    """Counts tokens, and fills in at which of several sizes a prompt is sampled."""
    size = _of_size(recipe)

    def read(prompt: Prompt, record: Record) -> None:
        if size is not None:
            size(prompt, record)
        if why := lacks_media(recipe, prompt):
            raise BadPromptError(prompt.id, why)
        if lengths is not None and (found := lengths.of(prompt)) is not None:
            record.tokens = found[0]
            lengths.check(prompt)

    return read


def _of_size(recipe: Recipe) -> Reader | None:
    """Fills in at which of several sizes a prompt is sampled."""
    if recipe.makes == "text" or recipe.denoising.buckets is None:
        return None

    def read(prompt: Prompt, record: Record) -> None:
        record.settings["size"] = str(bucket_of(prompt, recipe.denoising))

    return read


def _of_pictures(recipe: Recipe, adapter: object) -> dict[str, Json]:
    """The size of the samples, and the negative prompt of guidance."""
    sampling = recipe.denoising
    settings: dict[str, Json] = {"width": sampling.width, "height": sampling.height, "steps": sampling.steps}
    settings["overlong"] = recipe.overlong
    if sampling.buckets is not None:
        settings["buckets"] = [str(size) for size in sampling.sizes]
    if sampling.frames is not None:
        settings["frames"] = sampling.frames
    settings["guidance_scale"] = sampling.guidance_scale
    if sampling.guidance_scale > 1:
        settings["negative_prompt"] = getattr(adapter, "negative", None)
    return settings


def _kind(why: str) -> str:
    """A reason without the parts that differ from record to record."""
    return _VARIES.sub("...", why.splitlines()[0] if why else why)

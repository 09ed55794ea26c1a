"""The section ``data``: a data set, or a mixture of several."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt

from mmrl.config.section import Fraction, Options, OwnClass, Section
from mmrl.core.json_types import JsonObject
from mmrl.core.media_limits import LIMITS

MOST_SOURCES = 64


class Source(Section):
    """One of the data sets of a mixture."""

    name: str
    """As ``data.name``."""
    label: str | None = None
    """Its name in metrics, and the prefix of its prompts' ids; None takes the last part of ``name``."""
    weight: PositiveFloat = 1.0
    """Its share of the training prompts is this weight divided by the sum of all weights."""
    train: Options | None = Field(default_factory=dict)
    """Its options for training; null leaves it out of training."""
    heldout: Options | None = Field(default_factory=dict)
    """Its options for evaluation; null leaves it out of evaluation."""


class Sampler(Section):
    """A class that chooses the prompts of each step (``mmrl.data.sampler``)."""

    name: OwnClass
    """``path/to/file.py:Class``."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of its constructor."""


def _sampler_settings(value: object) -> object:
    return {"name": value} if isinstance(value, str) else value


class Data(Section):
    """A data set by name or path/to/file.py:function, and its keyword arguments."""

    name: str
    """``shapes``, ``org/name`` of the hub, ``path/to/file.py:prompts``; empty with ``mixture``."""
    train: Options = Field(default_factory=dict)
    """Keyword arguments for the prompts of training."""
    heldout: Options = Field(default_factory=dict)
    """Keyword arguments for the prompts of evaluation."""
    mixture: Annotated[list[Source], Field(max_length=MOST_SOURCES)] = Field(default_factory=list)
    """Several data sets in place of one, with weights."""
    sampler: Annotated[Sampler | None, BeforeValidator(_sampler_settings)] = None
    """``path/to/file.py:Class``, or a section: chooses the prompts of each step. None takes all prompts in epochs."""
    max_bad_fraction: Fraction = 0.01
    """Bad records are left out, counted and named in failures.jsonl; above this share of them the run stops."""
    overlong: Literal["skip", "cut", "error"] | None = None
    """Prompts with too many tokens. Text: more (tokens of pictures included) than sampling.max_prompt_tokens, or than
    the context has room for besides max_new_tokens. Pictures: more than the text encoder reads, of several encoders the
    one that reads most. ``skip``: the prompt is left out, named and replaced; ``cut``: the text loses its beginning
    (text), or its end (pictures); ``error``: the run does not start, and the prompts are named. None is ``skip`` for
    text and ``cut`` for pictures."""
    fps: PositiveFloat | None = None
    """Clips in prompts: frames that are shown per second; None takes the checkpoint's rate, or 2 where it has none. A
    record's own ``fps`` or ``nframes`` comes first."""
    max_frames: Annotated[PositiveInt, Field(le=LIMITS.frames)] | None = None
    """Clips in prompts: the most frames that are shown of one, spread evenly; None takes the checkpoint's limit. A
    record's own ``max_frames`` comes first."""

    @property
    def names(self) -> list[str]:
        """The name of each data set."""
        return [source.name for source in self.mixture] or [self.name]

    @property
    def labels(self) -> list[str]:
        """The names of a mixture's sources in metrics; empty for a single data set."""
        return [source_label(source) for source in self.mixture]

    @property
    def in_files(self) -> bool:
        """Whether records are read, and not all made by a program."""
        options = [given for source in self.mixture or [self] for given in (source.train, source.heldout)]
        return any("path" in given for given in options if given)

    def contradictions(self) -> Iterator[str]:
        if not self.mixture:
            if not self.name:
                yield "data.name: it is empty; name a data set (mmrl ls datasets), or several in data.mixture"
            return
        for key in ("name", "train", "heldout"):
            if getattr(self, key):
                yield f"data.{key}: data.mixture names the data sets and their options; remove data.{key}"
        for i, label in enumerate(self.labels):
            if label in self.labels[:i]:
                yield f"data.mixture[{i}].label: two sources are called {label!r}; give them different labels"
            elif not label or "/" in label or label.strip() != label:
                yield f"data.mixture[{i}].label: {label!r} cannot be part of a metric's name; write one without '/'"
        for split in ("train", "heldout"):
            if all(getattr(source, split) is None for source in self.mixture):
                yield f"data.mixture: every source has {split}: null, which leaves no prompts; give one of them options"
        total = sum(source.weight for source in self.mixture if source.train is not None)
        for i, source in enumerate(self.mixture):
            if source.train is not None and source.weight / total < 1e-3:
                yield (
                    f"data.mixture[{i}].weight: {source.weight:g} of {total:g} is less than a prompt in 1000; raise "
                    "it, or remove the source"
                )


def without_name(values: JsonObject) -> JsonObject:
    """``values`` of a recipe, whose ``data`` needs no name where it has a mixture."""
    data = values.get("data")
    if not isinstance(data, Mapping) or not data.get("mixture") or "name" in data:
        return values
    return {**values, "data": {**data, "name": ""}}


def source_label(source: Source) -> str:
    """The source's name in metrics: its label, else the attribute, the file or the last part of its name."""
    if source.label is not None:
        return source.label
    return source.name.removesuffix(":prompts").rpartition(":")[2].rpartition("/")[2].removesuffix(".py")

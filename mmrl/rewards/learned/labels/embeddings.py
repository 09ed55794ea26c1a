"""Embeddings of samples with their prompts: which encoders, and one space for all samples.

A sample has one part or two, itself and its prompt. Each part is centred on the mean of the samples that the space was
made of, and gets length 1, so that the cosine of two embeddings is the mean of their parts'. Where a model reads a
picture with its prompt, the sizes of its errors are one more part, and the two of them alone are two more. These are no
part of the embedding: a size that got length 1 would be lost.

Answers are embedded by the language model that wrote them, which reads each behind its prompt and its pictures. One
part are the model's states at the end of the prompt and at the end of the answer (``mmrl.rewards.encoders.texts``); the
other are probabilities: what the model gives to the answer's first token, to all of them together, to a token in the
mean (geometric), to the least likely one, and to the end of the answer. They say how sure the model was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import torch
from PIL import Image
from pydantic import Field
from torch import Tensor
from torch.nn.functional import normalize

import mmrl
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.json_types import JsonObject
from mmrl.core.media import BadMediaError, open_image
from mmrl.core.packages.places import lacking
from mmrl.core.trajectory import Sample
from mmrl.logging.progress import Progress
from mmrl.rewards.encoders.described import described as described_texts
from mmrl.rewards.encoders.described import stored
from mmrl.rewards.encoders.texts import Question, States, TextReader
from mmrl.rewards.learned.labels import pixels
from mmrl.rewards.learned.labels.items import Item, Kind
from mmrl.rewards.learned.labels.readers import ModelReader
from mmrl.rewards.learned.labels.readers import described as described_pictures

PIXELS, WORDS, MODEL = "pixels", "words", "model"
MINILM = "package:all-minilm-l6-v2"
NOISES, MOST_NOISES = 2, 16
"""Under how many noises a model reads a picture: its error is known better under two opposite ones."""
_BATCH = 64


@dataclass(frozen=True)
class Content:
    """What is embedded of a sample: its prompt, and its text, its picture or the frames of its clip. ``pictures``:
    those of a text's prompt."""

    prompt: str = ""
    text: str = ""
    frames: tuple[Image.Image, ...] = ()
    pictures: tuple[Image.Image, ...] = ()


@dataclass(frozen=True)
class Encoders:
    """``samples``: ``pixels``, ``words``, ``model`` or the sentence encoder that embeds texts. ``prompts``: ``words``,
    a sentence encoder, or empty where prompts have no part of their own; the last two parts are then the sample alone
    and its prompt alone. ``model``: what ``ModelReader`` reads with."""

    kind: Kind
    samples: str
    prompts: str
    model: Mapping[str, Any] | None = None
    noises: Annotated[int, Field(ge=1, le=MOST_NOISES)] = 1
    """Under how many noises the model reads a picture, in the mean."""

    @property
    def apart(self) -> int:
        """How many of the last parts are the sample alone and its prompt alone."""
        return 2 if self.prompts and self.model is not None else 0

    @property
    def sizes(self) -> int:
        """How many parts before these are numbers that count as they are."""
        return 1 if self.kind == "image" and self.model is not None else 0

    @classmethod
    def for_items(
        cls, items: Sequence[Item], texts: str | None = None, model: JsonObject | None = None, noises: int = NOISES
    ) -> Encoders:
        """For these samples. ``texts``: what embeds texts and prompts, ``words`` or a sentence encoder; None: MiniLM
        where it is set up, else words. ``model``: the model that reads pictures, or texts, with their prompts; pictures
        under so many ``noises``. Raises ``UserError`` where it reads other samples."""
        kind = items[0].kind
        if model is not None and (makes := stored(model).makes) != kind:
            raise UserError(
                f"--model: this recipe's model makes {makes}, and these samples are of the kind {kind}; name the "
                "recipe that made them, or leave --model out"
            )
        chosen = texts or (WORDS if lacking(MINILM) else MINILM)
        prompts = chosen if len({item.prompt for item in items}) > 1 else ""
        if model is not None:
            return cls(kind, MODEL, "", model) if kind == "text" else cls(kind, MODEL, prompts, model, noises)
        return cls(kind, chosen if kind == "text" else PIXELS, prompts)


def model_of(recipe: Recipe) -> JsonObject:
    """The model of a recipe that reads pictures or texts, as a reward's folder keeps it. Raises ``UserError`` for one
    that makes neither."""
    return described_texts(recipe) if recipe.makes == "text" else described_pictures(recipe)


class _Sentences(Protocol):
    def embed(self, texts: Sequence[str]) -> Tensor: ...


class Embedder:
    """The parts of samples' embeddings. Raises ``UserError`` where an encoder is not there."""

    def __init__(self, encoders: Encoders) -> None:
        self.encoders = encoders
        named = {encoders.samples, encoders.prompts} - {PIXELS, WORDS, MODEL, ""}
        self._sentences: dict[str, _Sentences] = {p: mmrl.load("rewards", "relevance").Relevance(p) for p in named}
        self._model = self._answers = None
        if encoders.model is not None and encoders.kind == "text":
            self._answers = AnswerReader(encoders.model)
        elif encoders.model is not None:
            self._model = ModelReader(encoders.model, encoders.noises)
        self._prompts: dict[str, Tensor] = {}
        """A prompt is embedded once: most samples share theirs with others."""

    def parts(self, contents: Sequence[Content]) -> list[Tensor]:
        """One tensor ``[B, D]`` for each part."""
        kind = self.encoders.kind
        prompts = [content.prompt for content in contents]
        found: list[Tensor] = []
        if self._answers is not None:
            texts = [content.text for content in contents]
            return self._answers.parts(texts, prompts, [content.pictures for content in contents])
        if self._model is not None:
            found += self._model.parts([content.frames[0] for content in contents], prompts)
            if not self.encoders.prompts:
                return found
        if kind == "text":
            found.append(self._texts([content.text for content in contents], self.encoders.samples))
        elif kind == "image":
            found.append(pixels.of_pictures([content.frames[0] for content in contents]))
        else:
            found.append(pixels.of_clips([content.frames for content in contents]))
        if self.encoders.prompts:
            new = [prompt for prompt in dict.fromkeys(prompts) if prompt not in self._prompts]
            if new:
                self._prompts |= dict(zip(new, self._texts(new, self.encoders.prompts), strict=True))
            found.append(torch.stack([self._prompts[prompt] for prompt in prompts]))
        return found

    def _texts(self, texts: Sequence[str], encoder: str) -> Tensor:
        if encoder == WORDS:
            return pixels.of_texts(texts)
        return self._sentences[encoder].embed([text.strip() for text in texts])


@dataclass(frozen=True)
class Space:
    """``centre`` ``[D]``: the mean of the parts, one behind the other; ``widths``: the numbers of each part;
    ``apart`` and ``sizes``: as of ``Encoders``."""

    centre: Tensor
    widths: tuple[int, ...]
    apart: int = 0
    sizes: int = 0

    @classmethod
    def of(cls, parts: Sequence[Tensor], encoders: Encoders | None = None) -> Space:
        """``encoders``: what made the parts; None: all parts are of the embedding."""
        apart, sizes = (0, 0) if encoders is None else (encoders.apart, encoders.sizes)
        return cls(torch.cat(list(parts), 1).mean(0), tuple(part.shape[1] for part in parts), apart, sizes)

    def __call__(self, parts: Sequence[Tensor]) -> Tensor:
        """Embeddings ``[B, D]``."""
        return torch.cat(self.moved(parts)[: len(parts) - self.apart - self.sizes], 1)

    def moved(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """The parts, centred, rows of length 1."""
        return [normalize(part, dim=1) for part in self._centred(parts)]

    def numbers(self, parts: Sequence[Tensor]) -> Tensor:
        """The numbers that count as they are, centred: ``[B, S]``."""
        last = len(parts) - self.apart
        return torch.cat([parts[0][:, :0], *self._centred(parts)[last - self.sizes : last]], 1)

    def _centred(self, parts: Sequence[Tensor]) -> Sequence[Tensor]:
        return (torch.cat(list(parts), 1) - self.centre).split(self.widths, 1)


def embedded(items: Sequence[Item], encoders: Encoders) -> tuple[list[Item], list[Tensor], list[str]]:
    """The samples that can be read, their parts ``[N, D]``, and why others were left out. Raises ``UserError``."""
    embedder, kept, bad = Embedder(encoders), list[Item](), list[str]()
    rows: list[list[Tensor]] = []
    with Progress(len(items), "embed", "samples") as progress:
        for first in range(0, len(items), _BATCH):
            batch = items[first : first + _BATCH]
            contents: list[Content] = []
            for item in batch:
                try:
                    contents.append(content_of(item))
                    kept.append(item)
                except BadMediaError as error:
                    bad.append(str(error))
            if contents:
                rows.append(embedder.parts(contents))
            progress.advance(len(batch))
    if not kept:
        raise UserError(f"none of {len(items)} samples can be read: {bad[0]}")
    return kept, [torch.cat(part) for part in zip(*rows, strict=True)], bad


def content_of(item: Item) -> Content:
    """Raises ``BadMediaError``."""
    if item.kind == "text":
        return Content(item.prompt, item.text, pictures=tuple(item.shown()))
    return Content(item.prompt, frames=tuple(item.frames()))


def sampled(sample: Sample, *, pictures: bool) -> Content | None:
    """What is embedded of a sample of a run; None where it shows nothing. ``pictures``: whether those of a text's
    prompt are read."""
    prompt = sample.prompt.conversation
    if sample.text is not None:
        shown = (open_image(media) for media in sample.prompt.media if media.kind == "image") if pictures else ()
        return Content(prompt, sample.text, pictures=tuple(shown))
    frames = (sample.image,) if sample.image is not None else sample.video or ()
    return Content(prompt, frames=tuple(frames)) if frames else None


class AnswerReader:
    """Raises ``UserError`` where the model is not there any more."""

    def __init__(self, model: JsonObject) -> None:
        self.reader = TextReader(model, "embeds texts", "mmrl spread")

    def parts(
        self, texts: Sequence[str], prompts: Sequence[str], pictures: Sequence[tuple[Image.Image, ...]]
    ) -> list[Tensor]:
        """The states and the probabilities of answers to prompts with pictures, ``[B, D]`` each. Raises ``UserError``
        for a prompt that the model cannot read."""
        found: list[Question] = []
        places: list[int] = []
        for prompt, shown in zip(prompts, pictures, strict=True):
            question = Question(prompt, shown)
            if not found or found[-1] != question:  # the answers to a question mostly follow one another
                found.append(question)
            places.append(len(found) - 1)
        try:
            read = self.reader.states(self.reader.asked(found, places, texts))
        except BadPromptError as error:
            raise UserError(
                f"--model cannot read the prompt {found[int(error.prompt)].text[:60]!r}: {error.reason}; take its "
                "samples out of the folder, or leave --model out"
            ) from error
        last = read.mask.sum(1).long() - 1
        ends = read.answers[torch.arange(len(last)), last]
        return [torch.cat([read.before, ends], 1), _probabilities(read, last)]


def _probabilities(read: States, last: Tensor) -> Tensor:
    log_probs, mask = read.log_probs, read.mask
    total = log_probs.sum(1)
    least = log_probs.masked_fill(mask == 0, 0.0).amin(1)
    end = log_probs[torch.arange(len(last)), last]
    return torch.stack([log_probs[:, 0], total, total / mask.sum(1), least, end], 1).exp()

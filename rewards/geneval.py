"""GenEval (Ghosh et al. 2023, arXiv 2310.11513): does the picture have the right objects, counts, colours, positions?

A detector finds objects (Mask2Former with a Swin-S, as GenEval's) and CLIP classifies their colours. The wish
stands in the prompt's meta as in GenEval's ``evaluation_metadata.jsonl``: ``tag``, ``include`` (each a ``class`` and a
``count``, perhaps a ``color``, or a ``position`` like ``["left of", 0]``: of the object ``include[0]``), ``exclude``.

Three verdicts: ``correct`` is GenEval's own, 0 or 1, which counts that many or more; ``strict`` asks for exactly as
many; ``partial``, which Flow-GRPO trains on (arXiv 2505.05470), is the mean over all that is asked for, met in part: of
a count 1 - |found - wanted| / wanted, so less than 0 where far too many are found. Departure: its server adds 1 for a
position whatever it found; here a wrong one counts 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import torch
from PIL import Image as pil
from PIL.Image import Image

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.plugins.user_code import describe
from mmrl.core.reward_contract import Context, Failed, Value, Weights
from mmrl.core.trajectory import Sample
from mmrl.rewards.sleeping import Sleeping

from .clip import load_clip
from .detectors import Detector, Found

DEFAULT = "facebook/mask2former-swin-small-coco-instance"
CLIP = "openai/clip-vit-large-patch14"
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "pink", "brown", "black", "white")
POSITIONS = ("left of", "right of", "above", "below")
VERDICTS = ("partial", "correct", "strict")
THRESHOLD, COUNTING_THRESHOLD = 0.3, 0.9
MOST = 16
"""Objects of a class that are looked at."""
_APART = 0.1
_GREY = (153, 153, 153)
_TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")

Objects: TypeAlias = "Mapping[str, Sequence[Found]]"


def _models(options: Mapping[str, Any]) -> list[Weights]:
    return [Weights(str(options.get("path", DEFAULT))), Weights(str(options.get("clip", CLIP)))]


@dataclass(frozen=True)
class Wish:
    """One entry of ``include``: ``count`` objects ``name``, so coloured, or so placed to those of wish ``target``."""

    name: str
    count: int
    colour: str | None = None
    position: str | None = None
    target: int = 0


@dataclass
class Verdict:
    """``terms``: how far each wish is met. ``matched``: the objects that met it, None where it was not."""

    terms: list[float] = field(default_factory=list)
    met: bool = True
    matched: list[Sequence[Found] | None] = field(default_factory=list)


@mmrl.reward(device=True, paths=("path", "clip"), models=_models, checks=True)
class GenEval(Sleeping):
    """GenEval's verdicts on each picture. ``clip`` classifies colours.

    ``reward``: which verdict is the score, ``partial``, ``correct`` or ``strict``; the others are logged.
    """

    def __init__(self, path: str = DEFAULT, clip: str = CLIP, reward: str = "partial") -> None:
        if reward not in VERDICTS:
            raise UserError(f"options.reward is {reward!r}; set it to partial, correct or strict")
        self.names = {name: "score" if name == reward else name for name in VERDICTS}
        mmrl.before_loading()
        self.detector = Detector(path, THRESHOLD)
        self.colours = Colours(clip)
        self.frozen(self.detector.model, lambda: Detector(path, THRESHOLD).model)
        self.frozen(self.colours.model, lambda: Colours(clip).model)

    def score(self, samples: Sequence[Sample], *, context: Context) -> dict[str, list[Value]]:
        """``score`` and the other two verdicts of each sample; a prompt whose meta is not GenEval's fails."""
        self.wake(context.device)
        wanted = [self._wanted(sample) for sample in samples]
        images = [s.image for s, wishes in zip(samples, wanted, strict=True) if isinstance(wishes, list) and s.image]
        found = iter(self.detector.find(images, context.device))
        rows: list[Mapping[str, Value]] = []
        for sample, wishes in zip(samples, wanted, strict=True):
            if isinstance(wishes, list) and sample.image:
                rows.append(self._judged(sample.image, next(found), wishes, sample.prompt.meta, context))
            else:
                rows.append(dict.fromkeys(VERDICTS, wishes if isinstance(wishes, Failed) else None))
        return {part: [row[name] for row in rows] for name, part in self.names.items()}

    def _judged(
        self, image: Image, found: Objects, wishes: Sequence[Wish], meta: Mapping[str, Any], context: Context
    ) -> dict[str, float]:
        least = COUNTING_THRESHOLD if meta.get("tag") == "counting" else THRESHOLD
        objects = {name: [one for one in ones if one.score > least][:MOST] for name, ones in found.items()}

        @cache
        def colours(name: str, count: int) -> list[str]:
            return self.colours.of(image, objects[name][:count], name, context)

        exactly = judged(objects, wishes, colours, exact=True)
        spared = all(len(objects.get(one["class"], ())) < one["count"] for one in meta.get("exclude") or ())
        return {
            "partial": sum(exactly.terms) / len(exactly.terms),
            "correct": float(spared and judged(objects, wishes, colours, exact=False).met),
            "strict": float(exactly.met),
        }

    def _wanted(self, sample: Sample) -> list[Wish] | Failed:
        """The objects that the prompt's meta asks for, or ``Failed`` with the reason."""
        try:
            wishes = read_wishes(sample.prompt.meta)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return Failed(
                f"the prompt's meta is not GenEval's ({describe(error)}); read evaluation_metadata.jsonl with "
                "data.name=jsonl and meta: [tag, include, exclude]"
            )
        unknown = [wish.name for wish in wishes if wish.name not in self.detector.names.values()]
        return Failed(f"the detector knows no {unknown[0]!r}; correct the prompt's meta") if unknown else wishes


score = GenEval


class Colours:
    """Which of ``COLOURS`` an object has, classified by a CLIP model from its pixels on grey. Raises ``UserError``.

    It is asked where ``model`` is.
    """

    def __init__(self, path: str) -> None:
        self.model, self._processor = load_clip(path, path, "clip")
        self._known: dict[str, torch.Tensor] = {}

    def of(self, image: Image, objects: Sequence[Found], name: str, context: Context) -> list[str]:
        """One colour for each of ``objects`` of the class ``name``."""
        crops = [_cut_out(image, one) for one in objects]
        pixels = self._processor.image_processor(crops, return_tensors="pt")["pixel_values"].to(context.device)
        seen = self.model.visual_projection(self.model.vision_model(pixel_values=pixels).pooler_output)
        said = self._said(name, context)
        best = (torch.nn.functional.normalize(seen, dim=-1) @ said.T).argmax(1)
        return [COLOURS[i] for i in best.tolist()]

    def _said(self, name: str, context: Context) -> torch.Tensor:
        """What each colour of ``name`` is like, ``[10, D]``: the mean over the templates, normalised."""
        if name not in self._known:
            texts = [text.format(colour=colour, name=name) for colour in COLOURS for text in _TEMPLATES]
            tokens = self._processor.tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
            read = self.model.text_model(**tokens.to(context.device)).pooler_output
            each = torch.nn.functional.normalize(self.model.text_projection(read), dim=-1)
            mean = each.view(len(COLOURS), len(_TEMPLATES), -1).mean(1)
            self._known[name] = torch.nn.functional.normalize(mean, dim=-1)
        return self._known[name].to(context.device)


def judged(
    objects: Objects, wishes: Sequence[Wish], colours: Callable[[str, int], Sequence[str]], *, exact: bool
) -> Verdict:
    """How far ``wishes`` are met. ``exact``: by that many objects and no more; else by the surest of them.

    ``colours(name, n)`` are those of the surest ``n`` objects.
    """
    verdict = Verdict()
    for wish in wishes:
        have = objects.get(wish.name, ())
        met = len(have) == wish.count if exact else len(have) >= wish.count
        chosen = have[: wish.count]
        verdict.terms.append(1 - abs(wish.count - len(have)) / wish.count)
        if wish.colour is not None:
            so_coloured = list(colours(wish.name, wish.count)).count(wish.colour) if met else 0
            verdict.terms.append(so_coloured / wish.count)
            met = so_coloured == wish.count
        if wish.position is not None:
            others = verdict.matched[wish.target]
            met = met and others is not None and all(wish.position in placed(a, b) for a in chosen for b in others)
            verdict.terms.append(float(met))
        verdict.matched.append(chosen if met else None)
        verdict.met = verdict.met and met
    return verdict


def placed(one: Found, other: Found) -> set[str]:
    """Where ``one`` lies as seen from ``other``; nowhere if they overlap by more than a tenth of their sizes."""
    ends = [(o.box[axis], o.box[axis + 2]) for axis in (0, 1) for o in (one, other)]
    offset = [(sum(ends[i]) - sum(ends[i + 1])) / 2 for i in (0, 2)]
    sizes = [ends[i][1] - ends[i][0] + ends[i + 1][1] - ends[i + 1][0] for i in (0, 2)]
    apart = [math.copysign(max(abs(o) - _APART * s, 0), o) for o, s in zip(offset, sizes, strict=True)]
    if max(map(abs, apart)) < 1e-3:
        return set()
    x, y = (distance / math.hypot(*offset) for distance in apart)
    return {name for name, far in zip(POSITIONS, (-x, x, -y, y), strict=True) if far > 0.5}


def read_wishes(meta: Mapping[str, Any]) -> list[Wish]:
    """The entries of ``include``. Raises ``ValueError``, ``KeyError``, ``TypeError`` where it is not GenEval's."""
    wishes: list[Wish] = []
    for one in [*meta["include"], *(meta.get("exclude") or ())]:
        if not isinstance(one["class"], str) or type(one["count"]) is not int or one["count"] < 1:
            raise ValueError(f"{one} has no class and count")
    for i, one in enumerate(meta["include"]):
        colour, (position, target) = one.get("color"), one.get("position") or (None, 0)
        if colour is not None and colour not in COLOURS:
            raise ValueError(f"{colour!r} is none of the colours {', '.join(COLOURS)}")
        if position is not None and (position not in POSITIONS or target not in range(i)):
            raise ValueError(f"{one['position']} is none of {', '.join(POSITIONS)} an earlier entry")
        wishes.append(Wish(one["class"], one["count"], colour, position, target))
    if not wishes:
        raise ValueError("include is empty")
    return wishes


def _cut_out(image: Image, one: Found) -> Image:
    """The object in its box, grey where the box holds anything else."""

    if one.mask is not None:
        grey = pil.new("RGB", image.size, _GREY)
        image = pil.composite(image, grey, pil.fromarray(one.mask.astype(np.uint8) * 255))
    left, top, right, bottom = (round(end) for end in one.box)
    return image.crop((left, top, max(right, left + 1), max(bottom, top + 1)))

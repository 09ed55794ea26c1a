"""Prepare pictures that a prompt carries for a diffusion model."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import TypeVar

import torch
from PIL import Image, ImageOps
from torch import Tensor

from mmrl.config.sampling import Sampling, Size
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import BadMediaError, Media, open_clip, open_image, probe_clip, read_bytes
from mmrl.core.trajectory import Prompt

T = TypeVar("T")


def _read(prompt: Prompt, what: str, read: Callable[[], T]) -> T:
    """What ``read`` reads of the picture or clip of ``prompt``. Raises ``BadPromptError`` where it cannot."""
    try:
        return read()
    except BadMediaError as error:
        raise BadPromptError(prompt.id, f"{error}; mend the {what} or take the prompt out") from error


def fitted(prompt: Prompt, medium: Media, size: Size) -> Image.Image:
    """A picture of ``prompt``, RGB, scaled until it fills ``size`` and cut at its centre. Raises ``BadPromptError``
    where it cannot be read."""
    image = _read(prompt, "picture", partial(open_image, medium))
    return ImageOps.fit(image, (size.width, size.height), Image.Resampling.BICUBIC)


def frames(prompt: Prompt, medium: Media, size: Size, count: int) -> list[Image.Image]:
    """``count`` frames of a clip of ``prompt``, RGB and evenly spaced, each fitted as a picture is.

    A picture is a clip that stands still. Raises ``BadPromptError`` where it cannot be read or has fewer frames.
    """
    if medium.kind == "image":
        return [fitted(prompt, medium, size)] * count
    shown = _read(prompt, "clip", partial(open_clip, medium, count=count)).frames
    if len(shown) != count:
        raise BadPromptError(prompt.id, _short(len(shown), count))
    return _fitted(shown, size)


def first_frames(prompt: Prompt, medium: Media, size: Size, count: int) -> list[Image.Image]:
    """``frames``, those that a clip begins with."""
    if medium.kind == "image":
        return [fitted(prompt, medium, size)] * count
    return _fitted(_read(prompt, "clip", partial(open_clip, medium, frames=range(count))).frames, size)


def _fitted(shown: Sequence[Image.Image], size: Size) -> list[Image.Image]:
    return [ImageOps.fit(frame, (size.width, size.height), Image.Resampling.BICUBIC) for frame in shown]


_TRAIN = "train (sampling.frames)"


def _short(found: int, count: int, does: str = _TRAIN) -> str:
    return f"its clip has {found} frames, and {count} {does}; take it out"


def scaled(image: Image.Image) -> Tensor:
    """An RGB picture as ``[3, H, W]`` in [-1, 1]."""
    flat = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1) / 127.5 - 1


def sources_of(prompt: Prompt, count: int) -> Sequence[Media]:
    """The pictures that are edited, or the one that a clip begins with. Raises ``BadPromptError`` where they are not
    ``count``."""
    if [medium.kind for medium in prompt.media] != ["image"] * count:
        what = "one picture that is edited, or that its clip begins with" if count == 1 else f"{count} pictures"
        column = "image" if count == 1 else "images; sampling.pictures says how many"
        raise BadPromptError(
            prompt.id,
            f"it has {_shown(prompt)}; give every prompt the {what} (data: {{name: jsonl}}, with a column {column})",
        )
    return prompt.media


def _shown(prompt: Prompt) -> str:
    """What ``prompt`` carries."""
    clips = sum(medium.kind == "video" for medium in prompt.media)
    among = f", {clips} of them clips" if clips else ""
    return "a clip in place of a picture" if clips == len(prompt.media) == 1 else f"{len(prompt.media)} media{among}"


def clip_of(prompt: Prompt, size: Size, sampling: Sampling) -> Media:
    """The clip, or the picture that stands still for one, that sampling starts from. Raises ``BadPromptError`` where
    it cannot be read, or has fewer frames than ``sampling`` takes of it, or fewer pixels than ``size``."""
    if len(prompt.media) != 1:
        raise BadPromptError(
            prompt.id,
            f"it has {_shown(prompt)}; give every prompt the one clip that it starts from (data: {{name: "
            "jsonl}, with a column video)",
        )
    if (medium := prompt.media[0]).kind == "image":
        return medium
    found = _read(prompt, "clip", partial(probe_clip, medium, decode=False))
    count = sampling.held_frames or sampling.frames or 1
    if found.frames < count:
        does = "stay (sampling.held_frames)" if sampling.held_frames else _TRAIN
        raise BadPromptError(prompt.id, _short(found.frames, count, does))
    if found.width < size.width or found.height < size.height:
        raise BadPromptError(
            prompt.id,
            f"its clip is of {found.height} x {found.width} pixels, and {size} are sampled (sampling.height and "
            "sampling.width); lower them or take it out",
        )
    return medium


def without_sources(prompts: Sequence[Prompt], check: Callable[[Prompt], object], most: float) -> list[str]:
    """A note on those of ``prompts`` that ``check`` raises ``BadPromptError`` for. Raises ``UserError`` where they are
    more than the share ``most``."""
    bad = list[BadPromptError]()
    for prompt in prompts:
        try:
            check(prompt)
        except BadPromptError as error:
            bad.append(error)
    if not bad:
        return []
    named = f"{len(bad)} of {len(prompts)} prompts looked at cannot be used; of the first, {bad[0].reason}"
    if len(bad) > most * len(prompts):
        raise UserError(f"data: {named}; or raise data.max_bad_fraction to leave them out")
    return [f"{named}: they are left out and named in failures.jsonl"]


def digest(prompt: Prompt) -> str:
    """Equal for prompts with the same pictures, to the byte, wherever they lie."""
    said = " ".join(_content(medium) for medium in prompt.media)
    return hashlib.blake2b(said.encode(), digest_size=16).hexdigest()


@lru_cache(maxsize=4096)
def _content(medium: Media) -> str:
    try:
        return hashlib.blake2b(read_bytes(medium), digest_size=16).hexdigest()
    except BadMediaError:  # whoever opens it says so
        return repr(medium)

"""Which of the sizes ``sampling.buckets`` a prompt is sampled at: a function of its record and of the recipe alone."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache

from mmrl.config.sampling import Sampling, Size, TextSampling
from mmrl.core.errors import BadPromptError
from mmrl.core.grouping import grouped
from mmrl.core.json_types import Cell
from mmrl.core.media import BadMediaError, Media, probe_image
from mmrl.core.trajectory import AskedSize, Prompt
from mmrl.data.records import BadRecord, Records

_RATIO = re.compile(r"(\d+(?:\.\d+)?) *[:/] *(\d+(?:\.\d+)?)")
_LARGEST = 10**6
"""Pixels a side, and width over height: past it a record is mistaken."""
_ALIKE = 1e-9
"""Two aspects whose logarithms differ by less are one."""


class SizesInNoBucket(UserWarning):
    """Records have a size that is none of ``sampling.buckets``; the message has their number."""


class SizesNotUsed(UserWarning):
    """Records have a size, and the recipe has no ``sampling.buckets``."""


def bucket_of(prompt: Prompt, sampling: Sampling) -> Size:
    """The size that ``prompt`` is sampled at.

    It is the bucket of the record's own height and width, or the one whose aspect is nearest to theirs, by the
    logarithm of the ratio; of several of that aspect the one with the nearest number of pixels. A record without them
    goes by its ``aspect_ratio``, and one without that by its first picture, if it has one (the picture that is edited,
    or the better one of a pair). Others have the recipe's height and width, as all have without buckets. Raises
    ``BadPromptError`` where the record's values or its picture cannot be read.
    """
    if sampling.buckets is None:
        return sampling.size
    try:
        asked = asked_of(prompt)
        if asked is None and prompt.media and prompt.media[0].kind == "image":
            asked = _shown(prompt.media[0])
    except BadMediaError as error:
        raise BadPromptError(prompt.id, f"{error}; mend the picture or take the prompt out") from error
    except ValueError as error:
        raise BadPromptError(prompt.id, str(error)) from error
    return sampling.size if asked is None else nearest(asked, sampling.sizes)


def asked_of(prompt: Prompt) -> Size | float | None:
    """The size that the record asks for, or its aspect, width / height; None where it says nothing.

    Raises ``ValueError``, which says what is wrong.
    """
    height, width, aspect = prompt.size or AskedSize()
    if height is None and width is None:
        return None if aspect is None else _aspect(aspect)
    if height is None or width is None:
        has, lacks = ("width", "height") if height is None else ("height", "width")
        raise ValueError(f'has "{has}" and no "{lacks}"; give both, or "aspect_ratio"')
    return Size(_pixels("height", height), _pixels("width", width))


def nearest(asked: Size | float, sizes: Sequence[Size]) -> Size:
    """The size of the nearest aspect; of several the one with the nearest number of pixels, or the first."""
    if isinstance(asked, Size) and asked in sizes:
        return asked
    aspect = asked.width / asked.height if isinstance(asked, Size) else asked
    apart = [abs(math.log(size.width / size.height / aspect)) for size in sizes]
    best = [size for size, far in zip(sizes, apart, strict=True) if far <= min(apart) + _ALIKE]
    if not isinstance(asked, Size):
        return best[0]
    area = asked.height * asked.width
    return min(best, key=lambda size: abs(math.log(size.height * size.width / area)))


def by_size(prompts: Sequence[Prompt], sampling: Sampling | TextSampling) -> list[list[int]]:
    """The indices of ``prompts`` by the size that they are sampled at, in the order of their first; all in one list
    where there is one size. Prompts whose size cannot be read are together: whoever encodes them says so."""
    if not isinstance(sampling, Sampling) or sampling.buckets is None:
        return [list(range(len(prompts)))]
    return [*grouped((_readable(prompt, sampling), n) for n, prompt in enumerate(prompts)).values()]


def count_by_size(prompts: Iterable[Prompt], sampling: Sampling) -> dict[Size, int]:
    """How many of ``prompts`` are sampled at each size of ``sampling``; those that cannot be read at none."""
    found = Counter(_readable(prompt, sampling) for prompt in prompts)
    return {size: found[size] for size in sampling.sizes}


def with_sizes(prompts: Sequence[Prompt], sampling: Sampling, where: str) -> Sequence[Prompt]:
    """``prompts`` without the records whose size cannot be read, which are then among ``.bad``.

    Warns of sizes that are in no bucket, or of sizes that are not used because there are no buckets; ``where`` the data
    set is named. With buckets every record is read.
    """
    if sampling.buckets is None:
        _warn_unless_used(prompts, sampling, where)
        return prompts
    good, bad, others = list[int](), list[BadRecord](), list[Size]()
    for n in range(len(prompts)):
        prompt = prompts[n]
        try:
            asked = asked_of(prompt)
        except ValueError as error:
            bad.append(BadRecord(prompt.id, str(error)))
            continue
        good.append(n)
        if isinstance(asked, Size) and asked not in sampling.sizes:
            others.append(asked)
    if others:
        warnings.warn(
            f"{where}: {len(others)} of {len(prompts)} records have a size that is in no bucket of sampling.buckets "
            f"(the first is {others[0]}) and take the bucket of the nearest aspect",
            SizesInNoBucket,
            stacklevel=2,
        )
    if not bad:
        return prompts
    before: Sequence[BadRecord] = getattr(prompts, "bad", ())
    seen: int = getattr(prompts, "seen", len(prompts))
    return Records(len(good), lambda k: prompts[good[k]], [*before, *bad], seen)


def _warn_unless_used(prompts: Sequence[Prompt], sampling: Sampling, where: str) -> None:
    if prompts[0].size is not None:
        warnings.warn(
            f"{where}: its records have a size (height, width or aspect_ratio), and all are sampled at "
            f"{sampling.size}; to sample each at its own, list the sizes in sampling.buckets",
            SizesNotUsed,
            stacklevel=2,
        )


def _readable(prompt: Prompt, sampling: Sampling) -> Size | None:
    try:
        return bucket_of(prompt, sampling)
    except BadPromptError:
        return None


def _pixels(name: str, said: Cell) -> int:
    """A whole number; a CSV file has it as text. Raises ``ValueError``."""
    number = int(said) if isinstance(said, str) and re.fullmatch(r"\d{1,7}", said.strip()) else said
    if isinstance(number, float) and number.is_integer():  # a column with gaps in a table
        number = int(number)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= _LARGEST:
        raise ValueError(f'"{name}" is {said!r}; write a whole number of pixels from 1 on')
    return number


def _aspect(said: Cell) -> float:
    """A positive number, or ``16:9``. Raises ``ValueError``."""
    found: Cell = said
    if isinstance(said, str):
        parts = _RATIO.fullmatch(said.strip())
        if parts is not None and float(parts[2]):
            found = float(parts[1]) / float(parts[2])
        else:
            try:
                found = float(said)
            except ValueError:
                found = None
    if isinstance(found, bool) or not isinstance(found, int | float) or not 1 / _LARGEST <= found <= _LARGEST:
        raise ValueError(f'"aspect_ratio" is {said!r}; write width / height, as 1.5 or "3:2"')
    return float(found)


@lru_cache(maxsize=4096)
def _shown(medium: Media) -> Size:
    width, height = probe_image(medium)  # decoded: a header may say that the picture is turned
    return Size(height, width)

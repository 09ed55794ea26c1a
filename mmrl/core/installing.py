"""The command that installs an extra of mmrl from where the user is: a checkout, or a wheel."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
from pathlib import Path
from typing import Any

from mmrl.core.errors import UserError

DISTRIBUTION = "mmrl-toolkit"
"""The name that pip knows. The import is ``mmrl``; the package index has another project of that name."""

_ROOT = Path(__file__).resolve().parents[2]


def version_of(distribution: str) -> str | None:
    """The installed version of a distribution; None where it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def declared() -> list[str]:
    """What the installed mmrl requires, each with its marker; nothing where it is imported from a folder."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def extra_of(requirement: str) -> str | None:
    """The extra that asks for a requirement; None where mmrl always needs it."""
    found = re.search(r"extra\s*==\s*['\"]([^'\"]+)", requirement)
    return found[1] if found else None


def install(*extras: str) -> str:
    """A ``pip install`` command that adds the extras to this installation, quoted for a shell.

    From a checkout it installs the checkout again, with its constraints. From a wheel it names the packages of the
    extras, and keeps torch at its version: nothing is asked from the index by mmrl's own name.
    """
    if (_ROOT / "pyproject.toml").is_file():
        here = Path.cwd() == _ROOT
        target = ("." if here else str(_ROOT)) + (f"[{','.join(extras)}]" if extras else "")
        constraints = "constraints.txt" if here else str(_ROOT / "constraints.txt")
        return f"pip install -c {_quoted(constraints)} -e {_quoted(target)}"
    packages = [text.partition(";")[0].strip() for text in declared() if extra_of(text) in extras]
    torch = version_of("torch")
    kept = [f"torch=={torch.partition('+')[0]}"] if torch else []
    return " ".join(["pip install", *map(_quoted, [*kept, *packages])])


def optional(package: str, extra: str, what: str) -> Any:
    """The module ``package``, which ``what`` needs. Raises ``UserError`` where it is not installed."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{what} needs {package}, which is not installed: {install(extra)}")
    return importlib.import_module(package)


def _quoted(text: str) -> str:
    """Quoted also where only some shells need it: zsh reads ``[`` as a pattern."""
    return text if re.fullmatch(r"[\w./=-]+", text) else "'" + text.replace("'", "'\"'\"'") + "'"

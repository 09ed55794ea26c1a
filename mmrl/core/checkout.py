"""In a source checkout the drop-in folders sit beside ``mmrl/``; in a wheel they are merged into it."""

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[2]


def drop_ins(folder: str) -> list[str]:
    """Return the checkout's ``folder`` as an extra package path, or nothing when installed from a wheel.

    The second condition keeps Hugging Face's ``datasets`` in site-packages from being taken for ours.
    """
    found = _ROOT / folder
    in_checkout = (_ROOT / "pyproject.toml").is_file() and found.is_dir()
    return [str(found)] if in_checkout and not (found / "__init__.py").exists() else []

"""Format amounts of memory for people."""

from __future__ import annotations


def size(n: int) -> str:
    """``1.20 GiB``, ``35 MiB``, ``512 KiB``."""
    for unit, name, digits in ((2**30, "GiB", 2), (2**20, "MiB", 0), (2**10, "KiB", 0)):
        if n >= unit:
            return f"{n / unit:,.{digits}f} {name}"
    return f"{n} B"

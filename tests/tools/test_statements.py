"""The counter of statements, against an example that was counted by hand."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import statements

EXAMPLE = '''"""A module."""

from __future__ import annotations

import os

LIMIT = 3
"""The most."""


class Thing:
    """A thing."""

    size: int = 0
    """How large."""

    def grown(self, by: int) -> int:
        """More."""
        if by > LIMIT:
            raise ValueError(by)
        try:
            import json
        except ImportError:
            pass
        finally:
            self.size += by
        return self.size
'''


def test_statements_are_counted_by_hand() -> None:
    """LIMIT, class, size, def, if, raise, try, pass, +=, return: no docstring, no import, and no ``except``."""
    assert statements.statements(EXAMPLE) == 10
    assert statements.statements('"""Nothing."""\n') == 0
    assert statements.statements("a = 1; b = 2\n...\n") == 3


def test_folders_are_counted_apart() -> None:
    files = [
        ("mmrl/a/b.py", "a = 1"),
        ("mmrl/a/c/d.py", "b = 2"),
        ("mmrl/x.py", "c = 3"),
        ("rewards/y.py", "d = 4\ne = 5"),
    ]
    assert statements.by_folder(files) == {"mmrl/a": 2, "mmrl": 1, "rewards": 2}

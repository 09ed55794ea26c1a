"""Count the statements of the product, folder by folder.

    python tools/statements.py              # what each folder has
    python tools/statements.py --base main  # and how many more or fewer than at a revision of git

A statement is a node of the syntax tree: a function of two lines is three. Not counted are imports and what says
something but does nothing: docstrings, and the strings below constants and fields.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("mmrl", "pipelines", "rewards", "datasets", "environments")


def statements(source: str) -> int:
    """The statements of a module's ``source``."""
    return sum(isinstance(node, ast.stmt) and not _left_out(node) for node in ast.walk(ast.parse(source)))


def _left_out(node: ast.stmt) -> bool:
    said = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return said or isinstance(node, ast.Import | ast.ImportFrom)


def by_folder(files: Iterable[tuple[str, str]]) -> Counter[str]:
    """The statements of each folder, from the paths and sources of its files; below ``mmrl`` of each package."""
    found = Counter[str]()
    for path, source in files:
        parts = path.split("/")
        found["/".join(parts[:2]) if parts[0] == "mmrl" and len(parts) > 2 else parts[0]] += statements(source)
    return found


def here() -> Counter[str]:
    """The statements of the working tree."""
    paths = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return by_folder((path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")) for path in paths)


def of_revision(revision: str) -> Counter[str]:
    """The statements at a revision of git."""
    names = _git("ls-tree", "-r", "--name-only", revision, "--", *FOLDERS).splitlines()
    return by_folder((name, _git("show", f"{revision}:{name}")) for name in names if name.endswith(".py"))


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", metavar="REV", help="a revision of git to compare with")
    base = parser.parse_args().base
    now, then = here(), of_revision(base) if base else here()
    for folder in (*sorted(now | then), ""):
        count, before = (of[folder] if folder else of.total() for of in (now, then))
        if not folder or base is None or count != before:
            print(f"{count:7,}  {folder or 'all'}" + ("" if base is None else f"  {count - before:+,}"))


if __name__ == "__main__":
    main()

"""The layers of mmrl, and a check of them: which module may import which.

    python tools/layers.py            # every import that breaks a rule, and what the committed list says of it
    python tools/layers.py --update   # take out of the list what is gone; it never adds

The rules, read from the syntax tree (nothing is imported):

1. A module imports its own layer and those below it. ``LAYERS`` says which module is where. An import under
   ``TYPE_CHECKING`` and one inside a function count too.
2. No import circles.
3. An import of mmrl inside a function is for the commands of the command line (``COMMANDS``), the lazy attributes of
   ``mmrl`` itself and the modules that need an optional package (``OPTIONAL``). ``ALLOWED`` lists the others, each with
   its reason. What else runs later is passed in.

``layers.txt`` lists what breaks these rules today. ``tests/tools/test_layers.py`` fails when something breaks a rule
that is not in the list, and when something in the list is gone: the list only gets shorter. Where a module is renamed,
rename it in the list by hand.
"""

from __future__ import annotations

import argparse
import ast
import gc
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LISTED = Path(__file__).with_suffix(".txt")
FOLDERS = {
    "mmrl": "mmrl",
    "pipelines": "mmrl.pipelines",
    "rewards": "mmrl.rewards",
    "datasets": "mmrl.datasets",
    "environments": "mmrl.environments",
}
"""Where modules lie, and the package they are in when mmrl runs: the drop-in folders join it."""

LAYERS = {
    "core": "mmrl _moved core",
    "recipe": "config",
    "algorithms": "algorithms",
    "logging": "logging",
    "data": "data",
    "data sets": "datasets",
    "controller": "controller",
    "models": "models",
    "inference": "inference",
    "episodes": "episodes",
    "families": "families",
    "pipelines": "pipelines",
    "rewards": "rewards",
    "environments": "environments",
    "step": "step",
    "placement": "placement",
    "checkpoint": "checkpoint",
    "rollout": "rollout",
    "training": "training",
    "planner": "planner",
    "report": "report",
    "app": "app",
    "runtime": "runtime",
    "commands": "commands",
    "studies": "studies",
    "python": "api",
    "command line": "cli __main__",
}
"""Lowest first: the folder of a module says what it may import. ``mmrl`` is the package itself."""

COMMANDS = "cli commands"
"""Where commands are; a study has its own in ``commands.py``. They import what they run when they run it."""

OPTIONAL = "models.megatron inference.sglang inference.vllm inference.vllm_server rewards.judging.server"
"""The modules that need vLLM, SGLang or Megatron-Core; they may be imported inside a function."""

ALLOWED = {
    "models.row_tables models.fixed_cache": "it has classes of transformers, which takes seconds to import",
    "rewards.judge rewards.judging.local": "a judge that is asked over HTTP runs where there is no torch",
    "rewards.judge rewards.judging.remote": "a judge in this process needs no HTTP client, which takes 0.2 s to import",
}
"""Imports inside functions that stay, as importer and imported without ``mmrl.``, and why."""

Violation = tuple[str, ...]
"""``upward`` or ``inside`` with importer and imported, or ``circle`` with its modules."""


@dataclass(frozen=True)
class Import:
    """``place``: empty at the top of the module, ``TYPE_CHECKING``, or the function it is in."""

    importer: str
    imported: str
    line: int
    place: str

    @property
    def in_function(self) -> bool:
        return self.place not in ("", "TYPE_CHECKING")

    def __str__(self) -> str:
        place = f" ({self.place})" if self.place else ""
        return f"{self.importer}:{self.line}{place} imports {self.imported}"


def modules(root: Path) -> dict[str, Path]:
    """The modules below ``root`` by the names they have when mmrl runs."""
    found = {}
    for folder, package in FOLDERS.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = path
    return found


def imports(files: Mapping[str, Path]) -> list[Import]:
    """Every import of a module of ``files`` in another of them."""
    collects = gc.isenabled()
    gc.disable()  # the trees are many small objects: collecting among them takes longer than reading
    try:
        found = []
        for name, path in files.items():
            package = name if path.name == "__init__.py" else name.rpartition(".")[0]
            tree = ast.parse(path.read_bytes(), filename=str(path))
            for target, line, place in _imports(tree.body, package, ""):
                imported = _module(target, files)
                if imported not in ("", name):
                    found.append(Import(name, imported, line, place))
        return found
    finally:
        if collects:
            gc.enable()


def _imports(body: Iterable[ast.AST], package: str, place: str) -> Iterator[tuple[str, int, str]]:
    """What the statements import, by the full name it would have if it were a module: with line and place."""
    for node in body:
        match node:
            case ast.Import():
                yield from ((alias.name, node.lineno, place) for alias in node.names)
            case ast.ImportFrom():
                above = package.rsplit(".", node.level - 1)[0] if node.level else ""
                source = ".".join(part for part in (above, node.module) if part)
                yield from ((f"{source}.{alias.name}", node.lineno, place) for alias in node.names)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                inside = place if place not in ("", "TYPE_CHECKING") else node.name
                yield from _imports(node.body, package, inside)
            case ast.If(test=ast.Name(id="TYPE_CHECKING") | ast.Attribute(attr="TYPE_CHECKING")):
                yield from _imports(node.body, package, place or "TYPE_CHECKING")
                yield from _imports(node.orelse, package, place)
            case ast.stmt() | ast.excepthandler() | ast.match_case():
                inner = (node for node in ast.iter_child_nodes(node) if not isinstance(node, ast.expr))
                yield from _imports(inner, package, place)
            case _:
                pass


def _module(target: str, files: Mapping[str, Path]) -> str:
    """The module that ``target`` is, or that it is a name in; empty where that is none of ``files``."""
    while target and target not in files:
        target = target.rpartition(".")[0]
    return target


def _below(module: str, name: str) -> bool:
    full = "mmrl" if name == "mmrl" else f"mmrl.{name}"
    return module == full or (name != "mmrl" and module.startswith(full + "."))


def placed(names: Iterable[str], layers: Mapping[str, str]) -> dict[str, int]:
    """The number of each module's layer, lowest 0. Raises ``ValueError`` for a module that has none, and for a layer
    that names no module."""
    table = [(name, level) for level, those in enumerate(layers.values()) for name in those.split()]
    found, used = {}, set()
    for module in names:
        fitting = [(len(name), name, level) for name, level in table if _below(module, name)]
        if not fitting:
            raise ValueError(f"{module} has no layer: write it into LAYERS of tools/layers.py, at the lowest that fits")
        _, name, found[module] = max(fitting)
        used.add(name)
    if gone := [name for name, _ in table if name not in used]:
        raise ValueError(f"LAYERS of tools/layers.py names modules that do not exist: {', '.join(gone)}; remove them")
    return found


def allowed_inside(one: Import, optional: str, allowed: Collection[str]) -> bool:
    """Whether rule 3 allows this import inside a function."""
    if one.importer == "mmrl":
        return one.place == "__getattr__"
    if _pair(one) in allowed:
        return True
    command = any(_below(one.importer, name) for name in COMMANDS.split()) or one.importer.endswith(".commands")
    return command or any(_below(one.imported, name) for name in optional.split())


def _pair(one: Import) -> str:
    return f"{one.importer.removeprefix('mmrl.')} {one.imported.removeprefix('mmrl.')}"


def violations(
    found: Sequence[Import], levels: Mapping[str, int], optional: str, allowed: Collection[str]
) -> dict[Violation, list[Import]]:
    """What breaks a rule, with the imports that do. A circle is made of imports that rule 3 does not allow to wait.

    Raises ``ValueError`` where ``allowed`` names an import that is not there.
    """
    if gone := sorted({*allowed} - {_pair(one) for one in found if one.in_function}):
        raise ValueError(f"ALLOWED of tools/layers.py names imports that do not exist: {', '.join(gone)}; remove them")
    broken: dict[Violation, list[Import]] = {}
    graph: dict[str, set[str]] = {module: set() for module in levels}
    for one in found:
        lazy_attribute = one.importer == "mmrl" and one.place == "__getattr__"
        if levels[one.imported] > levels[one.importer] and not lazy_attribute:
            broken.setdefault(("upward", one.importer, one.imported), []).append(one)
        if one.in_function and not allowed_inside(one, optional, allowed):
            broken.setdefault(("inside", one.importer, one.imported), []).append(one)
        if not (one.in_function and allowed_inside(one, optional, allowed)):
            graph[one.importer].add(one.imported)
    for circle in circles(graph):
        broken["circle", *circle] = [one for one in found if {one.importer, one.imported} <= set(circle)]
    return broken


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """The groups of modules that reach one another."""
    reached = {module: _reached(module, graph) for module in graph}
    groups = {frozenset(other for other in reached[module] if module in reached[other]) for module in graph}
    return sorted(sorted(group) for group in groups if group)


def _reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = [start]
    while waiting:
        new = graph[waiting.pop()] - seen
        seen |= new
        waiting += new
    return seen


def listed(text: str) -> set[Violation]:
    """The committed list: a violation a line."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    return {tuple(line) for line in lines if line}


def known(found: Iterable[Violation], listed: set[Violation]) -> set[Violation]:
    """Those of ``found`` that the list has: as they are, or as a part of a circle in it."""
    rings = [set(entry) for entry in listed if entry[0] == "circle"]
    return {one for one in found if one in listed or (one[0] == "circle" and any(set(one) <= ring for ring in rings))}


def updated(text: str, kept: set[Violation]) -> str:
    """The text of the list with ``kept`` in it, under the comments that it begins with."""
    head = [line for line in text.splitlines() if line.startswith("#")]
    return "\n".join([*head, *(" ".join(entry) for entry in sorted(kept))]) + "\n"


def check(
    root: Path, layers: Mapping[str, str], optional: str, allowed: Collection[str] = ()
) -> dict[Violation, list[Import]]:
    """What breaks a rule in the tree below ``root``, with the imports that do."""
    files = modules(root)
    return violations(imports(files), placed(files, layers), optional, allowed)


def _show(found: Mapping[Violation, list[Import]]) -> None:
    levels = placed(modules(ROOT), LAYERS)
    names = list(LAYERS)
    for kind, title in (("upward", "Imports of a higher layer"), ("inside", "Imports inside functions")):
        those = {entry: where for entry, where in found.items() if entry[0] == kind}
        print(f"\n{title}: {len(those)}")
        for entry, where in sorted(those.items()):
            up = f"  [{names[levels[entry[1]]]} -> {names[levels[entry[2]]]}]" if kind == "upward" else ""
            print(f"  {where[0]}{up}")
    rings = sorted((entry[1:] for entry in found if entry[0] == "circle"), key=len, reverse=True)
    print(f"\nCircles: {len(rings)}")
    for ring in rings:
        print(f"  {len(ring)}: {' '.join(ring)}")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Check which module of mmrl imports which.")
    parser.add_argument("--update", action="store_true", help="take out of the list what is gone; never adds")
    update = parser.parse_args(arguments).update
    found = check(ROOT, LAYERS, OPTIONAL, ALLOWED)
    text = LISTED.read_text(encoding="utf-8")
    before, kept = listed(text), known(found, listed(text))
    new, gone = sorted(set(found) - kept), sorted(before - kept)
    _show(found)
    if update and gone:
        LISTED.write_text(updated(text, kept), encoding="utf-8")
    print(f"\n{LISTED.name}: {len(kept if update else before)} entries")
    for entry in gone:
        print(f"  {'removed' if update else 'gone, remove it with --update'}: {' '.join(entry)}")
    for entry in new:
        print(f"  NEW: {' '.join(entry)}")
        for one in found[entry][:10]:
            print(f"    {one}")
    return int(bool(new) or (bool(gone) and not update))


if __name__ == "__main__":
    sys.exit(main())

"""List the drop-ins and algorithms of this installation by reading their text: nothing is imported or run.

A module is recognised by the function that mmrl calls: a pipeline defines ``build(recipe, ...)``, or assigns
``build``; a data set defines ``prompts(split, ...)``; a reward is a function that takes ``context`` or a class whose
``score`` does.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from mmrl.config.errors import did_you_mean
from mmrl.config.layers import shown
from mmrl.core.plugins.loading import Kind, absent, folders, shelf
from mmrl.core.plugins.python_objects import in_this_process
from mmrl.core.reward_contract import declaration_of

DEFAULT: dict[Kind, str] = {
    "pipelines": "build",
    "rewards": "score",
    "datasets": "prompts",
    "algorithms": "",
    "environments": "Environment",
}
"""The attribute that a name without ``:attribute`` means; the only algorithm of a file needs no name."""
_FIRST: dict[Kind, str] = {"pipelines": "recipe", "datasets": "split"}
NOUN: dict[Kind, str] = {
    "pipelines": "pipeline",
    "rewards": "reward",
    "datasets": "data set",
    "algorithms": "algorithm",
    "environments": "environment",
}


@dataclass(frozen=True)
class Entry:
    """A drop-in: its name in a recipe, its file and the first line of its docstring."""

    name: str
    file: Path
    summary: str


def entries(kind: Kind) -> list[Entry]:
    """Every drop-in of ``kind`` in this installation; files that are not valid Python are left out."""
    found: dict[str, Entry] = {}
    for root in folders(kind):
        for file in sorted(root.rglob("*.py")):
            module = file.relative_to(root).with_suffix("").as_posix()
            if not file.name.startswith("_"):
                found |= {entry.name: entry for entry in _entries_of(kind, module, file)}
    return [found[name] for name in sorted(found)]


def missing_drop_in(kind: Kind, name: str, looked: str) -> str:
    """What is wrong with the name of a drop-in, or of an algorithm in a file; empty if it exists.

    ``looked``: the part of the message that says where a file was looked for.
    """
    if in_this_process(name):
        attribute = name.partition(":")[2]
        return "" if hasattr(shelf(kind), attribute) else absent(kind, attribute)
    file_text, attribute = split_file(name)
    if file_text is not None:
        return _missing_in_file(file_text, attribute, attribute or DEFAULT[kind], looked)
    target, _, attribute = name.partition(":")
    module = _module_file(kind, target)
    if module is not None:
        return _missing_attribute(module, attribute, attribute or DEFAULT[kind])
    known = _known(kind)
    listed = f"there are {', '.join(known)}" if known else "none is installed"
    meant = did_you_mean(name, known) or did_you_mean(target, known)
    if kind == "datasets" and target.lower() in FORMATS:
        meant = f"; jsonl reads {target}: write name: jsonl, train: {{path: FILE}}"
    return f"there is no {NOUN[kind]} {target!r}{meant}  ({listed}; a file of your own is path/to/file.py:name)"


def missing_class(name: str, looked: str) -> str:
    """What is wrong with ``path/to/file.py:Class``; empty if the file has that name. ``looked`` as above."""
    file, _, attribute = name.rpartition(":")
    return _missing_in_file(file, attribute, attribute, looked)


def _missing_in_file(file: str, attribute: str, wanted: str, looked: str) -> str:
    if not os.path.isfile(file):
        return f"there is no file {file!r} ({looked}); correct the path"
    return _missing_attribute(Path(file), attribute, wanted)


FORMATS = ("arrow", "csv", "hf", "hub", "huggingface", "json", "parquet", "save_to_disk", "tsv")
"""Names that users try for the formats that the data set ``jsonl`` reads."""


@cache
def _known(kind: Kind) -> tuple[str, ...]:
    """The existing names, for messages. Cached, because every file is read."""
    return tuple(entry.name for entry in entries(kind))


def declared_paths(name: str) -> tuple[str, ...]:
    """The options that the reward ``name`` declares as files: ``@mmrl.reward(paths=("model",))``, written literally.

    Empty for a reward that cannot be found or read; building it raises the error.
    """
    if in_this_process(name):
        return declaration_of(getattr(shelf("rewards"), name.partition(":")[2], None)).paths
    file_text, attribute = split_file(name)
    target, _, own = name.partition(":")
    file = _module_file("rewards", target) if file_text is None else Path(file_text)
    try:
        body = [] if file is None else list(_statements(_parse(file).body))
    except (SyntaxError, OSError, ValueError):
        return ()
    wanted = (own if file_text is None else attribute) or DEFAULT["rewards"]
    for _ in body:  # follow ``score = Judge``: a chain has at most as many links as statements
        named = [n.value for n in body if isinstance(n, ast.Assign) and _assigns(n, wanted)]
        wanted = next((value.id for value in reversed(named) if isinstance(value, ast.Name)), wanted)
    definitions = [node for node in body if getattr(node, "name", None) == wanted]
    calls = [call for node in definitions for call in getattr(node, "decorator_list", ()) if isinstance(call, ast.Call)]
    for keyword in (keyword for call in calls for keyword in call.keywords if keyword.arg == "paths"):
        try:
            return tuple(map(str, ast.literal_eval(keyword.value)))
        except (ValueError, TypeError):
            return ()
    return ()


def _assigns(node: ast.Assign, name: str) -> bool:
    every = (one for target in node.targets for one in ast.walk(target))
    return any(isinstance(one, ast.Name) and one.id == name for one in every)


def split_file(text: str) -> tuple[str | None, str]:
    """``my.py:name`` as file and attribute; the file is None where the text names no Python file."""
    if text.endswith(".py"):
        return text, ""
    file, colon, attribute = text.rpartition(":")
    return (file, attribute) if colon and file.endswith(".py") else (None, "")


def _missing_attribute(file: Path, attribute: str, wanted: str) -> str:
    try:
        body = _parse(file).body
    except SyntaxError as error:
        return f"{shown(file)}:{error.lineno} is not valid Python: {error.msg}"
    except (OSError, ValueError) as error:
        return f"{shown(file)} cannot be read: {error}"
    defined = _defined(body)
    if not wanted or defined is None or wanted in defined:
        return ""
    public = [name for name in defined if not name.startswith("_") and name not in _imported(body)]
    write = "" if attribute else f"; name one that it has, as in {file.name}:{public[0]}" if public else ""
    has = ", ".join(public) or "no functions or classes"
    return f"{shown(file)} has no {wanted!r}{did_you_mean(wanted, public) or write}  (it has {has})"


def _parse(file: Path) -> ast.Module:
    """Raises ``SyntaxError``, ``OSError``, and ``ValueError`` for null bytes."""
    return _parsed(file.read_bytes(), str(file))


@lru_cache(maxsize=256)  # some files are asked several times for one recipe
def _parsed(source: bytes, name: str) -> ast.Module:
    return ast.parse(source, filename=name)


def _defined(body: list[ast.stmt]) -> list[str] | None:
    """The names that a module defines; None if only importing it shows them (``import *``)."""
    found: list[str] = []
    for node in _statements(body):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.append(node.name)
            case ast.Assign():
                found += [name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)]
            case ast.AnnAssign(target=ast.Name() as target):
                found.append(target.id)
            case ast.ImportFrom() if any(alias.name == "*" for alias in node.names):
                return None
            case ast.ImportFrom(module=module) if module != "__future__":
                found += [alias.asname or alias.name for alias in node.names]
            case _:
                pass
    return None if "__getattr__" in found else list(dict.fromkeys(found))


def _imported(body: list[ast.stmt]) -> set[str]:
    """The names that a module has from others."""
    imports = [node for node in _statements(body) if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def _statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Top-level statements, and those inside top-level ``if``, ``try`` and ``with``."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            yield from _statements(node.body)
            yield from _statements(getattr(node, "orelse", []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _module_file(kind: Kind, target: str) -> Path | None:
    for root in folders(kind):
        for file in (root / f"{target}.py", root / target / "__init__.py"):
            if target and os.path.isfile(file):
                return file
    return None


def _entries_of(kind: Kind, module: str, file: Path) -> Iterator[Entry]:
    try:
        tree = _parse(file)
    except (SyntaxError, OSError, ValueError):
        return
    about_module = _first_line(tree)
    if kind == "environments":
        yield from _environments(module, file, tree)
        return
    if kind == "algorithms":
        yield from [Entry(module, file, about_module)] if _holds_algorithm(tree) else ()
        return
    for node in tree.body:
        if kind == "pipelines" and isinstance(node, ast.Assign) and _assigns(node, DEFAULT[kind]):
            yield Entry(module, file, about_module)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) or node.name.startswith("_"):
            continue
        is_default = node.name == DEFAULT[kind]
        if _takes(node, "context") if kind == "rewards" else is_default and _begins_with(node, _FIRST[kind]):
            name = module if is_default else f"{module}:{node.name}"
            yield Entry(name, file, about_module if is_default else _first_line(node) or about_module)


def _holds_algorithm(tree: ast.Module) -> bool:
    """Whether a class takes settings whose class is in the same file."""
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    makers = [
        node
        for cls in classes.values()
        for node in cls.body
        if isinstance(node, ast.FunctionDef) and node.name == "__init__" and len(node.args.args) > 1
    ]
    taken = [maker.args.args[1].annotation for maker in makers]
    return any(isinstance(annotation, ast.Name) and annotation.id in classes for annotation in taken)


def _environments(module: str, file: Path, tree: ast.Module) -> Iterator[Entry]:
    """The class ``Environment`` of a module, which its name alone means, and the functions that a model can call. A
    module that makes what it is asked for, by ``__getattr__``, is one of ``NAME:ID``."""
    defined = _defined(tree.body)
    if defined is None:
        yield Entry(f"{module}:ID", file, _first_line(tree))
        return
    if DEFAULT["environments"] in defined:
        yield Entry(module, file, _first_line(tree))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not node.name.startswith("_"):
            yield Entry(f"{module}:{node.name}", file, _first_line(node))


def _takes(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, parameter: str) -> bool:
    if isinstance(node, ast.ClassDef):
        if any(isinstance(base, ast.Name) and base.id == "Protocol" for base in node.bases):
            return False  # a base class or protocol, not a drop-in
        methods = [m for m in node.body if isinstance(m, ast.FunctionDef | ast.AsyncFunctionDef) and m.name == "score"]
        return any(_takes(method, parameter) for method in methods)
    return parameter in {argument.arg for argument in [*node.args.args, *node.args.kwonlyargs]}


def _begins_with(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef, parameter: str) -> bool:
    return not isinstance(node, ast.ClassDef) and [one.arg for one in node.args.args[:1]] == [parameter]


def _first_line(node: ast.Module | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0].strip()

"""Merge YAML files and ``a.b=c`` overrides into one tree of plain values that records where each was written.

Scalars follow YAML 1.2's core schema, so that ``1e-5`` is a number, and ``no``, ``012`` and ``2024-01-01`` are not
converted. Mappings of later files merge into earlier ones, all other values replace; an override always replaces, even
a mapping, and so does a mapping with a ``type``, whose other keys are of that type. A file or an override that names
another data set starts its options anew. Tags construct no objects.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

import yaml

from mmrl.config.errors import COMMAND_LINE, Finding, KeyPath, Source, format_key
from mmrl.core.json_types import JsonScalar, MutableJson, item, set_item

MOST_CHARACTERS = 1 << 16
"""Limit for all files and overrides of a recipe. A recipe has about 2,000; PyYAML reads some 100,000 a second."""
MOST_VALUES = 5_000
"""A recipe has hundreds; more than this is a list of data, or an explosion of aliases."""
MOST_IN_ONE = 1 << 14
"""Characters of one value."""
MOST_LEVELS = 32


@dataclass
class Room:
    """What remains of the limits on a recipe while its layers are read."""

    characters: int = MOST_CHARACTERS
    values: int = MOST_VALUES


class _TooLarge(Exception):
    """A recipe exceeds one of the limits; the message says which, and the edit."""


class _Loader(yaml.SafeLoader):
    """Resolves scalars by YAML 1.2's core schema; used to compose nodes, never to construct objects."""

    yaml_implicit_resolvers = {}  # noqa: RUF012 - the attribute PyYAML reads; the parent's YAML 1.1 rules must not leak in


def _integer(text: str) -> int:
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _number(text: str) -> float:
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


_TAG = "tag:yaml.org,2002:"
_SCALARS: dict[str, tuple[str, list[str], Callable[[str], JsonScalar]]] = {
    "null": (r"~|null|Null|NULL|", ["~", "n", "N", ""], lambda _: None),
    "bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF"), lambda text: text.lower() == "true"),
    "int": (r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789"), _integer),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        list("-+.0123456789"),
        lambda text: _number(text.lower()),
    ),
}
for _name, (_pattern, _first, _) in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _name, re.compile(rf"(?:{_pattern})\Z"), _first)

_QUOTES = """YAML reads {{ as a mapping; put quotes into those of the shell, as in '"{{ ... }}"', or name a file"""


@dataclass
class Tree:
    """Plain values (mappings, lists, scalars), the source of each key, and the mistakes in the text."""

    values: dict[str, MutableJson] = field(default_factory=dict)
    sources: dict[KeyPath, Source] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)

    def source(self, path: KeyPath) -> Source:
        """Where ``path`` was written; if it was not, the nearest enclosing section that was."""
        while path and path not in self.sources:
            path = path[:-1]
        return self.sources[path]


def read_layers(files: list[Path], overrides: list[str]) -> Tree:
    """Layer the files left to right, then the overrides. Mistakes are in ``findings``; nothing is raised."""
    tree, room = Tree(sources={(): Source(0, 0, shown(files[0]))}), Room()
    for layer, file in enumerate(files):
        _merge(tree, _read_file(file, layer, room))
    _start_data_anew(tree, _named_data(overrides))
    for i, text in enumerate(overrides):
        _override(tree, text, Source(len(files) + i, 0, COMMAND_LINE), room)
    return tree


def shown(path: Path) -> str:
    """A path for messages: relative if it is under the current folder."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith("..") else relative


def parse_key(text: str) -> KeyPath | None:
    """``rewards[0].weight`` or ``rewards.0.weight`` as ``("rewards", 0, "weight")``; None if it is not a key."""
    if not re.fullmatch(r"[^\s.\[\]=]+(\.[^\s.\[\]=]+|\[[0-9]+\])*", text):
        return None
    return tuple(int(part) if part.isascii() and part.isdigit() else part for part in re.findall(r"[^.\[\]]+", text))


def parse_value(text: str) -> MutableJson:
    """The value of a bare ``key=value``, read as in a recipe. Raises ``ValueError`` with what is wrong."""
    builder = _Builder(Source(0, 0, COMMAND_LINE))
    value = builder.parse(text, ())
    if builder.findings:
        raise ValueError(builder.findings[0].message)
    return value


@lru_cache(maxsize=256)  # a search and a sweep read the same recipe for each trial; nothing changes a node
def _composed(text: str) -> yaml.Node | None:
    return yaml.compose(text, Loader=_Loader)


class _Builder:
    """Turns the nodes of one document into values, noting the line of every key."""

    def __init__(self, source: Source, room: Room | None = None) -> None:
        self.origin, self.room = source, room or Room()
        self.sources: dict[KeyPath, Source] = {}
        self.findings: list[Finding] = []

    def parse(self, text: str, path: KeyPath) -> MutableJson:
        try:
            self.room.characters -= len(text)
            if self.room.characters < 0:
                raise _TooLarge(
                    f"a recipe has at most {MOST_CHARACTERS:,} characters, its files and overrides together; put long "
                    "texts and lists of data into separate files and name these"
                )
            node = _composed(text)
            return None if node is None else self._build(node, path)
        except yaml.MarkedYAMLError as error:
            mark = error.problem_mark or error.context_mark
            self._note(path, f"not YAML: {_syntax(error)}", mark.line + 1 if mark else 0)
        except yaml.YAMLError as error:
            self._note(path, f"not YAML: {str(error).splitlines()[0]}")
        except RecursionError:
            self._note(path, "nested too deeply (an alias inside its own anchor?); write the values out")
        except _TooLarge as error:
            self._note(path, str(error))
        return None

    def _note(self, path: KeyPath, message: str, line: int = 0) -> None:
        self.findings.append(Finding(self._at(line), path, message))

    def _at(self, line: int) -> Source:
        at_command_line = self.origin.label == COMMAND_LINE
        return Source(self.origin.layer, 0 if at_command_line else line, self.origin.label)

    def _build(self, node: yaml.Node, path: KeyPath) -> MutableJson:
        self._count(node, path)
        line = node.start_mark.line + 1
        self.sources.setdefault(path, self._at(line))
        if isinstance(node, yaml.MappingNode) and node.tag == _TAG + "map":
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode) and node.tag == _TAG + "seq":
            return [self._build(child, (*path, i)) for i, child in enumerate(node.value)]
        name = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.ScalarNode) and (name == "str" or name in _SCALARS):
            try:
                return node.value if name == "str" else _SCALARS[name][2](node.value)
            except ValueError:
                self._note(path, f"{node.value!r} is no {name}", line)
                return None
        self._note(path, f"the tag {node.tag!r} is not understood; write a plain value", line)
        return None

    def _count(self, node: yaml.Node, path: KeyPath) -> None:
        """Raise ``_TooLarge`` if ``node`` exceeds a limit."""
        self.room.values -= 1
        if self.room.values < 0:
            raise _TooLarge(
                f"a recipe has at most {MOST_VALUES:,} values (aliases of aliases?); put data into a file and name it"
            )
        if len(path) > MOST_LEVELS:
            raise _TooLarge(
                f"nested more than {MOST_LEVELS} levels deep (an alias inside its own anchor?); write the values out"
            )
        if isinstance(node, yaml.ScalarNode) and len(node.value) > MOST_IN_ONE:
            raise _TooLarge(
                f"line {node.start_mark.line + 1}: a value of {len(node.value):,} characters; at most {MOST_IN_ONE:,} "
                "are read; put it into a separate file and name that"
            )

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, MutableJson]:
        values: dict[str, MutableJson] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or key_node.value == "<<":
                what = "'<<' (merging)" if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                self._note(path, f"{what} is not understood as a key; write the keys out", line)
                continue
            key = key_node.value
            here = (*path, key)
            if key in values:
                first = self.sources[here]
                on = f" (first on line {first.line})" if first.line else ""
                self._note(here, f"written twice{on}; keep one of them", line)
                continue
            self.sources[here] = self._at(line)
            values[key] = self._build(value_node, here)
        return values


def _syntax(error: yaml.MarkedYAMLError) -> str:
    said = ", ".join(part for part in (error.context, error.problem) if part)
    if "another document" in said:  # also of a run that was made of several
        return "a file is one document, and here a second one begins; make files of them, or name a run's resolved.json"
    return f"{said}; indent with spaces" if "\\t" in said else said


def _read_file(file: Path, layer: int, room: Room) -> Tree:
    origin = Source(layer, 0, shown(file))
    builder = _Builder(origin, room)
    values: MutableJson = None
    try:
        with file.open("rb") as opened:
            read = opened.read(4 * MOST_CHARACTERS + 1)  # a UTF-8 character has at most 4 bytes
        values = builder.parse(read.decode("utf-8-sig", "ignore" if len(read) > 4 * MOST_CHARACTERS else "strict"), ())
    except UnicodeDecodeError:
        builder.findings.append(Finding(origin, (), "not text in UTF-8; save it as UTF-8"))
    except OSError as error:
        builder.findings.append(Finding(origin, (), f"cannot be read: {error.strerror}"))
    if values is not None and not isinstance(values, dict):
        builder.findings.append(Finding(origin, (), f"a recipe is sections of `key: value`, not {kind_of(values)}"))
    builder.sources[()] = origin
    return Tree(values if isinstance(values, dict) else {}, builder.sources, builder.findings)


def kind_of(value: object) -> str:
    """A value in words, short enough for a message."""
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 60 else text[:56] + "...'"


def _merge(tree: Tree, layer: Tree) -> None:
    """Put ``layer`` on top of ``tree``: mappings without a ``type`` merge, everything else replaces."""
    replaced: set[KeyPath] = set()

    def put(base: dict[str, MutableJson], over: dict[str, MutableJson], path: KeyPath) -> None:
        for key, value in over.items():
            here, below = (*path, key), base.get(key)
            if isinstance(value, dict) and isinstance(below, dict) and "type" not in value:
                put(below, value, here)
                continue
            base[key] = value
            replaced.add(here)

    def new(path: KeyPath) -> bool:
        return any(path[:n] in replaced for n in range(1, len(path) + 1))

    _start_data_anew(tree, layer.values.get("data"))
    put(tree.values, layer.values, ())
    kept = {key: source for key, source in tree.sources.items() if not new(key)}
    tree.sources = kept | {key: source for key, source in layer.sources.items() if new(key)}
    tree.findings += layer.findings


def _start_data_anew(tree: Tree, over: MutableJson) -> None:
    """Remove what the files say of their data sets, if ``over``, the section of the next layer, names others: options
    of one data set are not those of the next, and a layer could not remove them."""
    below = tree.values.get("data")
    if not isinstance(below, dict) or not isinstance(over, dict):
        return
    if not over.get("mixture") and over.get("name", below.get("name")) == below.get("name"):
        return
    for key in ("name", "train", "heldout", "mixture"):
        if key in below:
            del below[key]
            _forget(tree, ("data", key))


def _named_data(overrides: list[str]) -> dict[str, MutableJson]:
    """The section ``data`` as far as overrides name its data sets. Mistakes in them are found later."""
    found: dict[str, MutableJson] = {}
    for text in overrides:
        key, _, value = text.partition("=")
        if key.strip() in ("data.name", "data.mixture"):
            with suppress(ValueError):
                found[key.strip().partition(".")[2]] = parse_value(value.strip())
    return found


def _forget(tree: Tree, path: KeyPath) -> None:
    for key in [k for k in tree.sources if k[: len(path)] == path] if path in tree.sources else ():
        del tree.sources[key]


def _override(tree: Tree, text: str, origin: Source, room: Room) -> None:
    key, equals, value_text = text.partition("=")
    path = parse_key(key.strip())
    if not equals or path is None:
        tree.findings.append(Finding(origin, (), f"{text!r} is no override; write key=value, as in optim.lr=1e-5"))
        return
    builder = _Builder(origin, room)
    value = builder.parse(value_text.strip(), path)
    if builder.findings:
        template = value_text.strip().startswith("{{")
        tree.findings += [Finding(origin, path, _QUOTES)] if template else builder.findings
        return
    parent, mistake = _descend(tree.values, path)
    if mistake:
        tree.findings.append(Finding(origin, path, mistake))
        return
    set_item(parent, path[-1], value)
    _forget(tree, path)
    for depth in range(1, len(path)):
        tree.sources.setdefault(path[:depth], origin)
    tree.sources |= {path: origin, **builder.sources}


def _descend(values: dict[str, MutableJson], path: KeyPath) -> tuple[MutableJson, str]:
    """The container that holds ``path[-1]``, created if a section is absent or null; or why it cannot hold it."""
    container: MutableJson = values
    for depth, step in enumerate(path):
        mistake = _cannot_hold(container, step, format_key(path[:depth]))
        if mistake or depth == len(path) - 1:
            return container, mistake
        if isinstance(container, dict) and isinstance(step, str):
            if container.get(step) is None:
                if isinstance(path[depth + 1], int):
                    name = format_key(path[: depth + 1])
                    return None, f"there is no {name!r} to index; write {name}=[...] for the whole list"
                container[step] = {}
            container = container[step]
        else:
            container = item(container, step)
    raise AssertionError("a key has at least one part")


def _cannot_hold(container: MutableJson, step: str | int, name: str) -> str:
    if isinstance(container, list):
        if isinstance(step, int) and step < len(container):
            return ""
        has = f"has items 0 to {len(container) - 1}" if container else "is empty"
        return f"the list {name!r} {has}; index one of them, or write {name}=[...] for the whole list"
    if not isinstance(container, dict):
        return f"{name!r} is {kind_of(container)}, not a section; nothing can be set inside it"
    return f"{name!r} is a section, not a list; write a key instead of {step}" if isinstance(step, int) else ""

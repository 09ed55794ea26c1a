"""What messages tell a user to do, found in their text: keys to set or remove, commands, options of commands.

``faults`` names what a text tells to do and cannot be done as it says: a key that no recipe has, a value that its key
does not take, a command or an option that the command line lacks.
"""

import ast
import dataclasses
import json
import re
import types
import typing
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NamedTuple

import typer.main
import yaml
from pydantic import BaseModel, TypeAdapter, ValidationError

from mmrl.cli import app
from mmrl.config.algorithms import shipped_algorithms
from mmrl.config.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("mmrl", "pipelines", "rewards", "datasets", "environments")
GAP = "…"
"""Stands in a text of the code for what is only known when it is said."""
PROSE_FOLLOWS = re.compile(r" (?!or\b|and\b|with\b|on\b|if\b|in\b|to\b)[a-z]")
"""After ``set KEY to VALUE``: the value is a word of the sentence."""
KEY = r"[a-z_0-9]+(?:\.[a-z_0-9]+)*"
VALUE = r"\{[^}]*\}|\[[^\]]*\]|[\w.+:/-]*[\w/]"
TAIL = r"(?![\w.]*[\w/(])"
EDITS = (
    re.compile(
        rf"\b(?:set|write) (?P<key>{KEY})(?: to |=|: )(?P<value>{VALUE})(?! (?!or\b|and\b|with\b|on\b|if\b)[a-z])"
    ),
    re.compile(rf"(?<!trial )(?<![\w.\[/-])(?P<key>{KEY})=(?P<value>{VALUE})"),
    re.compile(rf"\b(?:remove|leave out|raise|lower|set) (?P<key>[a-z_]+(?:\.[a-z_0-9]+)+){TAIL}"),
)
NOT_OURS = re.compile(
    r"(?:#SBATCH|\bray (?:start|job)|\bsrun|\btorchrun|\bpip|\bhf|\bdocker) [^;\n)]*"
    r"|--(?:hash=|rdzv-)[^;\n]*|--gpu(?:s-per-|-bind)[\w=-]*|@[\w.]+\([^)]*\)"
)
"""Commands of other programs, and a decorator of Python."""
COMMAND = re.compile(r"(?<![\w./'-])mmrl (?P<name>[a-z]+)(?: (?P<sub>[a-z]+))?(?:(?!\bmmrl )[^;,)\n])*")
OPTION = re.compile(r"(?<![\w-])--(?P<option>[a-z][a-z0-9-]*)")
PROSE = {
    *("has", "writes", "pins", "sets", "gives", "gave", "made", "does", "reads", "at", "is", "itself", "on", "for"),
    *("starts", "and", "with", "ships", "of", "makes", "knows", "cannot", "needs", "under", "from", "as", "in", "or"),
    *("only", "lists", "reward"),
}
"""Words after the name of the program that are no command of it."""


WRITTEN = r"\{[^}]*\}|\[[^\]]*\]|[\w.+/-]*\w"
ALTERNATIVES = (
    re.compile(rf"\bset (?P<key>{KEY})(?: to |=|: )(?P<below>less than )?(?P<value>{WRITTEN})"),
    re.compile(rf"\buse (?P<key>{KEY})=(?P<value>{WRITTEN})"),
    re.compile(rf"\b(?P<remove>remove|leave out) (?P<key>{KEY})"),
)
IN_A_ROW = re.compile(rf"\b(set {KEY}=(?:{WRITTEN})) (?={KEY}=)")
NO_KEYS = {"it", "them", "that", "the", "both", "this", "one", "or", "to", "of"}


class Literal(NamedTuple):
    """A text of the code, with ``GAP`` where a value is put in."""

    file: str
    line: int
    text: str


@cache
def literals() -> tuple[Literal, ...]:
    """Every text in the code of the toolkit that is no docstring."""
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(found for file in files for found in literals_of(str(file.relative_to(ROOT))))


@cache
def literals_of(file: str) -> tuple[Literal, ...]:
    """The texts of one file, named from the root of the repository."""
    tree, found = ast.parse((ROOT / file).read_text(encoding="utf-8")), []
    inside = {id(part) for node in ast.walk(tree) for part in _parts(node)}
    for node in ast.walk(tree):
        text = None if id(node) in inside else _text(node)
        if text and " " in text:
            found.append(Literal(file, node.lineno, text))  # type: ignore[attr-defined]
    return tuple(found)


def _parts(node: ast.AST) -> Iterator[ast.AST]:
    """What is said with its parent, or is a docstring."""
    if isinstance(node, ast.JoinedStr):
        yield from (part for part in node.values if isinstance(part, ast.Constant))
    elif isinstance(node, ast.BinOp) and _text(node) is not None:
        yield from (node.left, node.right)
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        yield node.value


def _text(node: ast.AST) -> str | None:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else GAP for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = _text(node.left), _text(node.right)
        return None if None in parts else "".join(typing.cast("tuple[str, str]", parts))
    return None


@cache
def faults(text: str) -> list[str]:
    """What ``text`` tells a user to do that cannot be done so."""
    text = NOT_OURS.sub(GAP, text)
    return [*_keys(text), *_commands(text)]


def _keys(text: str) -> Iterator[str]:
    for pattern in EDITS:
        for match in pattern.finditer(text):
            key, value = match["key"], match.groupdict().get("value")
            head, _, rest = key.partition(".")
            if head not in Recipe.model_fields or (not rest and head in SECTIONS) or (not rest and value is None):
                continue
            if not (fields := annotations(key)):
                yield f"no recipe has {key}"
                continue
            after = text[match.end() :]
            whole = value not in (None, "{}") and GAP not in f"{value}{after[:1]}" and not re.match(r"[\w(@]", after)
            if whole and not ("=" not in match[0] and PROSE_FOLLOWS.match(after)) and not takes(fields, value):
                yield f"{key} does not take {value}"


def annotations(key: str) -> list[object]:
    """The types of a recipe's key, of all sections that it may be in; empty where there is no such key."""
    found: list[object] = [Recipe]
    for name in key.split("."):
        found = [below for one in found for below in _below(one, name)]
    return found


def _below(annotation: object, name: str) -> Iterator[object]:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            yield from _below(one, name)
    elif origin is typing.Annotated:
        if "as_settings" in str(inner):
            for algorithm in shipped_algorithms():
                yield from _below(algorithm.settings, name)
        else:
            yield from _below(inner[0], name)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        if (field := annotation.model_fields.get(name)) is not None:
            yield typing.Annotated[field.annotation, *field.metadata] if field.metadata else field.annotation
    elif origin is dict or annotation is dict or annotation is typing.Any:
        yield typing.Any


SECTIONS = {
    name for name in Recipe.model_fields if any(annotations(f"{name}.{key}") for key in ("type", "path", "name"))
}
SECTIONS |= {
    name
    for name, field in Recipe.model_fields.items()
    if "mmrl.config" in str(field.annotation) or "Settings" in str(field.annotation)
}


def takes(fields: list[object], value: str) -> bool:
    """Whether a key of one of these types takes a value as it is written; true for the place of one (``ORG/NAME``)."""
    try:
        read = yaml.safe_load(value)
    except yaml.YAMLError:
        return True  # an example with a part left out
    if "..." in value or re.fullmatch(r"[A-Z]|[A-Z]{2,}.*", str(read)):
        return True
    for annotation in fields:
        with suppress(ValidationError):
            TypeAdapter(annotation).validate_python(read)
            return True
    return False


@cache
def commands() -> dict[str, set[str]]:
    """The options of every command of ``mmrl``, by its name; of a group by both names."""
    from mmrl.studies.knowledge.training import Settings

    found: dict[str, set[str]] = {}

    def add(prefix: str, command) -> None:
        options = {name.removeprefix("--") for p in command.params for name in (*p.opts, *p.secondary_opts)}
        found[prefix] = {name for name in options if not name.startswith("-")} | {"help"}
        for name, below in getattr(command, "commands", {}).items():
            add(f"{prefix} {name}".strip(), below)

    add("", typer.main.get_command(app))
    words = {field.name for field in dataclasses.fields(Settings)}
    found["knowledge"] = {*words, "example"}  # python -m mmrl.studies.knowledge
    return found


def _commands(text: str) -> Iterator[str]:
    known = commands()
    owned: dict[int, tuple[str, set[str]]] = {}
    for match in COMMAND.finditer(text):
        start, end = match.span()
        both = f"{match['name']} {match['sub']}"
        name = both if both in known else match["name"]
        if name not in known:
            if name not in PROSE:
                yield f"mmrl has no command {name}"
            continue
        for at in OPTION.finditer(text, start, end):
            owned[at.start()] = (name, known[name])
    every = set().union(*commands().values())
    for at in OPTION.finditer(text):
        name, options = owned.get(at.start(), ("any command", every))
        if at["option"] not in options:
            yield f"--{at['option']} is no option of {name}"


def content(name: str) -> tuple[Path, dict]:
    """The file of a shipped recipe, and what it says."""
    (file,) = ROOT.glob(f"pipelines/*/recipes/{name}.yaml")
    return file, yaml.safe_load(file.read_text())


def put(recipe: dict, key: str, value: object, *, remove: bool = False) -> dict:
    """A copy of ``recipe`` with ``key`` set, or taken away."""
    made = json.loads(json.dumps(recipe))
    *path, last = key.split(".")
    section = made
    for name in path:
        if not isinstance(section.get(name), dict):
            if remove:
                return made
            section[name] = {"type": section[name]} if isinstance(section.get(name), str) else {}
        section = section[name]
    if remove:
        section.pop(last, None)
    else:
        section[last] = value
    return made


def edits(message: str) -> list[list[tuple[str, object, bool]]]:
    """The alternatives that a message names, each of one or more edits: key, value, whether the key is taken away."""
    message = message.removeprefix("training stops here: ")
    subject = message.partition(":")[0]
    found = []
    for part in re.split(r", or |; ", IN_A_ROW.sub(r"\1 set ", message.partition(";")[2])):
        together = []
        for pattern in ALTERNATIVES:
            for match in pattern.finditer(part):
                named = match["key"].rstrip(".")
                key = subject if named == "it" else named
                if key in NO_KEYS or (key != subject and key.split(".")[0] not in Recipe.model_fields):
                    continue
                remove = "remove" in match.groupdict()
                if not remove and not takes(annotations(key) or [typing.Any], match["value"]):
                    continue  # a word of the sentence; a value that is none is a fault by itself
                value = None if remove else yaml.safe_load(match["value"])
                together.append((key, value - 1 if match.groupdict().get("below") else value, remove))
        found += [together] if together else []
    return found

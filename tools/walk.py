"""How far a reader climbs: the calls below a function, read from the syntax tree, by the layers they cross.

    python tools/walk.py                                       # train_step and build
    python tools/walk.py mmrl.training.loop:train_step --each  # every climb of one function
    python tools/walk.py --layers v0.1.0                       # with the layers as they were at a commit

A *climb* is a call of a function in a higher layer of ``tools/layers.py``. No module imports a higher one, so a climb
calls something that was handed down: a method of a protocol that a higher layer implements, or a function that was
passed as an argument. A *return* is a call of a lower layer: the reader goes down, and comes back. Each pair of caller
and callee counts once.

What is followed, from the annotations alone (nothing is imported):

- functions and classes by their names, methods and properties by the types of what they are called on: parameters,
  fields, ``self``, results of calls, elements of containers;
- a method of a protocol or of a base class leads to every class that implements it;
- a function that is passed to a call leads from the callee to that function: the callee calls it. Where the callee is
  of a library, it leads from the caller.

Calls by names that strings carry (drop-in files) are not seen, nor those of values without a type.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from layers import LAYERS, ROOT, modules, placed

STARTS = ("mmrl.training.loop:train_step", "mmrl.app.build:build")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_UNIONS = ("Optional", "Annotated", "Final", "ClassVar", "type")


class Name(NamedTuple):
    """A definition: its module, and its name there (``Class.method``)."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"


class Type(NamedTuple):
    """An annotation, and the module in which its names are looked up."""

    module: str
    node: ast.expr


class Edge(NamedTuple):
    caller: Name
    callee: Name


@dataclass
class Class:
    """A class: its bases, methods, and the annotations of its fields."""

    module: str
    node: ast.ClassDef
    methods: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    fields: dict[str, Type] = field(default_factory=dict)

    @property
    def protocol(self) -> bool:
        return any(ast.unparse(base).partition("[")[0].endswith("Protocol") for base in self.node.bases)


@dataclass
class House:
    """All modules: their names (``import`` included), functions and classes."""

    trees: Mapping[str, ast.Module]
    functions: dict[Name, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    classes: dict[Name, Class] = field(default_factory=dict)
    imported: dict[Name, str] = field(default_factory=dict)
    """What a name of a module means, by its full name."""
    aliases: dict[Name, Type] = field(default_factory=dict)
    """Names that stand for types: ``Pipeline = A | B``; and annotated names of a module."""
    implemented: dict[Name, list[Name]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for module, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    self._import(module, node)
            for node in tree.body:
                self._define(module, node)
        for of in self.classes.values():
            self._fields_of_init(of)

    def _import(self, module: str, node: ast.Import | ast.ImportFrom) -> None:
        source = ""
        if isinstance(node, ast.ImportFrom):
            package = module.split(".")
            if node.level:
                here = package if f"{module}.{_INSIDE}" in self.trees else package[:-1]
                source = ".".join([*here[: len(here) - node.level + 1], *filter(None, [node.module])])
            else:
                source = node.module or ""
        for alias in node.names:
            full = f"{source}.{alias.name}" if source else alias.name
            if alias.asname or source:
                self.imported[Name(module, alias.asname or alias.name)] = full
            else:
                self.imported[Name(module, alias.name.partition(".")[0])] = alias.name.partition(".")[0]

    def _define(self, module: str, node: ast.stmt) -> None:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self.functions[Name(module, node.name)] = node
            case ast.ClassDef():
                of = self.classes[Name(module, node.name)] = Class(module, node)
                for inner in node.body:
                    if isinstance(inner, FUNCTIONS):
                        of.methods[inner.name] = inner
                        self.functions[Name(module, f"{node.name}.{inner.name}")] = inner
                    elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                        of.fields[inner.target.id] = Type(module, inner.annotation)
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.aliases[Name(module, name)] = Type(module, value)
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                alias = value is not None and ast.unparse(annotation).endswith("TypeAlias")
                self.aliases[Name(module, name)] = Type(module, value if alias and value else annotation)
            case ast.If():
                for inner in node.body:
                    self._define(module, inner)
            case _:
                pass

    def _fields_of_init(self, of: Class) -> None:
        """The types of ``self.x`` that ``__init__`` and the other methods assign."""
        for method in sorted(of.methods.values(), key=lambda m: m.name != "__init__"):
            body = Body(self, Name(of.module, f"{of.node.name}.{method.name}"), method)
            for node in ast.walk(method):
                match node:
                    case ast.AnnAssign(target=ast.Attribute(value=ast.Name(id="self"), attr=name), annotation=of_type):
                        of.fields.setdefault(name, Type(of.module, of_type))
                    case ast.Assign(targets=targets, value=value):
                        for target in targets:
                            for one, given in _paired(target, value):
                                match one:
                                    case ast.Attribute(value=ast.Name(id="self"), attr=name) if found := body.type(
                                        given
                                    ):
                                        of.fields.setdefault(name, found)
                                    case _:
                                        pass
                    case _:
                        pass

    def meant(self, module: str, name: str) -> Name | None:
        """The definition that ``name`` stands for in ``module``."""
        if Name(module, name) in self.functions or Name(module, name) in self.classes:
            return Name(module, name)
        full = self.imported.get(Name(module, name))
        return None if full is None else self.defined(full)

    def defined(self, full: str, depth: int = 0) -> Name | None:
        """The definition by its full name, through modules that hand names on."""
        module, _, name = full.rpartition(".")
        if not module or depth > 5:
            return None
        here = Name(module, name)
        if here in self.functions or here in self.classes or here in self.aliases:
            return here
        return self.defined(self.imported[here], depth + 1) if here in self.imported else None

    def classes_of(self, of: Type | None, depth: int = 0) -> list[Name]:
        """The classes that an annotation names."""
        if of is None or depth > 8:
            return []
        module, node = of
        match node:
            case ast.Constant(value=str(text)):
                try:
                    return self.classes_of(Type(module, ast.parse(text, mode="eval").body), depth + 1)
                except SyntaxError:
                    return []
            case ast.BinOp(left=left, op=ast.BitOr(), right=right):
                sides = (self.classes_of(Type(module, side), depth + 1) for side in (left, right))
                return [name for side in sides for name in side]
            case ast.Subscript(value=value, slice=part):
                parts = part.elts if isinstance(part, ast.Tuple) else [part]
                if ast.unparse(value).rpartition(".")[2] in _UNIONS:
                    return [n for p in parts for n in self.classes_of(Type(module, p), depth + 1)]
                return self.classes_of(Type(module, value), depth + 1)
            case ast.Name(id=name):
                found = self.meant(module, name) or (Name(module, name) if Name(module, name) in self.aliases else None)
            case ast.Attribute():
                found = self.named(module, node)
            case _:
                return []
        if found is None:
            return []
        return [found] if found in self.classes else self.classes_of(self.aliases.get(found), depth + 1)

    def named(self, module: str, node: ast.expr) -> Name | None:
        """The definition that a dotted name (``module.function``) stands for."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        if not parts:
            return self.meant(module, node.id)
        full = self.imported.get(Name(module, node.id))
        if full is None or self.defined(full) in self.classes:
            return None
        return self.defined(".".join([full, *parts]))

    def line(self, of: Name, seen: frozenset[Name] = frozenset()) -> list[Name]:
        """A class and those it inherits from, nearest first."""
        bases = [b for base in self.classes[of].node.bases for b in self.classes_of(Type(of.module, base))]
        return [of, *(name for base in bases if base not in seen for name in self.line(base, seen | {of}))]

    def member(self, of: Name, attribute: str) -> Name | None:
        """The class in the line of ``of`` that defines a method or a field."""
        holds = (c for c in self.line(of) if {attribute} & {*self.classes[c].methods, *self.classes[c].fields})
        return next(holds, None)

    def below(self, of: Name) -> list[Name]:
        """The classes that implement ``of``: those that inherit from it, and of a protocol all with its members."""
        if of not in self.implemented:
            self.implemented[of] = self._below(of)
        return self.implemented[of]

    def _below(self, of: Name) -> list[Name]:
        asked = self.classes[of]
        wanted = {n for n in (*asked.methods, *asked.fields) if not n.startswith("__")}
        found: list[Name] = []
        for name, other in self.classes.items():
            if name == of or other.protocol:
                continue
            if of in self.line(name) or (asked.protocol and wanted & {*asked.methods} and self._fits(name, of, wanted)):
                found.append(name)
        return found

    def _fits(self, name: Name, protocol: Name, wanted: set[str]) -> bool:
        """Whether a class has the members of a protocol, and its methods take as many arguments."""
        for member in wanted:
            where, asked = self.member(name, member), self.classes[protocol].methods.get(member)
            own = self.classes[where].methods.get(member) if where else None
            if where is None or (asked and own and not _takes(own.args, asked.args)):
                return False
        return True

    def methods(self, of: Name, attribute: str) -> list[Name]:
        """The functions that ``value.attribute`` may be, for a value of class ``of``."""
        found: dict[Name, None] = {}
        for one in (of, *self.below(of)):
            where = self.member(one, attribute)
            if where and attribute in self.classes[where].methods and not self.classes[where].protocol:
                found[Name(where.module, f"{where.name}.{attribute}")] = None
        return list(found)


_INSIDE = "__init__"


def _takes(own: ast.arguments, asked: ast.arguments) -> bool:
    """Whether a method of these parameters can be called as one of the protocol's."""
    most, given = len(own.posonlyargs + own.args), len(asked.posonlyargs + asked.args)
    return own.vararg is not None or asked.vararg is not None or most - len(own.defaults) <= given <= most


def _paired(target: ast.expr, value: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
        for one, given in zip(target.elts, value.elts, strict=True):
            yield from _paired(one, given)
    else:
        yield target, value


@dataclass
class Body:
    """One function: the types of its names, and whom it calls."""

    house: House
    name: Name
    node: ast.FunctionDef | ast.AsyncFunctionDef
    names: dict[str, Type] = field(default_factory=dict)

    def __post_init__(self) -> None:
        module = self.name.module
        holder = Name(module, self.name.name.rpartition(".")[0])
        arguments = self.node.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for one in every:
            if one.annotation is not None:
                self.names[one.arg] = Type(module, one.annotation)
        if every and holder in self.house.classes and every[0].arg in ("self", "cls"):
            self.names[every[0].arg] = Type(module, ast.Name(holder.name))
        self.inner = {n.name: n for n in ast.walk(self.node) if isinstance(n, FUNCTIONS) and n is not self.node}

    def learn(self) -> None:
        """The types of the local names, in the order of the lines."""
        for node in ast.walk(self.node):
            match node:
                case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation):
                    self.names[name] = Type(self.name.module, annotation)
                case ast.Assign(targets=[target], value=value):
                    for one, given in _paired(target, value):
                        self._learn(one, self.type(given))
                case ast.NamedExpr(target=target, value=value):
                    self._learn(target, self.type(value))
                case ast.withitem(context_expr=value, optional_vars=ast.Name() as target):
                    self._learn(target, self.type(value))
                case ast.For(target=target, iter=source) | ast.comprehension(target=target, iter=source):
                    self._learn_element(target, source)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]:
                        if one.annotation is not None:
                            self.names.setdefault(one.arg, Type(self.name.module, one.annotation))
                case _:
                    pass

    def _learn(self, target: ast.expr, of: Type | None) -> None:
        if of is None:
            return
        if isinstance(target, ast.Name):
            self.names.setdefault(target.id, of)
        elif (
            isinstance(target, ast.Tuple)
            and isinstance(of.node, ast.Subscript)
            and isinstance(of.node.slice, ast.Tuple)
        ):
            for one, part in zip(target.elts, of.node.slice.elts, strict=False):
                self._learn(one, Type(of.module, part))

    def _learn_element(self, target: ast.expr, source: ast.expr) -> None:
        match source:
            case ast.Call(func=ast.Name(id="enumerate"), args=[value, *_]) if isinstance(target, ast.Tuple):
                return self._learn_element(target.elts[1], value)
            case ast.Call(func=ast.Name(id="zip"), args=values) if isinstance(target, ast.Tuple):
                for one, value in zip(target.elts, values, strict=False):
                    self._learn_element(one, value)
                return None
            case ast.Call(func=ast.Attribute(value=value, attr="values" | "items" as way), args=[]):
                last = target.elts[-1] if way == "items" and isinstance(target, ast.Tuple) else target
                return self._learn(last, self._element(self.type(value)))
            case _:
                return self._learn(target, self._element(self.type(source)))

    def _element(self, of: Type | None) -> Type | None:
        if of is None:
            return None
        if isinstance(of.node, ast.Name) and (alias := self.house.aliases.get(Name(of.module, of.node.id))):
            of = alias
        if not isinstance(of.node, ast.Subscript):
            return None
        part = of.node.slice
        return Type(of.module, part.elts[-1] if isinstance(part, ast.Tuple) else part)

    def type(self, node: ast.expr) -> Type | None:
        """The annotation of an expression, where one can be found."""
        match node:
            case ast.Name(id=name):
                alias = self.house.aliases.get(Name(self.name.module, name))
                return self.names.get(name) or (alias if alias and not isinstance(alias.node, ast.Constant) else None)
            case ast.Attribute(value=value, attr=attribute):
                for of in self.house.classes_of(self.type(value)):
                    if where := self.house.member(of, attribute):
                        held = self.house.classes[where]
                        if attribute in held.fields:
                            return held.fields[attribute]
                        returns = held.methods[attribute].returns
                        return None if returns is None else Type(where.module, returns)
                return None
            case ast.Call(func=called):
                return self._result(called)
            case ast.Subscript(value=value):
                return self._element(self.type(value))
            case ast.BoolOp(values=[first, *_]) | ast.IfExp(body=first):
                return self.type(first)
            case ast.Await(value=value) | ast.NamedExpr(value=value):
                return self.type(value)
            case _:
                return None

    def _result(self, called: ast.expr) -> Type | None:
        for of in self.called(called):
            if of in self.house.classes:
                return Type(of.module, ast.Name(of.name))
            returns = self.house.functions[of].returns
            if returns is not None:
                holder = of.name.rpartition(".")[0]
                own = ast.unparse(returns) == "Self" and holder
                return Type(of.module, ast.Name(holder) if own else returns)
        if isinstance(called, ast.Attribute):  # of a protocol whose classes say the same
            return self.type(called)
        return None

    def called(self, node: ast.expr) -> list[Name]:
        """The functions (or the class) that an expression names."""
        match node:
            case ast.Name(id=name) if name not in self.names and name not in self.inner:
                found = self.house.meant(self.name.module, name)
                return [found] if found else []
            case ast.Attribute(value=value, attr=attribute):
                if found := self.house.named(self.name.module, node):
                    return [found] if found in self.house.functions or found in self.house.classes else []
                held = self.house.classes_of(self.type(value)) or self.house.classes_of(Type(self.name.module, value))
                return [name for of in held for name in self.house.methods(of, attribute)]
            case _:
                return []

    def handed(self, call: ast.Call) -> list[Name]:
        """The functions that are arguments of a call, inside ``partial`` too."""
        found: list[Name] = []
        for argument in [*call.args, *(keyword.value for keyword in call.keywords)]:
            if isinstance(argument, ast.Call) and ast.unparse(argument.func).endswith("partial"):
                found += self.handed(argument)
            elif isinstance(argument, ast.Name | ast.Attribute):
                found += [name for name in self.called(argument) if self._is_function(name)]
        return found

    def _is_function(self, name: Name) -> bool:
        node = self.house.functions.get(name)
        return node is not None and not any("property" in ast.unparse(d) for d in node.decorator_list)

    def edges(self) -> Iterator[Edge]:
        """Whom this function calls, and whom its callees call because it passes them on."""
        self.learn()
        inner = {name: Name(self.name.module, f"{self.name.name}.{name}") for name in self.inner}
        for node in ast.walk(self.node):
            if isinstance(node, ast.Attribute) and isinstance(
                node.ctx, ast.Load
            ):  # a property is called when it is read
                for name in self.called(node):
                    if name in self.house.functions and not self._is_function(name):
                        yield Edge(self.name, name)
            if not isinstance(node, ast.Call):
                continue
            callees = [self._entry(name) for name in self.called(node.func)]
            callees = [name for name in callees if name is not None]
            for callee in callees:
                yield Edge(self.name, callee)
            given = self.handed(node)
            given += [inner[a.id] for a in node.args if isinstance(a, ast.Name) and a.id in inner]
            for one in given:
                for callee in callees or [self.name]:
                    yield Edge(callee, one)

    def _entry(self, name: Name) -> Name | None:
        """What runs when ``name`` is called: of a class its ``__init__``."""
        if name in self.house.functions:
            return name
        for method in ("__init__", "__post_init__"):
            where = self.house.member(name, method)
            if where:
                return Name(where.module, f"{where.name}.{method}")
        return None


def walk(house: House, start: Name) -> set[Edge]:
    """Every call that ``start`` leads to."""
    if start not in house.functions:
        raise ValueError(f"no function {start}; write MODULE:FUNCTION, such as {STARTS[0]}")
    found: set[Edge] = set()
    seen, waiting = {start}, [start]
    while waiting:
        here = waiting.pop()
        node = house.functions.get(here)
        new = set() if node is None else set(Body(house, here, node).edges())
        for edge in new - found:
            found.add(edge)
            if edge.callee not in seen:
                seen.add(edge.callee)
                waiting.append(edge.callee)
    return found


def house_of(root: Path) -> House:
    return House({name: ast.parse(path.read_bytes(), filename=str(path)) for name, path in modules(root).items()})


def counted(edges: set[Edge], levels: Mapping[str, int]) -> tuple[list[Edge], list[Edge]]:
    """The climbs and the returns among ``edges``."""
    up = sorted(e for e in edges if levels[e.callee.module] > levels[e.caller.module])
    down = sorted(e for e in edges if levels[e.callee.module] < levels[e.caller.module])
    return up, down


def with_later(old: Mapping[str, str]) -> dict[str, str]:
    """``old`` layers, with the layers and modules that came later where they lie now."""
    order, known = list(old), [word for words in old.values() for word in words.split()]
    for name, above in reversed(list(pairwise([*LAYERS, ""]))):
        if name not in old:
            order.insert(order.index(above) if above else len(order), name)
    later = {
        name: [w for w in LAYERS.get(name, "").split() if not any(w == k or w.startswith(f"{k}.") for k in known)]
        for name in order
    }
    return {name: " ".join([old.get(name, ""), *later[name]]) for name in order}


def still_there(layers: Mapping[str, str], there: Collection[str]) -> dict[str, str]:
    """``layers`` without the names that no module of ``there`` has or begins with any more."""

    def known(word: str) -> bool:
        return word in there or any(f"{name}.".startswith(f"mmrl.{word}.") for name in there)

    return {name: " ".join(filter(known, words.split())) for name, words in layers.items()}


def layers_of(commit: str) -> dict[str, str]:
    """``LAYERS`` as it stands at a commit. Raises ``ValueError`` for a commit that is not there."""
    shown = subprocess.run(["git", "show", f"{commit}:tools/layers.py"], cwd=ROOT, capture_output=True, text=True)
    if shown.returncode:
        raise ValueError(f"git finds no tools/layers.py at {commit}: {shown.stderr.strip()}")
    for node in ast.parse(shown.stdout).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "LAYERS":
            return ast.literal_eval(node.value)
    raise ValueError(f"tools/layers.py at {commit} has no LAYERS")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count the calls below a function that climb to a higher layer.")
    parser.add_argument("starts", nargs="*", default=STARTS, metavar="MODULE:FUNCTION")
    parser.add_argument("--each", action="store_true", help="print every climb")
    parser.add_argument("--layers", metavar="COMMIT", help="take the layers as they were at this commit")
    options = parser.parse_args(arguments)
    house = house_of(ROOT)
    layers = still_there(with_later(layers_of(options.layers)), house.trees) if options.layers else LAYERS
    levels, names = placed(house.trees, layers), list(layers)
    for start in options.starts:
        module, _, name = start.partition(":")
        try:
            edges = walk(house, Name(module, name))
        except ValueError as error:
            parser.error(str(error))
        up, down = counted(edges, levels)
        reached = {e.callee for e in edges}
        files = len({name.module for name in reached})
        print(f"{start}: {len(up)} climbs, {len(down)} returns; {len(reached)} functions in {files} files")
        for caller, callee in up if options.each else ():
            print(f"  {caller} [{names[levels[caller.module]]}] -> {callee} [{names[levels[callee.module]]}]")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Turn pydantic's errors into messages about a recipe: the expected value, the given value, and a suggestion."""

from __future__ import annotations

import difflib
import types
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias, Union, get_args, get_origin

from pydantic import BaseModel, ByteSize, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from mmrl.config.algorithm_settings import AlgorithmSettings
from mmrl.config.algorithms import AlgorithmError, find_algorithm, for_samples, shipped_algorithms
from mmrl.config.aliases import why_missing
from mmrl.config.errors import Finding, KeyPath, did_you_mean
from mmrl.config.layers import Tree, kind_of, parse_key
from mmrl.config.peer_names import peer_message
from mmrl.config.sampling import TextSampling
from mmrl.config.sampling import kind_of as sampling_kind
from mmrl.config.schema import Recipe
from mmrl.config.section import OWN_CLASS, seconds_of
from mmrl.core.json_types import Json, JsonObject, value_at

Annotation: TypeAlias = object
"""The annotation of a key: a type, a union, ``Annotated``, ``Literal``. Python has no narrower type for these; None
means an unknown key."""

_OFF: dict[KeyPath, str] = {("eval", "every"): "null evaluates nothing"}
"""What turns off a feature that 0 does not."""
MOST_EXPLAINED = 50
"""Largest number of errors that are explained: the search for what an unknown key may mean is slow."""


def explain(error: ValidationError, tree: Tree) -> Iterator[Finding]:
    """The errors of ``error``, each placed where its key is written (or, if it is missing, where it should be); at most
    ``MOST_EXPLAINED``."""
    details = error.errors(include_url=False)
    if len(details) > MOST_EXPLAINED:
        further = f"{len(details) - MOST_EXPLAINED} more problems are not listed"
        yield Finding(max(tree.sources.values()), (), further)
    for detail in details[:MOST_EXPLAINED]:
        if detail["type"] == "value_error":
            said = str(detail.get("ctx", {}).get("error", detail["msg"]))
            yield from contradictions(said, tree, _path(detail["loc"], tree.values))
            continue
        path = _path(detail["loc"], tree.values)
        if detail["type"].startswith("union_tag"):
            path = (*path, "type")
        yield Finding(tree.source(path), path, _message(detail, path, tree.values))


def implicit_booleans(recipe: Recipe, tree: Tree) -> Iterator[Finding]:
    """``true`` in place of a number, which pydantic would accept as 1."""
    values = recipe.model_dump()
    for path in tree.sources:
        written, taken = value_at(tree.values, path), value_at(values, path)
        if isinstance(written, bool) and isinstance(taken, int | float) and not isinstance(taken, bool):
            yield Finding(tree.source(path), path, _expected(path, tree.values, written))


def contradictions(text: str, tree: Tree, at: KeyPath = ()) -> Iterator[Finding]:
    """The lines ``key: why; edit`` of a check, each placed where its key is written; a line without a key is placed at
    ``at``."""
    for line in text.splitlines():
        key, _, why = line.partition(": ")
        path = parse_key(key) or ()
        known = bool(path) and (not at or path[0] in Recipe.model_fields)
        yield Finding(tree.source(path if known else at), path if known else at, why if known else line)


def _message(detail: ErrorDetails, path: KeyPath, values: JsonObject) -> str:
    found = detail["input"]
    match detail["type"]:
        case "extra_forbidden":
            return _unknown(path, values)
        case "missing":
            return f"missing; add it ({_describe(_annotation(path, values))})"
        case "union_tag_not_found":
            return f"missing; write one of {', '.join(_variants(path[:-1], values))}"
        case "union_tag_invalid":
            known = _variants(path[:-1], values)
            written = kind_of(found.get("type") if isinstance(found, dict) else found)
            word = written.strip("'")
            return f"unknown type {written}{did_you_mean(word, known)}  (types: {', '.join(known)})"
        case _:
            return _expected(path, values, found)


def _expected(path: KeyPath, values: JsonObject, found: Json) -> str:
    annotation = _annotation(path, values)
    message = f"expected {_describe(annotation)}, got {kind_of(found)}"
    size, most = len(found) if isinstance(found, list) else found, _most(annotation)
    if isinstance(size, int | float) and most is not None and size > most and f" to {most}" not in message:
        message += f" ({most:,} at most)"
    if isinstance(found, str):
        message += did_you_mean(found, _choices(annotation))
    if isinstance(found, str | dict) and any("name" in of.model_fields for of in _sections(_item(annotation, 0))):
        message += f"; write a list: [{{name: {found}}}]" if isinstance(found, str) else "; put [ ] around it"
    if found == 0 and (off := _OFF.get(path)):
        message += f" ({off})"
    if found is None and _has_default(path, values):
        message += " (remove the line to take the defaults)"
    return message


def _unknown(path: KeyPath, values: JsonObject) -> str:
    key = str(path[-1])
    section = _section(path[:-1], values)
    assert section is not None, "only a section forbids keys"
    siblings = list(section.model_fields)
    listed = f"  (keys: {', '.join(siblings)})"
    if issubclass(section, AlgorithmSettings) and (why := why_missing(section, _tag(section), key)):
        return f"{why}; remove it{listed}"
    others = [s for s in _sections(_annotation(path[:-1], values)) if s is not section and key in s.model_fields]
    peer = peer_message(".".join(map(str, path)), value_at(values, path)) if others else ""
    if others and peer:
        peer += f"; type {', '.join(map(_tag, others))} have a key of this name"
    elif others:
        type_ = for_samples(value_at(values, (*path[:-1], "type")), values.get("sampling")) or _tag(section)
        owners = " and ".join(map(_tag, others))
        name = path[-2]
        return (
            f"belongs to type {owners}, this section's type is {type_}; remove it, "
            f"or replace the whole section with '{name}={{type: {type_}}}'{listed}"
        )
    ours = key in _all_keys() or key in {dotted.rpartition(".")[2] for dotted in _all_keys()}
    if not ours and not peer:
        peer = peer_message(".".join(map(str, path)), value_at(values, path))
    return f"unknown key{peer or _meant(key, path[:-1], siblings)}{listed}"


def _meant(key: str, parent: KeyPath, siblings: list[str]) -> str:
    """The likeliest meaning, in this order: a typo of a sibling key, the same key in another section, a typo of a key
    in another section, any similar sibling."""
    if key in _all_keys() and "." in key:
        section, _, leaf = key.rpartition(".")
        return f"; in a file keys are nested, without dots: write {leaf} inside {section}"
    slip = did_you_mean(key, siblings, 0.75)
    if slip:
        return slip
    leaf_of = {dotted: dotted.rpartition(".")[2] for dotted in _all_keys()}
    prefix = ".".join(map(str, parent)) + "."
    for leaf in (key, *difflib.get_close_matches(key, leaf_of.values(), n=1, cutoff=0.8)):
        found = sorted((d for d in leaf_of if leaf_of[d] == leaf), key=lambda d: not d.startswith(prefix))
        if found:
            return f"; did you mean {' or '.join(map(repr, found[:3]))}?"
    return did_you_mean(key, siblings)


@cache
def _all_keys() -> tuple[str, ...]:
    """Every key of the schema, lists by their first item: ``optim.lr``, ``rewards[0].weight``."""

    def walk(section: type[BaseModel], prefix: str) -> Iterator[str]:
        for name, info in section.model_fields.items():
            annotation = _of(info)
            yield prefix + name
            item = _item(annotation, 0)
            for inner in _sections(annotation):
                yield from walk(inner, f"{prefix}{name}.")
            for inner in _sections(item) if item is not None else ():
                yield from walk(inner, f"{prefix}{name}[0].")

    return tuple(dict.fromkeys(walk(Recipe, "")))


# Walk the schema along the values: the annotation and the section of a key path.


def _path(loc: tuple[str | int, ...], values: JsonObject) -> KeyPath:
    """``loc`` without the tags that pydantic inserts for unions."""
    path: KeyPath = ()
    for part in loc:
        annotation = _annotation(path, values)
        kinds = _sections(annotation)
        if len(kinds) > 1 and path and part in [_tag(kind) for kind in kinds]:
            continue
        if isinstance(part, str) and path and not kinds and annotation is not None and not _maps(annotation):
            continue  # a number or a word: pydantic names each alternative
        path = (*path, part)
    return path


def _annotation(path: KeyPath, values: JsonObject) -> Annotation:
    annotation: Annotation = Recipe
    for depth, part in enumerate(path):
        if isinstance(part, int):
            annotation = _item(annotation, part)
            continue
        section = _chosen(annotation, value_at(values, path[:depth]))
        if section is None or part not in section.model_fields:
            return None
        annotation = _of(section.model_fields[part])
    return annotation


def _section(path: KeyPath, values: JsonObject) -> type[BaseModel] | None:
    written = value_at(values, path)
    if path == ("algorithm",) and isinstance(written, dict):
        written = {**written, "type": for_samples(written.get("type"), values.get("sampling"))}
    return _chosen(_annotation(path, values), written)


def _chosen(annotation: Annotation, written: Json) -> type[BaseModel] | None:
    kinds = _sections(annotation)
    if len(kinds) > 1:
        tag = written.get("type") if isinstance(written, dict) else None
        if issubclass(kinds[0], AlgorithmSettings):
            return _algorithm(tag)
        if TextSampling in kinds:
            tag = sampling_kind(written)
        return next((kind for kind in kinds if _tag(kind) == tag), None)
    return kinds[0] if kinds else None


def _algorithm(name: Json) -> type[AlgorithmSettings] | None:
    try:
        return find_algorithm(name).settings if isinstance(name, str) else None
    except AlgorithmError:
        return None


def _variants(path: KeyPath, values: JsonObject) -> list[str]:
    return [_tag(kind) for kind in _sections(_annotation(path, values))]


def _has_default(path: KeyPath, values: JsonObject) -> bool:
    section = _section(path[:-1], values)
    info = section.model_fields.get(str(path[-1])) if section else None
    return info is not None and not info.is_required()


def _tag(section: type[BaseModel]) -> str:
    if issubclass(section, AlgorithmSettings):
        package, _, name = section.__module__.rpartition(".")
        return name if package else section.__name__
    return str(section.model_fields["type"].default)


def _of(info: FieldInfo) -> Annotation:
    return Annotated[(info.annotation, *info.metadata)] if info.metadata else info.annotation


def _parts(annotation: Annotation) -> tuple[Annotation, ...]:
    """The alternatives of a union, without their ``Annotated``; of a single type, that type."""
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(part for arg in get_args(annotation) for part in _parts(arg))
    return (annotation,)


def _sections(annotation: Annotation) -> list[type[BaseModel]]:
    """The sections that ``annotation`` allows; for the algorithm those of all shipped algorithms."""
    parts = [part for part in _parts(annotation) if isinstance(part, type) and issubclass(part, BaseModel)]
    return [found.settings for found in shipped_algorithms()] if parts == [AlgorithmSettings] else parts


def _item(annotation: Annotation, index: int) -> Annotation:
    for part in _parts(annotation):
        if get_origin(part) is list:
            return get_args(part)[0]
        if get_origin(part) is tuple and index < len(get_args(part)):
            return get_args(part)[index]
    return None


def _maps(annotation: Annotation) -> bool:
    """Whether ``annotation`` is a mapping with free keys."""
    return any(part is Any or part is dict or get_origin(part) is dict for part in _parts(annotation))


def _choices(annotation: Annotation) -> list[str]:
    return [str(choice) for part in _parts(annotation) if get_origin(part) is Literal for choice in get_args(part)]


# Describe in words what an annotation expects.


_Bounds: TypeAlias = Mapping[str, Any]
"""The constraints of ``Annotated`` by their names, and ``duration``; those that are not set are absent."""
_CONSTRAINTS = ("gt", "ge", "lt", "le", "min_length", "max_length", "pattern")
_NONE: _Bounds = {}


def _describe(annotation: Annotation, bounds: _Bounds = _NONE) -> str:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        return _describe(inner, _bounds(metadata, bounds))
    if len(sections := _sections(annotation)) > 1:
        return f"a section with a type ({', '.join(map(_tag, sections))})"
    if get_origin(annotation) in (Union, types.UnionType):
        nullable = type(None) in get_args(annotation)
        words = [_describe(arg) for arg in get_args(annotation) if arg is not type(None)]
        return " or ".join([*words, "null"] if nullable else words)
    return _plain(annotation, bounds)


def _plain(annotation: Annotation, bounds: _Bounds) -> str:
    if annotation is int or annotation is float:
        if "duration" in bounds:
            return "a time like 90s, 10m or 1h 30m, or seconds"
        return _number("whole number" if annotation is int else "number", bounds)
    if annotation is ByteSize:
        return f"an amount of memory like 2 GiB, {ByteSize(bounds.get('ge', 0)).human_readable()} or more"
    if annotation is str and bounds.get("pattern") == OWN_CLASS:
        return "a class of your own (path/to/file.py:Class)"
    if annotation is str:
        return f"text that matches {bounds['pattern']}" if "pattern" in bounds else "text"
    if annotation is bool:
        return "true or false"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"a section with keys {', '.join(annotation.model_fields)}"
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return f"one of {', '.join(str(choice) for choice in args)}"
    if origin is list:
        at_least = f"{bounds['min_length']} or more, each " if bounds.get("min_length") else ""
        return f"a list ({at_least}{_describe(args[0])})"
    if origin is tuple:
        return f"a list of {len(args)} ({_describe(args[0])} each)"
    return "a mapping" if origin is dict else "a value"


def _number(noun: str, bounds: _Bounds) -> str:
    low, high = bounds.get("ge"), bounds.get("le")
    if bounds.get("gt") == 0:
        return f"a positive {noun}"
    if low is not None and high is not None:
        return f"a {noun} from {low} to {high}"
    if low is not None and "lt" in bounds:
        return f"a {noun} from {low} to below {bounds['lt']}"
    return f"a {noun}" if low is None else f"a {noun} of {low} or more"


def _most(annotation: Annotation) -> float | None:
    """The largest number, or the most items of a list, that is allowed; None without a limit."""
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        bounds = _bounds(metadata)
        most = bounds.get("le", bounds.get("max_length"))
        return _most(inner) if most is None else most
    if get_origin(annotation) in (Union, types.UnionType):
        return next((most for part in get_args(annotation) if (most := _most(part)) is not None), None)
    return None


def _bounds(metadata: Sequence[object], outer: _Bounds = _NONE) -> _Bounds:
    """The constraints in ``metadata``; ``outer`` has the defaults."""
    found = dict(outer)
    for item in metadata:
        if isinstance(item, FieldInfo):
            found = dict(_bounds(item.metadata, found))
            continue
        found |= {n: getattr(item, n) for n in _CONSTRAINTS if getattr(item, n, None) is not None}
        if getattr(item, "func", None) is seconds_of:
            found["duration"] = True
    return found

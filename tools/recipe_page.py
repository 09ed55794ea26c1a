"""Generate the page of all keys of a recipe: ``python tools/recipe_page.py``.

Types, ranges and defaults are those of the pydantic models; meanings are the docstrings below the fields, else below
the names of their types. A section that several keys take is described once, and so are keys that algorithms share. A
test compares the page with what this prints.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import pairwise
from typing import Annotated, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BeforeValidator, ByteSize
from pydantic.fields import FieldInfo

from mmrl.config import algorithm_settings as settings
from mmrl.config.algorithm_settings import AlgorithmSettings
from mmrl.config.algorithms import Algorithm, shipped_algorithms
from mmrl.config.sampling import Sampling, TextSampling
from mmrl.config.schema import Recipe
from mmrl.config.section import OWN_CLASS, Section, seconds_of

Places = Mapping[type[Section], str]
"""The heading under which each section is described."""

HEAD = """# Every key of a recipe

A recipe is a YAML file. Each part of this page is a section of it. Keys are written as on the command line:
`mmrl train mine.yaml optim.lr=1e-4` sets `lr` in the section `optim`; `rewards[0].weight=2` sets it for the first
reward. An unknown key or a value out of range is an error before a model is loaded. `mmrl plan mine.yaml` shows the
values that a run would have.

A line has the key, its type and its default, then what it means. None in a text is `null` in YAML.

`python tools/recipe_page.py` makes this page from the code; a test compares the two.
"""
ALGORITHM = """`type` names the algorithm; the other keys are its own. The defaults are the settings of its paper.
[Algorithms](../algorithms.md) has the formulas, and how to write one."""
SAMPLING: Places = {Sampling: "`sampling` of pictures and clips", TextSampling: "`sampling` of text"}
SHARED: Mapping[type[AlgorithmSettings], str] = {
    settings.TokenSettings: "Keys of policy gradients on text",
    settings.ClippedSettings: "Keys of clipped policy gradients on text",
    settings.TurnSettings: "Keys of credit for turns",
    settings.CriticSettings: "Keys of algorithms with a critic",
    settings.ResponseSettings: "Keys of algorithms on given responses",
    settings.PictureSettings: "Keys of algorithms that compare the pictures of a group",
    settings.StepSettings: "Keys of policy gradients on denoising steps",
    settings.ForwardSettings: "Keys of algorithms on the forward process",
    settings.PathwiseSettings: "Keys of algorithms on a differentiable reward",
}
"""What algorithms share: the classes of ``mmrl.config.algorithm_settings`` that have keys of their own."""
SLIP = 10**6
"""An upper limit from here on is there for slips of the pen, and is not shown."""
PLAIN: Mapping[object, str] = {
    str: "text",
    bool: "true or false",
    int: "whole number",
    float: "number",
    ByteSize: "size such as `512 MiB`",
    type(None): "`null`",
}


def page() -> str:
    """The whole page in Markdown. Imports all algorithms."""
    fields = Recipe.model_fields
    places = dict(_placed("", Recipe))
    out = [HEAD, "## Top level", ""]
    one_by_one = {name: field for name, field in fields.items() if not _is_section(field)}
    out += [line(name, f"key.{name}", field, places) for name, field in one_by_one.items()]
    for name, field in fields.items():
        for section in _sections_of(field.annotation):
            if section is AlgorithmSettings:
                out += _algorithms()
            elif places[section] in (SAMPLING.get(section), f"`{name}`"):
                out += _described(name, section, places, 2, in_list=_is_list(field))
    return "\n".join(out) + "\n"


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is list


def _is_section(field: FieldInfo) -> bool:
    return not _is_list(field) and any(True for _ in _sections_of(field.annotation))


def _sections_of(annotation: object) -> Iterator[type[Section]]:
    """The sections that a key takes, of its annotation however deep."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        yield annotation
    for part in get_args(annotation):
        yield from _sections_of(part)


def _placed(path: str, section: type[Section]) -> Iterator[tuple[type[Section], str]]:
    """Each section with its heading; a later one of the same section is of a key that comes first in a recipe."""
    fields = [(f"{path}.{name}".strip("."), field) for name, field in section.model_fields.items()]
    inner = [(name, one) for name, field in reversed(fields) for one in _sections_of(field.annotation)]
    for name, one in inner:
        yield from _placed(name, one)
    for name, one in inner:
        yield one, SAMPLING.get(one, f"`{name}`")


def _described(path: str, section: type[Section], places: Places, level: int, *, in_list: bool) -> Iterator[str]:
    yield from ("", f"{'#' * level} {places[section]}", "")
    if section.__doc__ and section.__doc__ != Section.__doc__:
        yield from (prose(section.__doc__), "")
    fields = section.model_fields.items()
    key = f"{path}[0]" if in_list else path
    anchors = f"{path}.text" if section is TextSampling else path
    yield from (line(f"{key}.{name}", f"{anchors}.{name}", field, places) for name, field in fields)
    for name, field in fields:
        for inner in _sections_of(field.annotation):
            if places[inner] == f"`{path}.{name}`":
                yield from _described(f"{path}.{name}", inner, places, level + 1, in_list=_is_list(field))


def line(key: str, anchor: str, field: FieldInfo, places: Places, meaning: str | None = None) -> str:
    """An item of the list: key, type, default, meaning."""
    kind = kind_of(field.annotation, field.metadata, places)
    default = "required" if field.is_required() else f"default {_default(field)}"
    text = prose(meaning or field.description or _of_types().get(str(field.annotation), ""))
    head = f'- <a id="{anchor}"></a>**`{key}`** ({kind}; {default})'
    return f"{head}: {text}" if text else head


def kind_of(annotation: object, metadata: Iterable[object], places: Places) -> str:
    """A type in words, with its range."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return kind_of(parts[0], [*parts[1:], *metadata], places)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        place = places.get(annotation)
        return f"section [{place}](#{slug(place)})" if place else "section"
    if origin is Literal:
        return " \\| ".join(f"`{part}`" for part in parts)
    if origin is list:
        return f"list of: {kind_of(parts[0], (), places)}"
    if origin is tuple:
        return "list of: " + ", ".join(kind_of(part, (), places) for part in parts)
    if origin is dict:
        return "keys and values"
    if parts:  # a union
        return " or ".join(dict.fromkeys(kind_of(part, (), places) for part in parts))
    return " ".join([PLAIN.get(annotation, str(annotation)), *_range(annotation, list(_flat(metadata)))])


def _flat(metadata: Iterable[object]) -> Iterator[object]:
    for one in metadata:
        if isinstance(one, FieldInfo):
            yield from one.metadata
        else:
            yield one


def _range(annotation: object, metadata: list[object]) -> Iterator[str]:
    for one in metadata:
        if isinstance(one, BeforeValidator) and one.func is seconds_of:
            yield "of seconds (or `10m`, `90s`)"
        if getattr(one, "pattern", None) == OWN_CLASS:
            yield "`path/to/file.py:Class`"
    if annotation is ByteSize:
        return
    for one in metadata:
        if isinstance(one, Gt):
            yield f"from {int(str(one.gt)) + 1}" if annotation is int else f"above {one.gt}"
        elif isinstance(one, Ge):
            yield f"from {one.ge}"
        elif isinstance(one, Le) and float(str(one.le)) < SLIP:
            yield f"to {one.le}"
        elif isinstance(one, Lt) and float(str(one.lt)) < SLIP:
            yield f"below {one.lt}"


@cache
def _of_types() -> dict[str, str]:
    """The docstrings below types that algorithms share (``Spread = Literal[...]``), by what the type prints as."""
    body = ast.parse(inspect.getsource(settings)).body
    return {
        str(getattr(settings, node.targets[0].id)): below.value.value
        for node, below in pairwise(body)
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str)
    }


def _default(field: FieldInfo) -> str:
    value: object = field.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, Section):
        return "see there"
    if isinstance(value, ByteSize):
        return f"`{value.human_readable()}`"
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def prose(docstring: str) -> str:
    """A docstring on one line of Markdown, pages of the documentation as links."""
    text = " ".join(docstring.split()).replace("``", "`")
    return re.sub(r"\bdocs/(\w+)\.md", r"[\1](../\1.md)", text)


def slug(heading: str) -> str:
    """The anchor that Markdown gives a heading."""
    return re.sub(r"[^\w\s-]", "", heading.lower()).strip().replace(" ", "-")


def _algorithms() -> Iterator[str]:
    yield from ("", "## `algorithm`", "", ALGORITHM)
    for shared, heading in SHARED.items():
        yield from ("", f"### {heading}", "")
        yield from _keys(shared, shared.__name__.removesuffix("Settings").lower(), [shared])
        if also := [SHARED[base] for base in shared.__mro__[1:] if base in SHARED]:
            yield from ("", f"Such an algorithm also has the {_links(also)}.")
    for algorithm in shipped_algorithms():
        yield from _algorithm(algorithm)


def _algorithm(algorithm: Algorithm) -> Iterator[str]:
    lineage = [cls for cls in algorithm.settings.__mro__ if issubclass(cls, AlgorithmSettings)]
    own = [cls for cls in lineage if cls.__module__ != settings.__name__]
    yield from ("", f"### `{algorithm.name}`", "")
    yield from (prose(algorithm.settings.__doc__ or ""), "")
    yield from _keys(algorithm.settings, algorithm.name, own)
    if also := [SHARED[cls] for cls in lineage if cls in SHARED]:
        yield from ("", f"It also has the {_links(also)}.")
    if departs := departs_of(algorithm.module.__doc__ or ""):
        yield from ("", f"Departs from its paper: {prose(departs)}")


def departs_of(text: str) -> str:
    """The paragraph of a docstring that begins with ``Departs:``, on one line; empty where there is none."""
    for paragraph in text.split("\n\n"):
        if paragraph.startswith("Departs:"):
            return " ".join(paragraph.removeprefix("Departs:").split())
    return ""


def _keys(section: type[AlgorithmSettings], anchors: str, defined_by: list[type[AlgorithmSettings]]) -> Iterator[str]:
    """The keys of ``section`` that one of ``defined_by`` defines; one that is defined anew without a docstring means
    what it does in the class above."""
    for name, field in section.model_fields.items():
        if name != "type" and any(name in cls.__annotations__ for cls in defined_by):
            above = [cls.model_fields.get(name) for cls in section.__mro__ if issubclass(cls, AlgorithmSettings)]
            meaning = next((one.description for one in above if one is not None and one.description), None)
            yield line(f"algorithm.{name}", f"algorithm.{anchors}.{name}", field, {}, meaning)


def _links(headings: list[str]) -> str:
    shown = [f"[{heading[0].lower()}{heading[1:]}](#{slug(heading)})" for heading in headings]
    return " and the ".join(shown)


if __name__ == "__main__":
    print(page(), end="")

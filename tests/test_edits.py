"""The edit that a message of the recipe names is executed: it takes the message away.

Every key gets every kind of value in turn, on recipes of every modality. Where the recipe is refused, the edits in the
message are carried out, each alternative alone: the same complaint must not come back.
"""

import json
import random
import re
import types
import typing
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
RECIPES = [
    "sums",
    "scenes",
    "shapes-lora",
    "shapes-dpo",
    "shapes-nft",
    "shapes-draft",
    "sums-dpo",
    "sums-capo",
    "sums-reward",
    "sums-sft",
    "moving-shapes",
]
KEY = r"[a-z_]+(?:\.[a-z_]+)*"
EDITS = (
    re.compile(rf"\bset (?P<key>{KEY})(?: to |=)(?P<value>\{{[^}}]*\}}|\[[^\]]*\]|[\w.+-]+)"),
    re.compile(rf"\bset (?P<key>{KEY}): (?P<value>[\w.+-]+)"),
    re.compile(rf"\b(?P<remove>remove|leave out) (?P<key>{KEY})"),
)
NO_KEYS = {"it", "them", "that", "the", "both", "this", "one", "or", "to", "of"}


def values(annotation: object, key: str) -> typing.Iterator[tuple[str, object]]:
    """Every leaf below a field, with values of its type."""
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for one in inner:
            yield from values(one, key)
    elif origin is typing.Annotated:
        yield from values(inner[0], key)
    elif isinstance(annotation, type) and issubclass(annotation, BaseModel):
        for name, field in annotation.model_fields.items():
            yield from values(field.annotation, f"{key}.{name}" if key else name)
    elif origin is typing.Literal:
        yield from ((key, value) for value in inner)
    else:
        numbers = {bool: (True, False), int: (0, 1, 2, 3, 7, 1000000), float: (0.0, 0.5, 1.0, 3.5)}
        yield from ((key, value) for value in numbers.get(annotation, ()))  # type: ignore[call-overload]


CHANGES = list(dict.fromkeys((key, json.dumps(value)) for key, value in values(Recipe, "")))


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


def complaints(recipe: dict, root: Path, file: Path) -> dict[str, str]:
    """What is wrong with a recipe: the message of each complaint, by its key and its first words."""
    file.write_text(yaml.safe_dump(recipe))
    try:
        load_recipe([file], root=root)
    except UserError as error:
        lines = [line.partition("  ")[2].strip() or line.strip() for line in str(error).splitlines()]
        return {re.sub(r"\d[\d.,]*", "N", line.partition(";")[0]): line for line in lines if line}
    return {}


def edits(message: str) -> list[list[tuple[str, object, bool]]]:
    """The alternatives that a message names, each of one or more edits: key, value, whether the key is taken away."""
    subject = message.partition(":")[0]
    found = []
    for part in re.split(r", or |; ", message.partition(";")[2]):
        together = []
        for pattern in EDITS:
            for match in pattern.finditer(part):
                named = match["key"].rstrip(".")
                key = subject if named == "it" else named
                if key in NO_KEYS or (key != subject and key.split(".")[0] not in Recipe.model_fields):
                    continue
                remove = "remove" in match.groupdict()
                together.append((key, None if remove else yaml.safe_load(match["value"]), remove))
        found += [together] if together else []
    return found


@pytest.mark.sweep("edits that messages of the recipe name")
def test_the_edit_that_a_message_names_takes_it_away(sweep, tmp_path):
    grid = [(name, key, value) for name in RECIPES for key, value in CHANGES]
    random.Random(0).shuffle(grid)
    seen = set()
    for name, key, value in grid[: sweep.size(700, len(grid))]:
        file, recipe = content(name)
        changed = put(recipe, key, json.loads(value))
        for said, message in complaints(changed, file.parent, tmp_path / "r.yaml").items():
            for together in edits(message):
                if (said, str(together)) in seen:
                    continue
                seen.add((said, str(together)))
                mended = changed
                for where, edit, remove in together:
                    mended = put(mended, where, edit, remove=remove)
                left = complaints(mended, file.parent, tmp_path / "r.yaml")
                sweep.check(said not in left, f"{name} {key}={value}: {message!r}, and still with {together}")
    sweep.done()

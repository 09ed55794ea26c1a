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
from mmrl.core.errors import UserError
from tests.messages import content, edits, put

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


def complaints(recipe: dict, root: Path, file: Path) -> dict[str, str]:
    """What is wrong with a recipe: the message of each complaint, by its key and its first words."""
    file.write_text(yaml.safe_dump(recipe))
    try:
        load_recipe([file], root=root)
    except UserError as error:
        lines = [line.partition("  ")[2].strip() or line.strip() for line in str(error).splitlines()]
        return {re.sub(r"\d[\d.,]*", "N", line.partition(";")[0]): line for line in lines if line}
    return {}


@pytest.mark.sweep("edits that messages of the recipe name")
def test_the_edit_that_a_message_names_takes_it_away(sweep, tmp_path):
    grid = [(name, key, value) for name in RECIPES for key, value in CHANGES]
    random.Random(0).shuffle(grid)
    seen = set()
    for name, key, value in grid[: sweep.size(400, len(grid))]:
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

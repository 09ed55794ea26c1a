"""The edit that a message of the recipe names is executed: it takes the message away.

Every key gets every kind of value in turn, on recipes of every modality. Where the recipe is refused, the edits in the
message are carried out, each alternative alone: the same complaint must not come back.
"""

import json
import random
import re
from pathlib import Path

import pytest
import yaml

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from tests.support.edits import CHANGES
from tests.support.messages import content, edits, put

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


def complaints(recipe: dict, root: Path, file: Path) -> dict[str, str]:
    """What is wrong with a recipe: the message of each complaint, by its key and its first words."""
    file.write_text(yaml.safe_dump(recipe))
    try:
        load_recipe([file], root=root)
    except UserError as error:
        lines = [line.partition("  ")[2].strip() or line.strip() for line in str(error).splitlines()]
        return {re.sub(r"\d[\d.,]*", "N", line.partition(";")[0]): line for line in lines if line}
    return {}


@pytest.mark.slow
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

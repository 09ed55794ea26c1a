"""The example recipes, one for each kind of user, train as they are but for their size."""

import importlib.util
import json

import pytest

from mmrl.cli import app
from tests.support.example_recipes import RECIPES

USERS = {
    "pictures": ["train.group_size=4", "train.micro_batch_size=8", "sampling.steps=4"],
    "own_reward": ["train.group_size=8"],
    "vision_language": ["train.group_size=4"],
}
"""The recipes for each kind of user, and how a step of each becomes small."""


def test_there_is_a_recipe_for_each_kind_of_user():
    assert {path.stem for path in RECIPES.glob("*.yaml")} == set(USERS)


@pytest.mark.slow
@pytest.mark.parametrize("name", USERS)
def test_the_recipe_of_each_kind_of_user_trains(name, tmp_path):
    if name == "vision_language" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision")
    small = ["train.steps=1", "train.prompts_per_step=2", "eval.samples=8", "eval.every=1", *USERS[name]]
    app(["train", str(RECIPES / f"{name}.yaml"), *small, "--out", str(tmp_path)], standalone_mode=False)
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    before, after = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    assert row["optim/grad_norm"] > 0
    watched = {"pictures": "saturation", "own_reward": "number", "vision_language": "exact"}[name]
    assert f"reward/{watched}" in before
    assert before.keys() <= after.keys()
    assert ("guard/diversity_share" in after) == (name != "vision_language")  # whose answers are single words
    source = {"pictures": "captions", "own_reward": "pass@4", "vision_language": "look"}[name]
    assert [key for key in after if source in key]

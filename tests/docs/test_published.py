"""Recipes that claim published settings have them: every one against docs/published.yaml, key by key."""

import re
from pathlib import Path

import pytest
import yaml

from mmrl.config.aliases import SETTINGS
from mmrl.config.left_to_plan import left_open
from mmrl.config.loader import load_recipe, shipped_recipes
from mmrl.config.schema import Recipe

ROOT = Path(__file__).resolve().parents[2]
TABLE = yaml.safe_load((ROOT / "docs" / "published.yaml").read_text())
CLAIM = re.compile(r"\bauthors\b|publish|\bverl\b|Flow-Factory|Cosmos-RL")
NOTHING = object()


def at(values, key):
    """What stands at ``a.b.c``; ``NOTHING`` where a section on the way is null."""
    for part in key.split("."):
        if not isinstance(values, dict) or part not in values:
            return NOTHING
        values = values[part]
    return values


def same(found, published):
    if isinstance(published, dict):
        return isinstance(found, dict) and all(same(found.get(k), v) for k, v in published.items())
    if isinstance(published, list):
        return isinstance(found, list) and len(found) == len(published) and all(map(same, found, published))
    numbers = isinstance(found, int | float) and isinstance(published, int | float)
    if numbers and not isinstance(found, bool) and not isinstance(published, bool):
        return found == pytest.approx(published, rel=1e-12)
    return found == published


def differences(values, entry, left=()):
    """What is wrong with ``values`` (a recipe as plain data) beside an entry of the table, one sentence each. ``left``:
    keys that it leaves to the plan."""
    differs, wrong = entry.get("differs", {}), []
    settings = {key: stands for key, stands in entry["settings"].items() if stands is not None and key not in left}
    for key, (published, where) in settings.items():
        found = at(values, key)
        assert found is not NOTHING or key in differs, f"{key}: the recipe has no such setting"
        if key in differs and same(found, published):
            wrong.append(f"{key}: a reason for a difference, and there is none")
        if key not in differs and not same(found, published):
            wrong.append(f"{key}: {found!r}, published {published!r} ({where})")
    return wrong + [f"{key}: a reason, and no published value" for key in differs.keys() - settings.keys()]


def row(name):
    """A row of docs/algorithms.md as a recipe's plain data, all defaults filled in."""
    values = {
        "name": "row",
        "pipeline": "diffusion/sd3",
        "model": {"path": "none"},
        "data": {"name": "shapes"},
        "sampling": {"steps": 20, "height": 512, "width": 512},
        "rewards": [{"name": "shapes"}, {"name": "jpeg:compressibility"}],
        "algorithm": {"type": "flow_grpo"},
        "train": {"steps": 1, "prompts_per_step": 2, "group_size": 4, "micro_batch_size": 4},
    }
    for line in SETTINGS[name]:
        ((key, value),) = yaml.safe_load(line).items()
        section, *rest = ["algorithm", "type"] if key == "type" else key.split(".")
        into = values[section]
        for part in rest[:-1]:
            into = into.setdefault(part, {})
        if rest:
            into[rest[-1]] = value
        else:
            into.update(value)
    return Recipe.model_validate(values).model_dump(mode="json")


@pytest.mark.parametrize("name", TABLE["recipes"])
def test_a_recipe_has_the_settings_it_claims(name):
    entry = TABLE["recipes"][name]
    recipe = load_recipe([entry.get("recipe", name)], entry.get("overrides", [])).recipe
    assert differences(recipe.model_dump(mode="json"), entry, left_open(recipe)) == []


@pytest.mark.parametrize("name", TABLE["known_as"])
def test_a_row_of_the_page_of_algorithms_has_them(name):
    assert differences(row(name), TABLE["known_as"][name]) == []


@pytest.mark.parametrize("name", [name for name, lines in SETTINGS.items() if "type: flow_grpo" in lines])
def test_a_row_is_a_recipe(name):
    assert row(name)["algorithm"]["type"] == "flow_grpo"


def test_every_recipe_that_speaks_of_authors_is_in_the_table():
    claiming = {name for name, path in shipped_recipes().items() if CLAIM.search(path.read_text())}
    assert claiming == {entry.get("recipe", name) for name, entry in TABLE["recipes"].items()}


def test_sources_name_a_commit_and_a_file():
    for entry in [*TABLE["recipes"].values(), *TABLE["known_as"].values()]:
        assert re.match(r"[\w.-]+/[\w.-]+@[0-9a-f]{12}( |$)", entry["source"])
        assert re.match(r"[\w./-]+\.(py|sh|ya?ml|toml)(: \w+)?$", entry["file"])
        assert all(where for _, where in filter(None, entry["settings"].values()))


def test_a_changed_number_is_found():
    entry = TABLE["recipes"]["wan21-1.3b"] | {"differs": {"sampling.steps": "none", "train.micro_batch_size": "none"}}
    recipe = load_recipe(["wan21-1.3b"], ["sampling.sde={kind: flow, noise_level: 0.7}"]).recipe
    assert differences(recipe.model_dump(mode="json"), entry, left_open(recipe)) == [
        "sampling.steps: a reason for a difference, and there is none",
        "sampling.sde.kind: 'flow', published 'linear' "
        "(flow_grpo/diffusers_patch/wan_pipeline_with_logprob.py: std_dev_t)",
        "sampling.sde.noise_level: 0.7, published 1.0 "
        "(flow_grpo/diffusers_patch/wan_pipeline_with_logprob.py: std_dev_t)",
        "train.micro_batch_size: a reason, and no published value",
    ]

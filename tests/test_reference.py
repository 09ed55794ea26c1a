"""The pages of the documentation that code makes are what it makes today, and say what the recipe's models say."""

import re
from pathlib import Path
from typing import get_args

import pytest
import typer.cli
import typer.main
from pydantic import BaseModel

from mmrl.cli import app
from mmrl.config import reference
from mmrl.config.schema import Recipe

PAGES = Path(__file__).parents[1] / "docs" / "reference"
CLI = 'typer mmrl.cli utils docs --name mmrl --title "The command line"'


@pytest.fixture(scope="module")
def recipe_page():
    return reference.page()


def test_the_page_of_recipe_keys_is_what_the_models_say(recipe_page):
    assert (PAGES / "recipe.md").read_text() == recipe_page, (
        "python -m mmrl.config.reference > docs/reference/recipe.md"
    )


def test_the_page_of_commands_is_what_they_say():
    command = typer.main.get_command(app)
    said = typer.cli.get_docs_for_click(obj=command, ctx=typer.Context(command), name="mmrl", title="The command line")
    assert (PAGES / "cli.md").read_text() == said.strip() + "\n", f"{CLI} --output docs/reference/cli.md"


def keys(model, path=""):
    """Every key of the sections of fixed type, found in another way than the page's own."""
    for name, field in model.model_fields.items():
        yield f"{path}{name}"
        for part in (field.annotation, *get_args(field.annotation)):
            for one in (part, *get_args(part)):
                if isinstance(one, type) and issubclass(one, BaseModel) and name != "algorithm":
                    yield from keys(one, f"{path}{name}{'[0]' if 'list' in str(field.annotation) else ''}.")


def test_every_key_has_a_line(recipe_page):
    shown = set(re.findall(r"\*\*`([\w.\[\]]+)`\*\*", recipe_page))
    missing = set(keys(Recipe)) - shown - {"algorithm"}
    tops = {name for name in Recipe.model_fields if f"## `{name}`" in recipe_page}
    assert {key for key in missing - tops if not key.startswith("eval.rewards[0].")} == set()


def test_types_ranges_and_defaults_are_in_words(recipe_page):
    for line in (
        "**`train.steps`** (whole number from 1; required)",
        "**`data.max_bad_fraction`** (number from 0 to 1; default `0.01`)",
        "**`optim.schedule`** (`constant` \\| `linear` \\| `cosine`; default `constant`)",
        "**`optim.betas`** (list of: number from 0 below 1, number from 0 below 1; default `[0.9, 0.999]`)",
        "**`model.lora`** (section [`model.lora`](#modellora) or `null`; default `null`)",
        "**`features.budget`** (size such as `512 MiB`; default `2.0GiB`)",
    ):
        assert line in recipe_page
    own = recipe_page.partition("### `dapo`")[2].partition("###")[0]
    assert "**`algorithm.clip_high`** (number above 0; default `0.28`)" in own  # its paper's, not the shared 0.2
    assert "Draw other prompts in place of groups" in own  # the docstring of the class above


def test_every_link_inside_the_page_has_its_target(recipe_page):
    headings = {reference.slug(line.lstrip("# ")) for line in recipe_page.splitlines() if line.startswith("#")}
    anchors = re.findall(r'<a id="([^"]+)"', recipe_page)
    assert len(set(anchors)) == len(anchors)
    assert not headings & set(anchors)
    assert set(re.findall(r"\]\(#([^)]+)\)", recipe_page)) <= headings

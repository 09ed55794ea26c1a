"""The pages of the documentation that code makes are what it makes today, and say what the recipe's models say."""

import re
import runpy
import shlex
import tomllib
from pathlib import Path
from typing import get_args

import pytest
import typer.cli
import typer.main
from PIL import Image
from pydantic import BaseModel

import mmrl
from mmrl.cli import app
from mmrl.config.algorithm_settings import TokenSettings
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.judging.answers import Number, parse_kind
from mmrl.rewards.judging.rubric import Rubric

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
CLI = 'typer mmrl.cli utils docs --name mmrl --title "The command line"'


@pytest.fixture(scope="module")
def tool():
    return runpy.run_path(str(ROOT / "tools" / "recipe_page.py"))


@pytest.fixture(scope="module")
def recipe_page(tool):
    return tool["page"]()


def test_the_page_of_recipe_keys_is_what_the_models_say(recipe_page):
    assert (PAGES / "recipe.md").read_text() == recipe_page, "python tools/recipe_page.py > docs/reference/recipe.md"


def test_the_thirty_keys_are_keys_of_a_recipe(recipe_page):
    rows = re.findall(r"^\| (\[`.+?) \|", (PAGES.parent / "thirty_keys.md").read_text(), re.M)
    named = [link for row in rows for link in re.findall(r"\[`(.+?)`\]\((.+?)\)", row)]
    there = {
        (key, f"reference/recipe.md#{anchor}")
        for anchor, key in re.findall(r'<a id="(.+?)"></a>\*\*`(.+?)`', recipe_page)
    }
    assert len(rows) == 30
    assert set(named) - there == {("algorithm.type", "algorithms.md")}, "each algorithm's settings have their own type"


def test_the_page_of_algorithms_is_what_the_code_says():
    tool = runpy.run_path(str(ROOT / "tools" / "algorithms_page.py"))
    written = (ROOT / "docs" / "algorithms.md").read_text()
    assert written == tool["page"](), "python tools/algorithms_page.py > docs/algorithms.md"
    assert "`alignprop`" in written
    tool = runpy.run_path(str(ROOT / "tools" / "recipe_page.py"))
    assert tool["departs_of"]("x\n\nDeparts: here\nand there.\n") == "here and there."


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
    above = TokenSettings.model_fields["dynamic_sampling"].description
    assert f"default `true`): {above}" in own


def test_every_key_says_what_it_means(recipe_page):
    lines = [line for line in recipe_page.splitlines() if re.match(r"- (<a [^>]*></a>)?\*\*`", line)]
    assert len(lines) > 200
    assert [line for line in lines if not re.search(r"\): \S", line)] == []


def test_every_link_inside_the_page_has_its_target(tool, recipe_page):
    headings = {tool["slug"](line.lstrip("# ")) for line in recipe_page.splitlines() if line.startswith("#")}
    anchors = re.findall(r'<a id="([^"]+)"', recipe_page)
    assert len(set(anchors)) == len(anchors)
    assert not headings & set(anchors)
    assert set(re.findall(r"\]\(#([^)]+)\)", recipe_page)) <= headings


def blocks(language):
    """The snippets of the first page of the site."""
    return re.findall(rf"```{language}\n(.*?)```", (PAGES.parent / "index.md").read_text(), re.DOTALL)


def test_the_snippets_of_the_first_page_are_recipes_and_a_reward(tmp_path, monkeypatch):
    (tmp_path / "prompts.txt").write_text("a red circle\n" * 20)
    pictures, judge = blocks("yaml")
    (tmp_path / "recipe.yaml").write_text(pictures)
    (tmp_path / "judge.yaml").write_text(judge)
    assert load_recipe([str(tmp_path / "recipe.yaml")], []).recipe.rewards[0].name == "pickscore"
    judged = load_recipe(["scenes", str(tmp_path / "judge.yaml")], []).recipe
    options = judged.rewards[0].options
    asked = Rubric(options["rubric"], "pointwise").render(
        [Sample(Prompt("x", "How many?"), SampleId(0, 0, 0, 0), text="2")]
    )
    assert "Question: How many? Answer: 2" in str(asked[0])
    assert parse_kind("pointwise", options["answer"]) == Number(0, 1)
    lines = blocks("python")[0]
    names: dict[str, object] = {}
    exec(lines, names)
    drawn = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue", "black")]
    samples = [Sample(Prompt("x", "?"), SampleId(0, 0, 0, i), image) for i, image in enumerate(drawn)]
    assert names["score"](samples, context=None) == [1.0, -0.5, 0.0]
    train = blocks("bash")[-1].splitlines()[1]
    overrides = [word for word in shlex.split(train)[3:] if "=" in word]
    (tmp_path / "red.py").write_text(lines)
    monkeypatch.chdir(tmp_path)
    assert load_recipe(["shapes-lora"], overrides).recipe.eval.rewards[0].name == "shapes"


def test_the_settings_that_answers_name_exist(recipe_page):
    text = (PAGES.parent / "faq.md").read_text()
    sections = "|".join(Recipe.model_fields)
    named = set(re.findall(rf"`((?:{sections})(?:\[0\])?\.[a-z_.]+)\b", text))
    shown = set(re.findall(r"\*\*`([\w.\[\]]+)`\*\*", recipe_page))
    free = {key for key in named if ".options." in key}  # a reward's or an engine's own
    assert len(named) > 30
    assert named - shown - free == set()


def test_the_page_on_stability_names_what_mmrl_offers_and_the_pythons_that_are_tested():
    page = (PAGES.parent / "stability.md").read_text()
    offered = set(re.findall(r"import \w+ as (\w+)", Path(mmrl.__file__).with_suffix(".pyi").read_text()))
    listed = page.split("The Python names: ")[1].split("([From")[0]
    assert set(re.findall(r"`mmrl\.(\w+)`", listed)) == offered
    project = tomllib.loads((PAGES.parents[1] / "pyproject.toml").read_text())["project"]
    classified = {c.rpartition(" ")[2] for c in project["classifiers"] if c.startswith("Programming Language")}
    rows = page.split("| Python | what is tested |")[1]
    assert set(re.findall(r"\b3\.\d+", rows.split("`.ci/run`")[0])) == classified
    assert f"at version {project['version'].rpartition('.')[0]}:" in page

"""The commands and recipes that pages show have the options and keys that there are."""

import re
import shlex
from pathlib import Path

import pytest
import typer.main
import yaml

from mmrl.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
KEYS = set(re.findall(r"\*\*`([\w.\[\]]+)`\*\*", (ROOT / "docs" / "reference" / "recipe.md").read_text()))
FREE = re.compile(r"\.(options|chat_template_kwargs)$|^data\.(.*\.)?(train|heldout)$|^rollout\.sampling$")
"""Keys with contents of a drop-in's own."""


def commands(text):
    """The lines of blocks of code that call mmrl, continued lines joined."""
    text = text.replace("\\\n", " ")
    fenced = "\n".join(re.findall(r"```(?:bash)?\n(.*?)```", text, re.S))
    yield from re.findall(r"^mmrl .*", fenced, re.M)
    yield from re.findall(r"^ {4}(mmrl .*)", text, re.M)


def unknown(value, path=""):
    """The keys of a recipe's part that the reference does not have."""
    if isinstance(value, list):
        for one in value:
            yield from unknown(one, f"{path}[0]")
    elif isinstance(value, dict) and not FREE.search(path):
        for key, inner in value.items():
            here = f"{path}.{key}".removeprefix(".").replace("eval.rewards", "rewards")
            known = here in KEYS or any(other.startswith((f"{here}.", f"{here}[")) for other in KEYS)
            if not known and here not in ("algorithm.type", "name"):
                yield here
            yield from unknown(inner, here)


def parsed(line):
    """Raise what the command line raises for a line whose command or options there are not."""
    words = shlex.split(line, comments=True)[1:]
    words = words[: next((n for n, word in enumerate(words) if word in ("|", ">", "&&")), len(words))]
    found, name = typer.main.get_command(app), "mmrl"
    while hasattr(found, "get_command"):
        context, name = found.make_context(name, ["--help"], resilient_parsing=True), words.pop(0)
        found = found.get_command(context, name)
        assert found is not None, f"{line}: there is no command {name}"
    found.make_context(name, words, resilient_parsing=False)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_command_of_a_page_can_be_given(page):
    for line in commands(page.read_text()):
        parsed(line)


@pytest.mark.parametrize("line", ["mmrl trian sums", "mmrl train sums --bogus", "mmrl label samples --stars=nine"])
def test_a_command_that_there_is_not_is_found(line):
    with pytest.raises(Exception, match=r"no command trian|No such option|not a valid|does not take a value"):
        parsed(line)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_every_recipe_of_a_page_has_keys_that_there_are(page):
    for block in re.findall(r"```yaml\n(.*?)```", page.read_text(), re.S):
        shown = yaml.safe_load(block)
        assert list(unknown(shown)) == [], block

"""Load a recipe from files and overrides, or report all its errors at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from mmrl.config.chat_template import with_template_read
from mmrl.config.checks import impossibilities
from mmrl.config.dtype import chosen_by, is_auto
from mmrl.config.error_messages import contradictions, explain, implicit_booleans
from mmrl.config.errors import Finding, RecipeError, recipe_error
from mmrl.config.layers import Tree, parse_key, read_layers
from mmrl.config.left_to_plan import chosen_before, with_values
from mmrl.config.names import (
    find_recipe,
    located,
    missing_names,
    shipped_recipes,
)
from mmrl.config.schema import Recipe
from mmrl.core.json_types import Json, JsonObject, MutableJson
from mmrl.core.secrets import masks, remember

__all__ = ["LoadedRecipe", "RecipeError", "find_recipe", "load_recipe", "shipped_recipes"]


_MASKED = "the secret is masked here, as in the recipe that a run keeps; write it anew, or name a variable: $NAME"


@dataclass(frozen=True)
class Continuation:
    """How a run goes on with its stored recipe.

    ``run``: its directory; ``step``: finished steps; ``changes``: settings that differ, with their values before and
    now; ``notes``: what else is to be said, such as what the learning rate does.
    """

    run: Path
    step: int
    changes: tuple[tuple[str, Json, Json], ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe, in which all paths are absolute, and where it came from.

    ``paths`` are its files and ``overrides`` the ``a.b=c`` on top of them; ``path`` is the first file and ``root`` its
    folder, where its relative paths started.
    """

    recipe: Recipe
    path: Path
    root: Path
    paths: tuple[Path, ...]
    overrides: tuple[str, ...]
    tree: Tree = field(repr=False)
    from_python: bool = False
    """Whether it was made from Python values, so that its files are deleted when the process ends."""
    continues: Continuation | None = None
    """The run that stored it, if it goes on with that."""
    planned: Mapping[str, float] = field(default_factory=dict)
    """What the plan said of a step, by the metrics' names (``plan/step_seconds``, ``plan/peak``)."""

    def resolved(self) -> dict[str, Any]:
        """All settings with their defaults, ready for JSON; local paths are absolute, so it loads from any folder."""
        return self.recipe.model_dump(mode="json")

    @property
    def chose_dtype(self) -> bool:
        """Whether ``model.dtype`` is ``auto`` in the recipe."""
        return is_auto(self.tree.values)

    def for_resume(self, run: Path) -> LoadedRecipe:
        """The recipe to resume the run in the directory ``run`` with: its choices for ``auto`` stay."""
        values = chosen_before(self.recipe, run)
        if self.chose_dtype and (dtype := chosen_by(run)) is not None:
            values["model.dtype"] = dtype
        return replace(self, recipe=with_values(self.recipe, values)) if values else self

    def source(self, key: str) -> str:
        """Where ``key`` (``rewards[0].weight``) was written: file and line, ``command line``, or ``default``."""
        return str(self.tree.sources.get(parse_key(key) or (), "default"))


def load_recipe(
    paths: Sequence[Path | str],
    overrides: Sequence[str] = (),
    prepare: Callable[[JsonObject], JsonObject] | None = None,
    root: Path | None = None,
    migrate: Callable[[dict[str, MutableJson]], dict[str, MutableJson]] | None = None,
) -> LoadedRecipe:
    """Read a recipe: YAML files layered left to right, then ``a.b=c`` overrides.

    A first path that is no file may be the name of a shipped recipe. Mappings merge, lists, scalars and mappings with a
    ``type`` replace; an override replaces whatever it names, so ``algorithm={type: draft}`` starts that section anew.
    ``prepare`` gets the plain values before they are checked, and returns those to check. ``root``: where relative
    paths start, in place of the first file's folder. ``migrate``: makes of the values of a run's stored recipe those of
    today. Raises ``RecipeError`` with every problem found.
    Loads no model; of the names in the recipe only the algorithm is imported.
    """
    files = [find_recipe(str(path)) for path in paths]
    root = root or files[0].resolve().parent
    tree = read_layers(files, list(overrides))
    if migrate is not None and not tree.findings:
        tree = replace(tree, values=migrate(tree.values))
    remember(tree.values)
    findings = list(tree.findings)
    findings += [Finding(tree.source(key), key, _MASKED) for key in masks(tree.values)]
    missing = [Finding(tree.source(key), key, message) for key, message in missing_names(tree, root)]
    recipe = None
    values = with_template_read(root, located(root, prepare(tree.values) if prepare else tree.values))
    try:
        recipe = Recipe.model_validate(values)
        found = list(contradictions("\n".join(impossibilities(recipe)), tree))
        findings += _not_yet_known(found, findings) if found else implicit_booleans(recipe, tree)
    except ValidationError as error:
        known = [*findings, *(finding for finding in missing if finding.path[:1] == ("algorithm",))]
        findings += _not_yet_known(list(explain(error, replace(tree, values=values))), known)
    findings += missing
    if recipe is None or findings:
        raise recipe_error(findings)
    return LoadedRecipe(recipe, files[0], root, tuple(files), tuple(overrides), tree)


def _not_yet_known(findings: list[Finding], syntax: list[Finding]) -> list[Finding]:
    """Drop findings that follow from a syntax error: a file that is not YAML misses every key."""
    if any(not finding.path for finding in syntax):
        return [finding for finding in findings if not finding.message.startswith("missing")]
    known = {finding.path for finding in syntax}
    return [finding for finding in findings if finding.path not in known]

"""Shared code of the commands: reading a recipe and its overrides, ``k=v`` options, threads, the console,
and one JSON document on stdout with nothing else there: what ``--json`` promises (docs/reference/json.md)."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject, MutableJson
from mmrl.core.secrets import hidden, remember
from mmrl.core.stored import read_object

if TYPE_CHECKING:
    from rich.console import Console

    from mmrl.config.loader import LoadedRecipe
    from mmrl.core.plugins.loading import Kind
    from mmrl.planner.gpus import Gpu
    from mmrl.runtime.launchers import Launched


def _shipped(incomplete: str) -> list[str]:
    """Names of shipped recipes, for a shell that completes a word."""
    from mmrl.config.loader import shipped_recipes

    return [name for name in shipped_recipes() if name.startswith(incomplete)]


RecipeArgument = Annotated[
    str,
    typer.Argument(metavar="RECIPE", help="A YAML file, or the name of a shipped recipe.", autocompletion=_shipped),
]
ChangesArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERLAY.yaml|KEY=VALUE",
        help="Files layered over the recipe, then single settings such as optim.lr=1e-5 or rewards[0].weight=2.",
    ),
]
RunArgument = Annotated[Path, typer.Argument(metavar="RUN", help="The directory of a run, such as runs/shapes.")]
CheckpointOption = Annotated[
    str,
    typer.Option(
        metavar="latest|best|STEP|base",
        help="Which weights; best needs eval.early_stopping, base is the model before training.",
    ),
]
Exported = Literal["merged", "lora", "lora-file"]
"""Forms of an export."""
OptionsOption = Annotated[
    list[str] | None,
    typer.Option("--options", metavar="KEY=VALUE", help="An option of the reward; may be repeated."),
]


def read_recipe(
    recipe: str,
    changes: Sequence[str],
    run: Callable[[str], Path] | None = None,
    gpu: Gpu | None = None,
    found: Launched | None = None,
) -> LoadedRecipe:
    """The recipe with its overlays and overrides; sets the threads it asks for. Raises ``RecipeError``.

    ``run``: by the recipe's name, the directory of the run that goes on with it. ``gpu``: what ``model.dtype: auto`` is
    chosen for, in place of this machine's device. ``found``: the launcher that started this process as one of several.
    """
    from mmrl.config.loader import load_recipe

    overlays, overrides = layers_of(changes)
    return load_recipe([recipe, *overlays], overrides, preparing(run, gpu, found))


def layers_of(changes: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of a command as files to layer over a recipe, and single settings. Raises ``UserError``."""
    overlays = [text for text in changes if "=" not in text or os.path.isfile(text)]
    for text in overlays:
        if not os.path.isfile(text):
            raise UserError(f"{text!r} is neither a file to layer over the recipe nor a setting; write key=value")
    return overlays, [text for text in changes if text not in overlays]


def preparing(
    run: Callable[[str], Path] | None = None, gpu: Gpu | None = None, found: Launched | None = None
) -> Callable[[JsonObject], JsonObject]:
    """What is done with the values of a recipe before they are checked; arguments as of ``read_recipe``."""
    from mmrl.config.dtype import chosen_by, with_choice
    from mmrl.config.names import refuse_moved
    from mmrl.config.schema import Recipe
    from mmrl.planner.gpus import planned_for
    from mmrl.runtime.launchers import use_own_device

    def prepare(values: JsonObject) -> JsonObject:
        use_threads(values.get("threads", Recipe.model_fields["threads"].default))  # before a choice imports torch
        if found is not None:
            use_own_device(found, values.get("device"))
        if gpu is not None:
            return planned_for(gpu, values)
        if run is None or not isinstance(name := values.get("name"), str):
            return values
        directory = run(name)
        refuse_moved(directory)
        chosen = chosen_by(directory)
        return values if chosen is None else with_choice(values, chosen)

    return prepare


def use_threads(threads: object) -> None:
    """Limit the threads of libraries that are not imported yet; OMP_NUM_THREADS of the user goes first."""
    if threads and isinstance(threads, int):
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def use_threads_of(run: Path) -> None:
    """Limit the threads as the recipe of ``run`` asks. Raises ``UserError`` where there is no run."""
    resolved = run / "resolved.json"
    try:
        settings = read_object(resolved)
    except FileNotFoundError:
        raise UserError(f"{run} is no run directory: it has no resolved.json; name one that mmrl train made") from None
    use_threads(settings.get("threads"))


def refuse_unknown(kind: Kind, name: str) -> None:
    """Raise ``UserError`` where there is no drop-in ``name``, before a large library is imported."""
    from mmrl.config.drop_ins import missing_drop_in

    if wrong := missing_drop_in(kind, name, "looked in the current folder"):
        raise UserError(wrong)


def reward_options(texts: Sequence[str] | None) -> dict[str, MutableJson]:
    """``["k=v", ...]`` as keyword arguments, values read as in a recipe. Raises ``UserError``."""
    from mmrl.config.layers import parse_value

    options: dict[str, MutableJson] = {}
    for text in texts or ():
        key, equals, value = text.partition("=")
        if not equals or not key.isidentifier():
            raise UserError(f"--options {text!r} is no setting; write --options key=value")
        try:
            options[key] = parse_value(value)
        except ValueError as error:
            raise UserError(f"--options {key}: {error}") from None
    remember(options)
    return options


def console() -> Console:
    """A console on stdout, for results."""
    from rich.console import Console

    return Console(highlight=False)


JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON document (docs/reference/json.md), and nothing else.")
]


@contextmanager
def json_alone() -> Generator[Callable[[JsonObject], None]]:
    """Inside, what anything prints goes to stderr, also what a library or a child process writes to descriptor 1.

    Yields the function that prints the document on the real stdout, once the block is left.
    """
    documents: list[JsonObject] = []
    sys.stdout.flush()
    real = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield documents.append
    finally:
        os.dup2(real, 1)
        os.close(real)
    for document in documents:
        print(json.dumps(plain(document), indent=2, allow_nan=False))


def plain(value: Json) -> Json:
    """The same data without secrets, and with null for numbers that JSON lacks (nan and the infinities)."""
    if isinstance(value, str):
        return hidden(value)
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    return [plain(inner) for inner in value]

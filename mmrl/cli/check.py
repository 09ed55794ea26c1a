"""``check``: the contract of an algorithm, reward, judge, data set, environment, rollout engine or diffusion family."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mmrl.commands.arguments import reward_options
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject

if TYPE_CHECKING:
    from mmrl.app.conformance.running import Check


Kind = Literal["algorithm", "reward", "judge", "dataset", "engine", "pipeline", "environment"]


def check(
    name: Annotated[
        str, typer.Argument(metavar="FILE.py:NAME", help="A plug-in in a file, one of ours, or a recipe of pictures.")
    ],
    kind: Annotated[Kind | None, typer.Option(help="The kind of plug-in.", show_default="found from NAME")] = None,
    options: Annotated[
        list[str] | None,
        typer.Option(
            "--options",
            metavar="KEY=VALUE",
            help="An option, as in a recipe (of a pipeline: a key of sampling); may be repeated.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR", help="Engine, pipeline: a small checkpoint.", show_default="of an engine: ours"),
    ] = None,
    data: Annotated[
        str | None, typer.Option(metavar="NAME", help="Reward, judge: a data set to take prompts from.")
    ] = None,
    *,
    isolate: Annotated[
        bool, typer.Option("--isolate", help="Environment: in processes of its own, as environment.isolate.")
    ] = False,
) -> None:
    """Check that a plug-in does what the training loop needs.

    Prints a line for each check: ok, FAILED with what to change, or not run with what it lacks. Exit code 1 where one
    failed, or none could run; 2 where the plug-in cannot be loaded.
    """
    given = reward_options(options)
    from mmrl.app.conformance.finding import kind_of
    from mmrl.app.conformance.running import results, show
    from mmrl.config.drop_ins import split_file

    found = kind or kind_of(name)
    for option, value, kinds in (
        ("--model", model, ("engine", "pipeline")),
        ("--data", data, ("reward", "judge")),
        ("--isolate", isolate or None, ("environment",)),
    ):
        if value is not None and found not in kinds:
            raise UserError(f"{option}: {name} is of kind {found}, which takes none; remove it")
    checks = _checks(found, name, given, model, data, isolate=isolate)
    raise typer.Exit(show(results(checks, split_file(name)[0]), f"{name}: {found}"))


def _checks(
    kind: str, name: str, options: JsonObject, model: str | None, data: str | None, *, isolate: bool
) -> Iterator[Check]:
    """Load the plug-in and return its checks. Raises ``UserError`` if it cannot be loaded."""
    if kind == "algorithm":
        from mmrl.app.conformance import algorithms

        return algorithms.checks(algorithms.opened(name, options))
    if kind == "reward":
        from mmrl.app.conformance import rewards

        return rewards.checks(rewards.opened(name, options, data))
    if kind == "judge":
        from mmrl.app.conformance import judges

        return judges.checks(judges.opened(name, options, data))
    if kind == "dataset":
        from mmrl.app.conformance import datasets

        return datasets.checks(datasets.opened(name, options))
    if kind == "environment":
        from mmrl.app.conformance import environments

        return environments.checks(environments.case_of(name, options, isolate=isolate))
    if kind == "engine":
        from mmrl.app.conformance import engines

        return engines.checks(engines.opened(name, options, model or engines.small_model()))
    from mmrl.app.conformance import pipelines

    if name.endswith((".yaml", ".yml")) or (model is None and not name.partition(":")[0].endswith(".py")):
        return pipelines.checks(pipelines.of_name(name, options))
    return pipelines.checks(pipelines.opened(name, options, model))

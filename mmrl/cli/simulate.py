"""``simulate``: a recipe on many devices, with every placement, in simulated time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from mmrl.commands.arguments import ChangesArgument, RecipeArgument, console, json_alone, read_recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import JsonObject

if TYPE_CHECKING:
    from mmrl.config.schema import Recipe
    from mmrl.planner.simulator.simulate import Cluster, Comparison, Outcome
    from mmrl.planner.simulator.trace import HttpJudge, Trace
    from mmrl.planner.simulator.trace_from_run import Recorded

MOST_OF_A_HOST = 16
MOST_COLUMNS = 200
CONCURRENCY = 16
"""Requests at once of a judge whose recipe does not say; a test compares it with the judge's."""


_NO_CALLS = (
    "note: calls of the environment take no time here; --trace RUN has them, in the sampling that waits for them"
)

MadeUp = Literal["steady", "judge-heavy", "drifting", "shifting", "tailed"]
"""The loads of ``mmrl.planner.simulator.trace.LOADS`` (a test compares them)."""


def simulate(
    recipe: RecipeArgument,
    changes: ChangesArgument = None,
    devices: Annotated[
        int | None, typer.Option(min=2, help="Devices of all controllers together.", show_default="the recipe's")
    ] = None,
    trace: Annotated[Path | None, typer.Option(metavar="RUN", help="Use the measured seconds of this run.")] = None,
    load: Annotated[MadeUp, typer.Option(help="A synthetic load, without --trace.")] = "steady",
    steps: Annotated[
        int | None, typer.Option(min=1, help="How many steps.", show_default="40, or all of the trace")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the synthetic load.")] = 0,
    price: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds that a device needs to change its role.", show_default="as in the trace or load"
        ),
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds of a request to a judge behind HTTP, one for each sample. Not with --trace."),
    ] = None,
    concurrency: Annotated[
        int | None, typer.Option(min=1, help="Its requests at once.", show_default="the judge's in the recipe")
    ] = None,
    staleness: Annotated[
        int, typer.Option(min=0, help="Disaggregated devices: versions that sampling may be ahead.")
    ] = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, with every step.")] = False,
) -> None:
    """Predict a step under every placement, beside the best static split and the bound; runs nothing."""
    loaded = read_recipe(recipe, changes or ())
    from mmrl.planner.simulator.simulate import compare

    own = None
    if trace is not None:
        from mmrl.planner.simulator.trace_from_run import read_run

        own = read_run(trace)
    recipe_of = loaded.recipe
    if own is not None and devices is None and own.devices > 1:  # the shape of the run itself
        shaped = {"controllers": own.controllers, "devices_per_controller": own.devices}
        recipe_of = recipe_of.model_copy(update=shaped)
    cluster = shape(recipe_of, devices)
    asked = _asked(recipe_of, latency, concurrency, traced=own is not None)
    work = _trace(recipe_of, cluster, own, load, steps, seed, asked)
    work = work if price is None else replace(work, price=price)
    found = compare(work, cluster, staleness)
    if as_json:
        with json_alone() as write:
            write(_json(loaded.recipe.name, work, cluster, found))
    else:
        _show(loaded.recipe, work, cluster, found)
        if own is None and loaded.recipe.environment is not None:
            console().print(_NO_CALLS, markup=False, highlight=False, soft_wrap=True)


def shape(recipe: Recipe, devices: int | None) -> Cluster:
    """How many controllers ``devices`` make: of the recipe's devices_per_controller each where it has that, else the
    recipe's controllers share them. Raises ``UserError`` where they cannot."""
    from mmrl.config.replicas import has_replicas
    from mmrl.planner.simulator.simulate import Cluster

    if has_replicas(recipe):
        raise UserError(
            "simulate: an engine or a judge of several devices is not simulated; remove tensor_parallel_size and "
            "similar options, and count each of them as one device"
        )
    per = recipe.devices_per_controller
    total = devices or recipe.controllers * per
    controllers = recipe.controllers if per == 1 else max(total // per, 1)
    if per > 1 and total % per:
        raise UserError(
            f"--devices {total} is no multiple of devices_per_controller={per}; "
            f"write --devices {max(total // per, 1) * per}, or another devices_per_controller"
        )
    if total % controllers:
        raise UserError(
            f"--devices {total} cannot be shared by controllers={controllers}; "
            f"write --devices {-(-total // controllers) * controllers}, or another number of controllers"
        )
    own = total // controllers
    if own < 2:
        raise UserError(
            f"{controllers} controllers on {total} devices have {own} each, and a judge beside sampling needs "
            f"2; write --devices {controllers * 8}, or fewer controllers"
        )
    if recipe.train.prompts_per_step < controllers:
        raise UserError(
            f"train.prompts_per_step={recipe.train.prompts_per_step} leaves some of {controllers} controllers without "
            f"a prompt; write train.prompts_per_step={controllers * own} or fewer controllers"
        )
    return Cluster(controllers, own, settings=recipe.placement)


def micro_batches(recipe: Recipe, controllers: int) -> int:
    """The number of micro-batches that all controllers sample in a step."""
    train = recipe.train
    if recipe.midway is not None:
        raise UserError("midway: mmrl simulate does not know steps that prune groups; add midway=null to the command")
    batch = recipe.sampled_at_once
    prompts = [len(range(rank, train.prompts_per_step, controllers)) for rank in range(controllers)]
    return sum(-(-n * train.group_size // batch) for n in prompts)


def _asked(recipe: Recipe, latency: float | None, concurrency: int | None, *, traced: bool) -> HttpJudge | None:
    """The judge behind HTTP that the options describe."""
    from mmrl.planner.simulator.trace import HttpJudge

    if latency is None and concurrency is None:
        return None
    if traced:
        raise UserError("--latency and --concurrency: a trace has the run's own requests; leave them out, or --trace")
    if latency is None:
        raise UserError("--concurrency says how many requests are made at once; add --latency SECONDS of a request")
    return HttpJudge(latency, recipe.sampled_at_once, concurrency or _concurrency(recipe))


def _concurrency(recipe: Recipe) -> int:
    """The concurrency of the first judge behind HTTP in the recipe, else a judge's default."""
    for label, options in _behind_http(recipe).items():
        found = options.get("concurrency", CONCURRENCY)
        if not isinstance(found, int) or isinstance(found, bool) or found < 1:
            raise UserError(f"options.concurrency of {label}: {found!r}; write a whole number, 1 or more")
        return found
    return CONCURRENCY


def _behind_http(recipe: Recipe) -> dict[str, JsonObject]:
    """The options of the rewards that are asked over HTTP, by their labels."""
    from mmrl.config.evaluation_checks import label_of

    found: dict[str, JsonObject] = {}
    for reward in recipe.rewards:
        model = reward.options.get("model")
        if reward.name == "http" or (isinstance(model, dict) and "url" in model):
            found[label_of(reward.name, reward.label)] = reward.options
    return found


def _trace(
    recipe: Recipe,
    cluster: Cluster,
    run: Recorded | None,
    load: str,
    steps: int | None,
    seed: int,
    asked: HttpJudge | None,
) -> Trace:
    from mmrl.planner.simulator.trace import LOADS, synthetic
    from mmrl.planner.simulator.trace_from_run import fitted

    count = micro_batches(recipe, cluster.controllers)
    if run is None:
        return synthetic(LOADS[load], steps or 40, cluster.controllers, cluster.total, count, seed, asked)
    found = fitted(run, cluster.controllers, cluster.total, count, seed)
    return replace(found, steps=found.steps[:steps])


def _show(recipe: Recipe, trace: Trace, cluster: Cluster, found: Comparison) -> None:
    from rich import box
    from rich.table import Table

    def say(text: str) -> None:
        console().print(text, markup=False, highlight=False, soft_wrap=True)

    steps, first = len(trace.steps), trace.steps[0]
    count = sum(len(batches) for rounds in first.shares for batches in rounds)
    say(f"{recipe.name} on {cluster.total} devices: {cluster.controllers} controllers of {cluster.devices}")
    say(f"{count:,} micro-batches in the first step, {steps} steps, a move takes {trace.price:.2f} s; {trace.source}")
    table = Table(box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("placement", no_wrap=True)
    for name in ("step (s)", "over\nbound", "idle", "waiting", "moves", "changes"):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in found.outcomes:
        table.add_row(
            outcome.name + (" (best static)" if outcome is found.best else ""),
            f"{outcome.seconds / steps:,.2f}",
            f"{outcome.seconds / found.bound - 1:+.1%}",
            f"{outcome.idle:.1%}",
            f"{outcome.apart / outcome.seconds / outcome.devices:.1%}",
            f"{sum(outcome.moves) / steps:.1f}",
            str(outcome.changes),
        )
    table.add_row("bound: no gap, on-policy", f"{found.bound / steps:,.2f}", *[""] * 5)
    wide = console()
    wide.width = max(wide.width, MOST_COLUMNS)  # a narrow terminal wraps a line, and cuts no number
    wide.print(table)
    last = found.outcomes[-1]
    for step, (decision, before) in enumerate(zip(last.decisions, last.splits, strict=True)):
        if decision.split != before:
            say(f"after step {step}: {decision.why}")
    say("bound: all devices share the work of their own step without a gap; disaggregated trains on older samples")
    say("waiting: idle for other controllers; moves: of devices inside a step; changes: of the split between steps")
    for note in _notes_on_requests(recipe, trace, cluster):
        say(note)
    if count < cluster.total:
        say(f"note: {count} micro-batches leave devices without work; raise train.prompts_per_step")
    if cluster.devices > MOST_OF_A_HOST:
        say(f"note: a controller's {cluster.devices} devices are of one host; more controllers make them fewer")


def _notes_on_requests(recipe: Recipe, trace: Trace, cluster: Cluster) -> Iterator[str]:
    """What is not known of judges behind HTTP, or that the devices wait for them."""
    batches = [b for work in trace.steps for share in work.shares for one in share for b in one]
    asked = sum(call.seconds / call.at_once for b in batches for call in b.calls) / cluster.controllers
    own = sum(b.sampling + b.judging for b in batches) / cluster.total
    outside = ", ".join(_behind_http(recipe))
    if outside and not asked:
        yield f"note: requests over HTTP ({outside}) take no time here; add --latency SECONDS, or --trace RUN"
    if asked > own:
        steps = len(trace.steps)
        yield (
            f"note: the devices wait for requests, which take {asked / steps:,.1f} s of a step, and their own work "
            f"{own / steps:,.1f} s; raise the judge's concurrency if its server can answer more at once"
        )


def _json(name: str, trace: Trace, cluster: Cluster, found: Comparison) -> JsonObject:
    def row(outcome: Outcome) -> JsonObject:
        return {
            "placement": outcome.name,
            "step": outcome.seconds / len(trace.steps),
            "idle": outcome.idle,
            "waits_for_others": outcome.apart / outcome.seconds / outcome.devices,
            "steps": outcome.steps,
            "moves": outcome.moves,
            "judge_devices": [split.judge for split in outcome.splits],
            "decisions": [decision.why for decision in outcome.decisions],
        }

    return {
        "recipe": name,
        "devices": cluster.total,
        "controllers": cluster.controllers,
        "trace": trace.source,
        "price": trace.price,
        "bound": found.bound / len(trace.steps),
        "best_static": found.best.name,
        "placements": [row(outcome) for outcome in found.outcomes],
    }

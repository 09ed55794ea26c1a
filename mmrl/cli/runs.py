"""``train plan eval report export verify``: train a recipe, and evaluate, report, export or verify a run."""

from __future__ import annotations

import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmrl.commands.arguments import (
    ChangesArgument,
    CheckpointOption,
    Exported,
    JsonOption,
    RecipeArgument,
    RunArgument,
    console,
    json_alone,
    layers_of,
    preparing,
    read_recipe,
    use_threads_of,
)
from mmrl.core.errors import UserError, refuse
from mmrl.core.garbage import rarely_collected
from mmrl.core.notices import silenced, silent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mmrl.config.loader import LoadedRecipe
    from mmrl.planner.gpus import Gpu
    from mmrl.planner.plan_data import Plan
    from mmrl.runtime.launchers import Launched

QuietOption = Annotated[
    bool, typer.Option("--quiet", help="Print warnings and errors alone, neither the plan nor progress.")
]


def train(
    recipe: RecipeArgument = "",
    changes: ChangesArgument = None,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Directory of the run.", show_default="runs/NAME")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in DIR.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Remove the run that is in DIR.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Plan a recipe, then train it.

    Exit code 0 at the end and after Ctrl-C; 2 for what you can mend; 3 where too many samples had no score for longer
    than scoring.patience; 4 where a process of the run was lost; 143 after SIGTERM and 129 after SIGHUP. A signal
    finishes and saves the step first. --resume goes on in all cases.
    """
    if resume and overwrite:
        raise UserError("--resume goes on with a run and --overwrite removes it; give one of them")
    _refuse_without_recipe(recipe, out, resume=resume)

    from mmrl.logging.rundir import refuse_directory
    from mmrl.runtime.launchers import launched

    found = launched(os.environ)
    leads = found is None or (found.leads and not found.restarts)  # a job that is started again goes on with its run

    def directory(name: str) -> Path:
        path = out or Path("runs") / name
        if leads:
            refuse_directory(path, overwrite=overwrite, resume=resume)
        return path

    if out is not None:
        directory("")  # before anything is planned
    with silenced(quiet=quiet):
        with rarely_collected():
            loaded = read_recipe(recipe, changes or (), directory if resume else None, found=found)
            out = directory(loaded.recipe.name)
        _train(loaded, out, found, resume=resume, overwrite=overwrite)


def _refuse_without_recipe(recipe: str, out: Path | None, *, resume: bool) -> None:
    """Raise ``UserError`` where no recipe is given, or to resume a run the run itself, with what goes on with it."""
    from mmrl.logging.rundir import looks_like_run

    if not resume:
        if not recipe:
            raise UserError("there is no recipe to train; name one: mmrl train RECIPE")
        return
    given = Path(recipe)
    run = given.parent if given.name == "recipe.yaml" else given
    if recipe and looks_like_run(run):
        what = f"{recipe} is what a run wrote"
    elif not recipe or ("=" in recipe and not os.path.isfile(recipe)):
        run, what = out, "--resume needs the recipe that the run was started with"
    else:
        return
    name = "RUN" if run is None else shlex.quote(str(run))
    raise UserError(f"{what}. A run goes on from its directory alone with: mmrl continue {name}")


def continue_(
    run: RunArgument,
    changes: ChangesArgument = None,
    extend: Annotated[
        bool, typer.Option("--extend", help="Stretch the schedule of the learning rate over the new length.")
    ] = False,
    hold: Annotated[bool, typer.Option("--hold", help="Keep the learning rate of the last step to the end.")] = False,
    quiet: QuietOption = False,
) -> None:
    """Go on with a run from its directory alone: after Ctrl-C, kill -9, early stopping, or its last step.

    train.steps=N trains more steps; where optim.schedule depends on the length, add --extend or --hold. optim.lr=X
    goes on with another learning rate. Both stay recorded in RUN. Exit codes are those of mmrl train.
    """
    from mmrl.runtime.launchers import launched

    if extend and hold:
        raise UserError("--extend and --hold exclude each other; give one of them")
    found = launched(os.environ)
    use_threads_of(run)
    with silenced(quiet=quiet):
        with rarely_collected():
            from mmrl.app.continuing import continued

            overlays, overrides = layers_of(changes or ())
            choice = "extend" if extend else "hold" if hold else None
            loaded = continued(run, overlays, overrides, choice, preparing(found=found))
        _train(loaded, run, found, resume=True)


def _train(loaded: LoadedRecipe, out: Path, found: Launched | None, *, resume: bool, overwrite: bool = False) -> None:
    """Plan the recipe, then train it into ``out``, in this process or, of a launcher's, with the others."""
    with rarely_collected():
        from mmrl.planner.plan import plan
        from mmrl.planner.render import render
        from mmrl.runtime.external_launch import train as train_with_others
        from mmrl.runtime.external_launch import with_processes
        from mmrl.runtime.start import train as train_alone

        loaded = loaded if found is None else with_processes(loaded, found)
        planned = plan(loaded.for_resume(out) if resume else loaded)
        if (found is None or found.leads) and not silent():
            render(planned, console(), short=True)
        refuse(planned.problems, "this recipe cannot run here")
        loaded = replace(loaded, recipe=planned.recipe, planned=planned.of_a_step)
    if found is None:
        train_alone(loaded, out, resume=resume, overwrite=overwrite)
    else:
        train_with_others(loaded, found, out, resume=resume, overwrite=overwrite)


def plan(
    recipe: RecipeArgument,
    changes: ChangesArgument = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Plan for this GPU, which this machine may lack (h100-80g, rtx4090-24g, ...)."
        ),
    ] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="How many of it there are.", show_default="enough")] = None,
    trace: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Use what this run measured of its environment.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the memory and the work of a recipe; exit 1 if it does not fit.

    Loads no model. With --gpu also estimates the time of a step.
    """
    from mmrl.planner.gpus import gpu_of

    if gpus is not None and gpu is None:
        raise UserError("--gpus says how many there are of --gpu; add --gpu h100-80g, say")
    meant = gpu_of(gpu) if gpu else None
    if as_json:
        with json_alone() as write:
            planned = _planned(recipe, changes or (), meant, gpus, trace)
            from mmrl.planner.plan_json import as_json as plain

            write(plain(planned))
    else:
        planned = _planned(recipe, changes or (), meant, gpus, trace)
        from mmrl.planner.render import render

        render(planned, console())
    if planned.problems:
        raise typer.Exit(1)


def _planned(recipe: str, changes: Sequence[str], gpu: Gpu | None, gpus: int | None, trace: Path | None) -> Plan:
    with rarely_collected():
        loaded = read_recipe(recipe, changes, gpu=gpu)
        from mmrl.planner.plan import measured_episodes
        from mmrl.planner.plan import plan as make

        return make(loaded, gpu=gpu, gpus=gpus, episodes=None if trace is None else measured_episodes(trace))


def evaluate(
    run: RunArgument,
    samples: Annotated[
        int | None, typer.Option(min=1, help="How many held-out samples.", show_default="eval.samples of the recipe")
    ] = None,
    checkpoint: CheckpointOption = "latest",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, as without it: for scripts.")] = False,
    lora_strength: Annotated[
        str | None,
        typer.Option(metavar="0,0.5,1", help="Scale the adapter of a LoRA run; the report shows the curve and a grid."),
    ] = None,
) -> None:
    """Measure a run on held-out prompts; prints JSON (docs/reference/json.md), and nothing else on stdout."""
    use_threads_of(run)
    with json_alone() as write:
        if lora_strength is not None:
            from mmrl.app.lora_scale import parse_strengths, sweep

            write({"strengths": sweep(run, parse_strengths(lora_strength), samples, checkpoint)})
            return
        from mmrl.app.build import evaluate as measure

        write(measure(run, samples, checkpoint))


def report(
    run: RunArgument,
    pictures: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw samples of the same prompts over the steps into FILE in its place: .gif, .webp or .png.",
        ),
    ] = None,
    sample: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="With --pictures: a sample of the grid, from 0; again for another."),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", help="Serve it on a local page that refreshes itself until the run ends.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="With --follow: of the page; 0 takes a free one.")] = 0,
) -> None:
    """Write a run's report, one HTML file; prints its path.

    With --follow nothing is written while the run trains: the report is a page of this machine, and Ctrl-C ends it.
    """
    use_threads_of(run)
    if port and not follow:
        raise UserError("--port is of the page of --follow; add --follow, or leave it out")
    if follow:
        from mmrl.report.follow import follow as serve

        if pictures is not None:
            raise UserError("--follow serves a page and --pictures writes a file; give one of them")
        serve(run, port)
    elif pictures is not None:
        from mmrl.report.over_steps import write_over_steps

        print(write_over_steps(run, pictures, sample or ()))
    else:
        from mmrl.report.html import write_report

        print(write_report(run))


def export(
    run: RunArgument,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to write; must not exist yet.")],
    what: Annotated[
        Exported, typer.Option(help="The whole model, the adapter alone, or that in one file (ComfyUI).")
    ] = "merged",
    checkpoint: CheckpointOption = "latest",
    push_to_hub: Annotated[
        str | None,
        typer.Option(
            metavar="ORG/NAME", help="Upload it too, as a private repository (token: HF_TOKEN, or your login)."
        ),
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="Anybody may read the repository.")] = False,
) -> None:
    """Write a run's weights in the libraries' own format; prints where they are."""
    if public and push_to_hub is None:
        raise UserError("--public is for --push-to-hub ORG/NAME; add that, or leave it out")
    use_threads_of(run)
    from mmrl.app.export import export as write
    from mmrl.app.hub_upload import Upload

    upload = None if push_to_hub is None else Upload(push_to_hub, public=public)
    print(write(run, out, what, checkpoint))
    if upload is not None:
        print(upload.send(out, f"{out.name}, exported by mmrl"))


def verify(
    run: RunArgument,
    step: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Which step.", show_default="the first after the newest checkpoint that has one"
        ),
    ] = None,
    decisions: Annotated[
        bool, typer.Option("--decisions", help="Replay which device did what, of a run with placement.log=true.")
    ] = False,
) -> None:
    """Repeat a step of a run, and compare it to the bit.

    Goes on from the newest checkpoint before the step, and changes nothing in RUN. With --decisions no model is loaded:
    the scheduler and the placement policy decide again from their log. Exit code 0 where all is the same, 1 where
    something differs, 2 where the step cannot be repeated (the message names those that can).
    """
    if decisions and step is not None:
        raise UserError("--decisions replays all steps; leave out --step")
    use_threads_of(run)
    if decisions:
        from mmrl.app.verify.decisions import verify_decisions

        verified = verify_decisions(run)
    else:
        from mmrl.app.verify import verify as repeat

        verified = repeat(run, step)
    print(verified)
    if not verified.equal:
        raise typer.Exit(1)

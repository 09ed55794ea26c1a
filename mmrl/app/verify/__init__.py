"""Replay recorded steps of a run and compare the results with the records, to the bit.

A step is a function of what a checkpoint holds and of its number. So the replay begins with the newest checkpoint
before the step, or with the base model, and takes the same steps. It writes nothing into the run's directory: what a
step leaves goes into a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from mmrl.app.build import open_run
from mmrl.app.verify.notes import hints, of_environment, of_episodes, of_judges, of_servers, of_weights
from mmrl.app.verify.replay import Replay, span_of
from mmrl.config.schema import Recipe
from mmrl.core.durations import duration
from mmrl.core.errors import UserError
from mmrl.logging.metrics import read_numbers
from mmrl.logging.rundir import RunDir
from mmrl.report.verified import Verified
from mmrl.rewards.judging.replay import Recorded, within


def verify(path: Path, step: int | None = None) -> Verified:
    """Replay ``step`` of the run in ``path``; None is the step after the newest checkpoint that has one.

    Raises ``UserError`` where it cannot be replayed, with the steps that can.
    """
    recipe, directory = open_run(path)
    check_one_device(recipe, path)
    if not recipe.rollout.reproducible:
        raise UserError(
            f"{path} drew its samples without seeds (rollout.reproducible: false), so no step of it can be repeated; "
            "train with rollout.reproducible=true to verify"
        )
    rows, evaluated = ({row["step"]: row for row in read_numbers(f)} for f in (directory.metrics, directory.heldout))
    span = span_of(directory, rows, recipe.checkpoint.every, step)
    took = sum(rows[n].get("time/step") or 0.0 for n in span.steps)
    several = f"steps {span.first} to {span.last}" if len(span.steps) > 1 else f"step {span.last}"
    print(f"replaying {several} from {span.start}; the run took {duration(took)} for it", file=sys.stderr)
    recorded = Recorded([path, *(d.path for d in directory.of_others(1))], [-1, *(n - 1 for n in span.steps)])
    recipe = recipe.model_copy(update={"scoring": recipe.scoring.model_copy(update={"patience": 0.0})})
    with tempfile.TemporaryDirectory(prefix="mmrl-verify-") as folder, within(recorded):
        replay = Replay(recipe, directory, RunDir(folder), span.last)
        try:
            parts = list(replay.parts(span, rows, evaluated))
        finally:
            replay.close()
    notes = [
        *replay.notes,
        *of_judges(recorded),
        *of_episodes(replay.episodes),
        *of_servers(recipe, evaluated=span.last in evaluated),
        *of_environment(directory),
        *of_weights(directory, rows, span.last, step),
    ]
    return Verified(span.last, span.start, parts, [*notes, *hints(recipe, parts)])


def check_one_device(recipe: Recipe, path: Path) -> None:
    """Raises ``UserError`` where the run has several controllers or devices."""
    if recipe.controllers * recipe.devices_per_controller > 1:
        raise UserError(
            f"{path} has {recipe.controllers} controllers of {recipe.devices_per_controller} devices, and mmrl verify "
            "replays on one device: sums that several devices add up in parts have other last bits there. To repeat "
            "steps of such a run, copy its directory, remove the later checkpoints from the copy, go on there with "
            "mmrl train ... --resume, and compare both metrics.jsonl"
        )

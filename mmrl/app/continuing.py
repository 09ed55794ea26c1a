"""Continue a run from its directory alone: its stored recipe, with the few settings that may change on the way.

More or fewer steps are possible with every schedule of the learning rate, and so is another learning rate. What the
rate of every update was stays in the recipe (``optim.earlier``), so that a step before can be repeated, and a run that
is killed after it was continued goes on to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from mmrl.app.resume import flatten, same_run
from mmrl.config.evaluation_checks import label_of
from mmrl.config.learning_rate import learning_rate
from mmrl.config.loader import Continuation, LoadedRecipe, load_recipe
from mmrl.config.names import refuse_code_inside, refuse_moved
from mmrl.config.schema import Earlier, Optim, Recipe
from mmrl.config.shipped_paths import moved
from mmrl.core.checkpoint_manifest import STATE, entries
from mmrl.core.checkpoint_reader import BEST, read_state
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject, MutableJson, as_integer, as_number, as_object
from mmrl.core.secrets import given_again, masked
from mmrl.core.stored import BadFileError, blamed
from mmrl.logging.metrics import read_numbers
from mmrl.logging.rundir import RunDir, looks_like_run
from mmrl.training.guards import Limits

Choice = Literal["extend", "hold"]
_HOW = "optim.held", "optim.earlier", "eval.since"
"""What a continuation itself sets."""


def continued(
    run: Path,
    overlays: Sequence[Path | str] = (),
    overrides: Sequence[str] = (),
    choice: Choice | None = None,
    prepare: Callable[[JsonObject], JsonObject] | None = None,
) -> LoadedRecipe:
    """The recipe with which the run in the directory ``run`` goes on: the stored one, with ``overlays`` and
    ``overrides`` on top.

    ``choice``: what a schedule that depends on the run's length does with another length: ``extend`` stretches it over
    the new one, ``hold`` keeps the rate of the last update. Raises ``UserError`` for what cannot be continued.
    """
    directory = RunDir(run)
    if not (looks_like_run(run) and directory.resolved.is_file()):
        raise UserError(f"there is no run in {run} to continue; name a directory that mmrl train made")
    refuse_moved(run)
    refuse_code_inside(run, directory.settings())
    loaded = load_recipe([directory.resolved, *overlays], overrides, prepare, run, _migrated)
    before = _before(directory)
    at = _Place(directory)
    recipe, notes = _with_rates(loaded.recipe, before, at, choice)
    _refuse_without_work(before, recipe, at, edited=bool(overlays or overrides))
    recipe, more = _counting_anew(recipe, directory, at)
    changes = _changes(before, recipe)
    made = replace(loaded, recipe=recipe, continues=Continuation(run, at.step, changes, (*notes, *more)))
    same_run(directory, made)
    return made


class _Place:
    """Where a run goes on: the newest checkpoint that can be used, as far as this is known without its tensors."""

    def __init__(self, directory: RunDir) -> None:
        self.step, self._file = 0, Path(STATE)
        self.state: JsonObject = {}
        for entry in reversed(entries(directory.checkpoints)):
            if entry.usable:
                try:
                    self.state = read_state(entry).model_dump(exclude_unset=True)
                except (OSError, BadFileError):
                    continue
                self._file = entry.directory / STATE
                self.step = entry.step
                break
        rows = {row["step"]: row for row in read_numbers(directory.metrics)}
        self._before_last = rows.get(self.step - 1, {}).get("perf/cpu_seconds", 0.0)

    @property
    def updates(self) -> int:
        with blamed(self._file, "policy"):
            return as_integer(as_object(self.state["policy"])["updates"]) if self.state else 0

    @property
    def cpu_seconds(self) -> float:
        with blamed(self._file, "cpu_seconds"):
            return as_number(self.state["cpu_seconds"]) if self.state else 0.0

    def last_rate(self, recipe: Recipe) -> float:
        """The learning rate of the last update before it."""
        limit = recipe.train.max_cpu_seconds
        spent = self._before_last / limit if limit and isinstance(self._before_last, int | float) else 0.0
        return learning_rate(recipe.optim, _total(recipe), max(0, self.updates - 1), spent)


def _total(recipe: Recipe) -> int:
    return recipe.train.steps * recipe.train.updates_per_step


def _migrated(stored: dict[str, MutableJson]) -> dict[str, MutableJson]:
    """The settings as this installation has them, with their secrets."""
    return dict(moved(given_again(stored), missing_only=True))  # pyright: ignore[reportReturnType] # fresh mappings


def _before(directory: RunDir) -> Recipe:
    """The recipe that the run has. Raises ``UserError`` where it cannot be read."""
    try:
        return Recipe.model_validate(moved(directory.settings(), missing_only=True))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise UserError(
            f"{directory.resolved} cannot be read ({str(error).splitlines()[0]}); put it back from a copy, or train "
            "the recipe anew with another --out"
        ) from error


def _with_rates(now: Recipe, before: Recipe, at: _Place, choice: Choice | None) -> tuple[Recipe, list[str]]:
    """The recipe with the learning rates of the steps to come, and of those that are done; and what to say of it."""
    old, new = before.optim, now.optim
    if (new.held, new.earlier, now.eval.since) != (old.held, old.earlier, before.eval.since):
        raise UserError(f"{', '.join(_HOW)}: mmrl continue sets them; leave them out (--hold holds the rate)")
    length = (now.train.steps, now.train.max_cpu_seconds) != (before.train.steps, before.train.max_cpu_seconds)
    falls = old.schedule != "constant" and old.held is None
    last = at.last_rate(before)
    if length and falls and choice is None and at.updates:
        raise UserError(_question(before, now, at, last))
    held = old.held if choice is None else None
    if choice == "hold" and old.schedule == "constant" and new.lr == old.lr:
        held = old.held
    elif choice == "hold" or held is not None:
        kept = old.held if old.held is not None else last if at.updates else old.lr
        held = new.lr if new.lr != old.lr else kept
    changes: dict[str, object] = {"held": held}
    rates = (new.lr, held), (old.lr, old.held)
    if at.updates and (rates[0] != rates[1] or (length and falls)):
        changes["earlier"] = _earlier(old, _total(before), at.updates)
    recipe = now.model_copy(update={"optim": new.model_copy(update=changes)})
    if rates[0] == rates[1] and not (length and falls):
        return recipe, [] if choice is None or old.held is not None else [_nothing_to_choose(old, choice)]
    return recipe, [_said(recipe, at, last)]


def _question(before: Recipe, now: Recipe, at: _Place, last: float) -> str:
    """Why a choice is needed, and what each would do."""
    optim, steps = now.optim, now.train.steps
    extended = learning_rate(optim, _total(now), at.updates)
    held = last if optim.lr == before.optim.lr else optim.lr
    key = "train.steps" if steps != before.train.steps else "train.max_cpu_seconds"
    return (
        f"{key}: optim.schedule={before.optim.schedule} depends on the length of the run, so say what the "
        f"learning rate does after step {at.step}, where it was {last:.3g}: --extend stretches the schedule "
        f"over {steps} steps from here (it goes on at {extended:.3g}), --hold keeps {held:.3g} to the end"
    )


def _nothing_to_choose(optim: Optim, choice: Choice) -> str:
    if choice == "extend":
        return "--extend changes nothing: the learning rate does not depend on the length of the run, or that stays"
    return f"--hold changes nothing: optim.schedule is {optim.schedule}"


def _said(recipe: Recipe, at: _Place, last: float) -> str:
    """What the learning rate does from now on."""
    optim, total = recipe.optim, _total(recipe)
    if optim.held is not None:
        how = "stays there to the end" if optim.held == last else f"is {optim.held:.3g} to the end"
        return f"the learning rate was {last:.3g} after step {at.step}, and {how}"
    next_, end = (learning_rate(optim, total, updates) for updates in (at.updates, total - 1))
    how = f"goes on at {next_:.3g}"
    if optim.schedule != "constant":
        how += f", and optim.schedule={optim.schedule} over {recipe.train.steps} steps ends at {end:.3g}"
    return f"the learning rate was {last:.3g} after step {at.step}, and {how}"


def _earlier(old: Optim, total: int, updates: int) -> list[Earlier]:
    """The rates of the ``updates`` that are done. ``old``, ``total``: of the run so far."""
    kept = [one for one in old.earlier if one.until < updates]
    covering = next((one for one in old.earlier if one.until >= updates), None)
    now = covering or Earlier(until=updates, total=total, peak=old.lr, constant=old.held)
    return [*kept, now.model_copy(update={"until": updates})]


def _refuse_without_work(before: Recipe, recipe: Recipe, at: _Place, *, edited: bool) -> None:
    """Raise ``UserError`` where no step is left to do."""
    steps, limit = recipe.train.steps, recipe.train.max_cpu_seconds
    named = steps != before.train.steps
    if at.step > steps or (at.step == steps and (named or not edited or before.optim != recipe.optim)):
        done = "has finished all of them" if at.step == before.train.steps else f"has done {at.step}"
        raise UserError(f"train.steps is {steps}, and the run {done}; name more: train.steps={2 * at.step}")
    if limit is not None and at.cpu_seconds >= limit:
        raise UserError(
            f"train.max_cpu_seconds: the run has used {at.cpu_seconds:.0f} of its {limit:g}; name more, "
            f"train.max_cpu_seconds={2 * at.cpu_seconds:.0f}, or null"
        )


def _counting_anew(recipe: Recipe, directory: RunDir, at: _Place) -> tuple[Recipe, list[str]]:
    """The recipe with which a run goes on that early stopping or a guard has ended."""
    stopping, labels = recipe.eval.early_stopping, [label_of(one.name, one.label) for one in recipe.eval.rewards]
    early = at.state.get(BEST)
    since = as_integer(as_object(early)["since"]) if isinstance(early, dict) else 0
    limits = Limits(recipe.eval.guards, labels, recipe.eval.since)
    for row in read_numbers(directory.heldout):
        if row["step"] <= at.step:
            limits.saw(row["step"], {key: value for key, value in row.items() if isinstance(value, int | float)})
    patience = stopping is not None and at.step > recipe.eval.since and since >= stopping.patience
    if not (patience or limits.stopped):
        return recipe, []
    what = "eval.early_stopping" if patience else "eval.guards"
    changed = recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"since": at.step})})
    return changed, [f"{what} ended the run after step {at.step}; it goes on, and evaluations count from here on"]


def _changes(before: Recipe, recipe: Recipe) -> tuple[tuple[str, Json, Json], ...]:
    """The settings that differ, with their values before and now, without secrets."""
    old, new = (flatten(masked(one.model_dump(mode="json"))) for one in (before, recipe))
    keys = [key for key in dict.fromkeys([*old, *new]) if old.get(key) != new.get(key) and key not in _HOW]
    return tuple((key, old.get(key), new.get(key)) for key in keys)

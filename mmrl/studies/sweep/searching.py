"""Search settings of a recipe by successive halving: one training after another, each an ordinary run.

The file sweep.json says what is tried, and what each trial has reached in each round.
"""

from __future__ import annotations

import gc
import itertools
import json
import math
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import Field

from mmrl.app.divergence import diverged
from mmrl.config.layers import parse_key, parse_value
from mmrl.config.loader import LoadedRecipe
from mmrl.config.masked_text import masked_override
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.json_types import JsonObject, elements
from mmrl.core.stored import Number, Text, fitted, read_object
from mmrl.inference.this_machine import choose_device
from mmrl.logging.rundir import RunDir, has_begun
from mmrl.planner.plan import changed
from mmrl.report.heldout import Interval, change, half_width, label_in, measure_of, read_samples, signed
from mmrl.report.recorded import read_run
from mmrl.runtime.start import train_to_end
from mmrl.studies.sweep.halving import Round, kept, rounds

MOST_TRIALS = 256
MOST_SEEDS = 64
NAME = "sweep.json"


_Place = Annotated[int, Field(ge=1, le=10**6, strict=True)]


_Seed = Annotated[int, Field(ge=0, strict=True)]


def combinations(tried: Sequence[str]) -> list[tuple[str, ...]]:
    """The overrides of every trial: each combination of the values in ``tried`` (``optim.lr=1e-5,3e-5``).

    Values are those of a YAML list without its brackets. Raises ``UserError`` with what is wrong with one.
    """
    keys: list[str] = []
    values: list[list[str]] = []
    for text in tried:
        key, equals, given = (part.strip() for part in text.partition("="))
        if not equals or parse_key(key) is None:
            raise UserError(f"--try {text!r} is no setting with values; write --try optim.lr=1e-5,3e-5")
        if key in keys:
            raise UserError(f"--try {key} is given twice; put all its values into one")
        if parse_key(key) == ("seed",):
            raise UserError(
                "--try seed: a seed is chance, and the best of several is no setting; leave it out, and add --seeds 3: "
                "each setting is trained with three seeds"
            )
        try:
            found = parse_value(f"[{given}]")
        except ValueError as error:
            raise UserError(f"--try {key}: {error}; write values with commas between, as in {key}=A,B") from None
        shown = [value if isinstance(value, str) else json.dumps(value) for value in elements(found)]
        if len(shown) < 2 or len(set(shown)) < len(shown):
            raise UserError(f"--try {text}: give two different values or more, with commas between")
        keys.append(key)
        values.append(shown)
    trials = [tuple(f"{k}={v}" for k, v in zip(keys, one, strict=True)) for one in itertools.product(*values)]
    if len(trials) > MOST_TRIALS:
        raise UserError(
            f"--try asks for {len(trials):,} combinations, and at most {MOST_TRIALS} are trained; try fewer"
        )
    return trials


class Search:
    """Final class. The search ``tried`` (as for ``combinations``) of a recipe, in the folder ``out``.

    ``factor``: of which part of the trials goes on after each round. ``seeds``: how many each trial is trained with,
    the recipe's and those that follow it. Every trial is read and planned when it is built:
    raises ``UserError`` where one cannot run here, where nothing is evaluated, and where ``out`` holds something else,
    or a search and not ``resume``.
    """

    def __init__(
        self,
        loaded: LoadedRecipe,
        out: Path,
        tried: Sequence[str],
        factor: int,
        seeds: int = 1,
        *,
        resume: bool = False,
    ) -> None:
        if type(seeds) is not int or not 1 <= seeds <= MOST_SEEDS:
            raise UserError(f"--seeds {seeds}: give a number from 1 to {MOST_SEEDS}")
        trials = combinations(tried)
        self.rounds = rounds(len(trials), factor)
        self.loaded = loaded
        hide = loaded.tree.values
        shown = [tuple(masked_override(text, hide) for text in one) for one in [loaded.overrides, *trials]]
        chosen = tuple(range(loaded.recipe.seed, loaded.recipe.seed + seeds))
        changed(loaded, [f"seed={chosen[-1]}"])  # the others are smaller
        sweep = Sweep(out, tuple(map(str, loaded.paths)), shown[0], tuple(shown[1:]), factor, chosen)
        self.sweep = _begun(sweep, resume=resume)
        self.recipes = [self._checked(one) for one in trials]
        _check_measure(trials, [one.recipe for one in self.recipes])
        self.goes_on = all(one.recipe.optim.schedule == "constant" for one in self.recipes)

    def _checked(self, trial: Sequence[str]) -> LoadedRecipe:
        try:
            made = changed(self.loaded, trial)
            choose_device(made.recipe.device)
        except UserError as error:
            raise UserError(f"the trial {' '.join(trial)}: {error}") from None
        if made.recipe.eval.every is None:
            raise UserError("eval.every: nothing is evaluated, so no trial would be better; set eval.every=10")
        return made

    def run(self) -> int | None:
        """Train round after round. Returns the number of the trial that is left; None where Ctrl-C stopped it.

        A trial that diverges is left out. Raises ``UserError`` where all have, and for every other error of a run; the
        search can be resumed then.
        """
        self.sweep.write()
        going = list(range(1, len(self.recipes) + 1))
        for n, one in enumerate(self.rounds, 1):
            going = going[: one.trials]
            for trial, seed in itertools.product(going, self.sweep.seeds):
                if (n, trial, seed) not in self.sweep.results and not self._train(n, one, trial, seed):
                    return None
            after = self.rounds[n].trials if n < len(self.rounds) else 1
            found = {trial: self.sweep.mean(n, trial) for trial in going}
            going = kept(found, after)
            if not going:
                raise UserError(
                    f"all trials of round {n} diverged; {self.sweep.path / NAME} says where. Try smaller "
                    "values of optim.lr"
                )
        return going[0]

    def leads(self, best: int) -> dict[int, Lead]:
        """By how much the trial ``best``, which is left, is above each other one, in the last round of that."""
        found: dict[int, Lead] = {}
        for trial in range(1, len(self.recipes) + 1):
            last = max((n for n, of, _ in self.sweep.results if of == trial), default=0)
            if trial == best or not last or self.sweep.mean(last, trial) is None:
                continue  # one that diverged is behind
            values = [self.sweep.values(last, one) for one in (best, trial)]
            if len(self.sweep.seeds) > 1:
                mine, its = ({seed: v for seed, v in of.items() if v is not None} for of in values)
                found[trial] = over_seeds(mine, its)
            else:
                length = self.recipes[best - 1].recipe.train.steps
                step = self.rounds[last - 1].steps(length) if self.goes_on else None
                found[trial] = over_prompts(self.run_of(best, last), self.run_of(trial, last), step)
        return found

    def verdict(self, best: int) -> list[str]:
        """Whether the trial ``best``, which is left, is ahead, in sentences."""
        leads, named = self.leads(best), " ".join(self.sweep.trials[best - 1])
        where = f"trained in {self.run_of(best, len(self.rounds))}"
        alike = {trial: lead for trial, lead in leads.items() if not lead.ahead}
        over = f"{len(self.sweep.seeds)} seeds" if len(self.sweep.seeds) > 1 else "held-out prompts"
        if not alike:
            more = "" if len(self.sweep.seeds) > 1 else "; another seed may choose another (--seeds 3)"
            return [f"best: {named}, {where}; ahead of all others over {over}{more}"]
        others = "; ".join(f"{' '.join(self.sweep.trials[trial - 1])} ({_interval(of)})" for trial, of in alike.items())
        more = "more held-out samples (eval.samples)" if len(self.sweep.seeds) > 1 else "--seeds 3"
        return [
            f"no setting is ahead: {named} cannot be told from {others}; paired over {over}",
            f"{named} was left, {where}; try {more}, or keep what you have",
        ]

    def run_of(self, trial: int, number: int) -> Path:
        """The directory of a trial's run with the recipe's seed in round ``number``."""
        return self.sweep.run(trial, number, self.sweep.seeds[0], goes_on=self.goes_on)

    def _train(self, number: int, one: Round, trial: int, seed: int) -> bool:
        path = self.sweep.run(trial, number, seed, goes_on=self.goes_on)
        more = f" seed={seed}" if len(self.sweep.seeds) > 1 else ""
        print(f"round {number} of {len(self.rounds)}: {' '.join(self.sweep.trials[trial - 1])}{more}", file=sys.stderr)
        try:
            finished = train_to_end(self._of(one, trial, seed), path, resume=has_begun(path))
        except UserError as error:
            if not diverged(RunDir(path)):
                raise
            why = str(error).partition("\n")[0]
            print(f"{path} diverged and is left out", file=sys.stderr)
            self.sweep = self.sweep.found(number, trial, seed, Result(None, _seconds(path), why))
            return True
        if finished:
            self.sweep = self.sweep.found(number, trial, seed, Result(_value(path), _seconds(path), ""))
        gc.collect()  # the model of this trial, before the next is loaded
        return finished

    def _of(self, one: Round, trial: int, seed: int) -> LoadedRecipe:
        """The recipe of a trial with a seed, as long as the round is."""
        made = self.recipes[trial - 1]
        train = made.recipe.train
        limit = None if train.max_cpu_seconds is None else train.max_cpu_seconds * float(one.share)
        update = {"steps": one.steps(train.steps), "max_cpu_seconds": limit}
        recipe = made.recipe.model_copy(update={"train": train.model_copy(update=update), "seed": seed})
        named = () if seed == made.recipe.seed else (f"seed={seed}",)
        return replace(made, recipe=recipe, overrides=(*made.overrides, *named))


def _check_measure(trials: Sequence[Sequence[str]], recipes: Sequence[Recipe]) -> None:
    """Raises ``UserError`` where trials would be compared on different figures."""

    def measured(recipe: Recipe) -> dict[str, object]:
        stopping, data = recipe.eval.early_stopping, recipe.data
        counted = next((one for one in recipe.rewards if one.weight > 0), None)
        return {
            "eval": (recipe.eval.model_copy(update={"early_stopping": None}), stopping and stopping.metric),
            "data": (data.name, data.heldout, [(one.name, one.heldout) for one in data.mixture]),
            "rewards": None if stopping else counted and (counted.name, counted.label, counted.options),
        }

    first = measured(recipes[0])
    for trial, recipe in zip(trials, recipes, strict=True):
        if key := next((key for key, value in measured(recipe).items() if value != first[key]), None):
            raise UserError(
                f"the trial {' '.join(trial)}: {key} says another held-out figure than in the first trial, and figures "
                "of different things do not compare; try settings of training, and set this one for all trials"
                + (", or name the figure in eval.early_stopping.metric" if key == "rewards" else "")
            )


def _interval(lead: Lead) -> str:
    """The lead with its interval."""
    if math.isnan(lead.value):
        return "nothing to compare"
    near = lead.half if lead.known else lead.value or 0.01
    within = f"95 % interval {lead.bounds(near)}" if lead.known else "too few prompts differ"
    return f"difference {signed(lead.value, near)}, {within}"


def _begun(sweep: Sweep, *, resume: bool) -> Sweep:
    """The search with what is known of it. Raises ``UserError`` where another one, or something else, is there."""
    out = sweep.path
    if not (out / NAME).exists() and not resume:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise UserError(f"{out} is not empty and has no {NAME}; name another directory with --out")
        return sweep
    if not resume:
        raise UserError(f"{out} already holds a search; go on with it with --resume, or name another with --out")
    before = read_sweep(out)
    if before.asks() != sweep.asks():
        raise UserError(
            f"--resume: {out} was begun with other settings or values than these ({NAME} has them); give the same, or "
            "name another directory with --out"
        )
    return replace(sweep, results=before.results)


def _value(path: Path) -> float | None:
    """The last held-out figure of a run, higher is better. Raises ``UserError`` where it has none."""
    run = read_run(path)
    key = measure_of(run)
    values = [row[key] for row in run.heldout if key is not None and row.get(key) is not None]
    if key is None:
        raise UserError(f"{path} has no held-out figure to compare; set eval.rewards, or a reward with a weight")
    if not values:
        raise UserError(f"{path} has no held-out figure to compare: no sample got a {key}; have that reward answer")
    return -values[-1] if run.trained.get(label_in(key) or "", 1.0) < 0 else values[-1]


def _seconds(path: Path) -> float:
    """CPU-seconds that the run has trained."""
    rows = read_run(path).metrics
    return float(rows[-1].get("perf/cpu_seconds", 0.0)) if rows else 0.0


@dataclass(frozen=True)
class Lead(Interval):
    """By how much the chosen setting is above another, as training wants it, with a paired interval."""

    @property
    def ahead(self) -> bool:
        return self.low > 0


def over_seeds(chosen: Mapping[int, float], other: Mapping[int, float]) -> Lead:
    """The lead by the values of each seed: the interval of the mean paired difference."""
    differences = [chosen[seed] - other[seed] for seed in chosen if seed in other]
    if not differences:
        return Lead(math.nan, math.nan, math.nan, "seeds", 0)
    mean, half = statistics.fmean(differences), half_width(differences)
    return Lead(mean, mean - half, mean + half, "seeds", len(differences))


def over_prompts(chosen: Path, other: Path, step: int | None = None) -> Lead:
    """The lead of a run over another on the held-out prompts that both have, after ``step`` (None: the last evaluation
    of both). It says nothing of other seeds."""
    first, second = read_run(chosen), read_run(other)
    key = measure_of(second)
    nothing = Lead(math.nan, math.nan, math.nan, "prompts", 0)
    if key is None or not first.heldout or not second.heldout:
        return nothing
    last = second.heldout[-1]["step"]
    at = first.heldout[-1]["step"] if step is None else step
    before, after = (read_samples(path).get(n, {}).get(key, {}) for path, n in ((other, last), (chosen, at)))
    found = change(before, after)
    if found is None:
        return nothing
    if second.trained.get(label_in(key) or "", 1.0) < 0:
        return Lead(-found.value, -found.high, -found.low, "prompts", found.count)
    return Lead(found.value, found.low, found.high, "prompts", found.count)


@dataclass(frozen=True)
class Result:
    """What one seed of a trial came to in a round.

    ``value``: its held-out figure as training wants it, higher is better; None where it ``failed``, and why."""

    value: Number | None
    cpu_seconds: Number
    failed: Text


@dataclass(frozen=True, kw_only=True)
class _Row(Result):
    """A result in sweep.json; those of older versions have no seed."""

    round: _Place
    trial: _Place
    seed: _Seed | None = None


@dataclass(frozen=True)
class Sweep:
    """A search in the folder ``path``.

    ``trials``: the overrides of each, without secrets, as are ``overrides``, which all have. ``results``: by round and
    number of a trial, both from 1, and seed. ``seeds``: those of every trial.
    """

    path: Path
    recipe: tuple[Text, ...]
    overrides: tuple[Text, ...]
    trials: tuple[tuple[Text, ...], ...]
    factor: _Place
    seeds: Annotated[tuple[_Seed, ...], Field(min_length=1)] = (0,)
    results: Mapping[tuple[int, int, int], Result] = field(default_factory=dict)

    def asks(self) -> tuple[object, ...]:
        """What another search has to share to go on with this one."""
        return self.recipe, self.overrides, self.trials, self.factor, self.seeds

    def run(self, number: int, round_: int, seed: int, *, goes_on: bool) -> Path:
        """The directory of a trial's run: its own of each round unless the run ``goes_on`` from round to round."""
        folder = self.path / (f"trial-{number}" if goes_on else f"round-{round_}/trial-{number}")
        return folder / f"seed-{seed}" if len(self.seeds) > 1 else folder

    def values(self, round_: int, number: int) -> dict[int, float | None]:
        """What a trial has reached in a round, by seed; None where it failed."""
        found = {seed: self.results.get((round_, number, seed)) for seed in self.seeds}
        return {seed: of.value for seed, of in found.items() if of is not None}

    def mean(self, round_: int, number: int) -> float | None:
        """The mean over seeds of what a trial has reached; None where it has not with each of them."""
        values = [value for value in self.values(round_, number).values() if value is not None]
        return statistics.fmean(values) if len(values) == len(self.seeds) else None

    def found(self, round_: int, number: int, seed: int, result: Result) -> Sweep:
        """The same with this result, on the disk too."""
        made = replace(self, results={**self.results, (round_, number, seed): result})
        made.write()
        return made

    def train(self, number: int) -> str:
        """The command that trains the recipe with the settings of a trial."""
        return shlex.join(["mmrl", "train", *self.recipe, *self.overrides, *self.trials[number - 1]])

    def rows(self) -> list[JsonObject]:
        """The results as JSON, round by round."""
        return [
            {
                "round": n,
                "trial": trial,
                "seed": seed,
                "value": of.value,
                "cpu_seconds": of.cpu_seconds,
                "failed": of.failed,
            }
            for (n, trial, seed), of in sorted(self.results.items())
        ]

    def write(self) -> None:
        """Write sweep.json, and the folder where it is not there."""
        content: JsonObject = {
            "recipe": self.recipe,
            "overrides": self.overrides,
            "trials": self.trials,
            "factor": self.factor,
            "seeds": self.seeds,
            "results": self.rows(),
        }
        self.path.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path / NAME, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def read_sweep(path: Path) -> Sweep:
    """The search in the folder ``path``. Raises ``UserError`` where there is none, or its file is damaged."""
    try:
        said = read_object(path / NAME)
    except FileNotFoundError:
        raise UserError(f"{path} holds no search: it has no {NAME}; leave out --resume, or correct --out") from None
    sweep = fitted(Sweep, {**said, "path": str(path), "results": {}}, str(path / NAME))
    rows = fitted(list[_Row], said.get("results"), f"{path / NAME}, results")
    seed = sweep.seeds[0]
    return replace(sweep, results={(row.round, row.trial, seed if row.seed is None else row.seed): row for row in rows})

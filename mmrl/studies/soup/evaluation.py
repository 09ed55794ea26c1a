"""Measure a soup of two rewards on held-out prompts, for several preferences, and beside it other soups and runs."""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.app.build import open_run, restored
from mmrl.config.evaluation_checks import label_of
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.json_types import JsonObject, finite
from mmrl.data.loading import load_prompts
from mmrl.studies.soup.formulas import (
    Point,
    controllability,
    guaranteed_interval,
    hypervolume,
    merging_weights,
    sparsity,
)
from mmrl.studies.soup.merging import Merged, found, opened
from mmrl.studies.soup.record import NAME as SOUP
from mmrl.studies.soup.record import Soup, read_soup
from mmrl.training.evaluation import Evaluator, Made, summary

NAME = "soup_report.json"
MOST = 21
SHOWN = 8
"""Held-out samples of a merge that the page shows."""


@dataclass(frozen=True)
class Measured:
    """One merged model: the preferences ``mu``, the backbones' ``weights``, and its held-out ``rewards``."""

    mu: Point
    weights: tuple[float, ...]
    rewards: Point


@dataclass(frozen=True)
class Front:
    """All models of one way to merge, by rising ``mu`` of the first reward, with the measures of them together."""

    points: list[Measured]
    hypervolume: float
    controllability: float
    sparsity: float


@dataclass(frozen=True)
class Beside:
    """What the soup is compared with: another soup, with its merges and measures, or the ``rewards`` of a run."""

    path: Path
    front: Front | None
    rewards: Point | None
    hypervolume: float
    beta: float | None = None

    def as_json(self) -> JsonObject:
        found = {"path": str(self.path), "beta": self.beta, "rewards": self.rewards, "hypervolume": self.hypervolume}
        return found if self.front is None else {**found, **_front_json(self.front)}


@dataclass(frozen=True)
class SoupReport:
    """``reference``: the point that the hypervolumes are above, the worst of each reward among all models, in units.
    ``backbones``: the rewards of each backbone alone, with the hypervolume of this one point. ``kept``: the first
    held-out samples of the soup's merges, in the order of ``bone.points``."""

    soup: Soup
    steps: list[int]
    samples: int
    reference: Point
    bone: Front
    direct: Front
    backbones: list[tuple[Point, float]]
    beside: list[Beside]
    kept: list[Made]

    def as_json(self) -> JsonObject:
        """JSON, with null for what is not known."""
        return {
            "rewards": self.soup.rewards,
            "units": self.soup.units,
            "beta": self.soup.beta,
            "guaranteed_interval": guaranteed_interval(self.soup.beta),
            "steps": self.steps,
            "samples": self.samples,
            "reference": self.reference,
            "bone_soup": _front_json(self.bone),
            "direct": _front_json(self.direct),
            "backbones": [{"rewards": rewards, "hypervolume": volume} for rewards, volume in self.backbones],
            "beside": [one.as_json() for one in self.beside],
        }


def report(
    folder: Path,
    points: int = 5,
    samples: int | None = None,
    checkpoint: str = "latest",
    beside: Sequence[Path] = (),
) -> SoupReport:
    """Evaluate the soup in ``folder`` for ``points`` preferences from (0, 1) to (1, 0), and write soup_report.json.

    ``direct`` is the same backbones with ``lambda = mu``: the paper's ablation, and Rewarded Soup only with beta 1.
    ``beside``: other soups (Rewarded Soup is one of beta 1) and runs (one on a mix of the rewards, say) of the same
    recipe, at the same ``checkpoint``. All models get the same held-out prompts and noise, with ``samples`` samples
    each (None: as many as the recipe says). Raises ``UserError`` for more than two rewards, and for what cannot be
    compared.
    """
    soup = read_soup(folder)
    if len(soup.rewards) != 2:
        raise UserError(
            f"mmrl soup report compares two rewards, and {folder} has {len(soup.rewards)} ({', '.join(soup.rewards)}); "
            "merge the weights that you want, and sample or evaluate these models"
        )
    if not 2 <= points <= MOST:
        raise UserError(f"--points {points}: give 2 to {MOST}")
    others = [comparable(soup, path, checkpoint) for path in beside]
    grid = [(k / (points - 1), 1 - k / (points - 1)) for k in range(points)]
    with measuring(soup, samples, checkpoint) as measure:
        bone = [measure(mu, merging_weights(soup.matrix, mu)) for mu in grid]
        direct = [measure(mu, mu) for mu in grid]
        alone = [measure(mu, mu) for mu in ((1.0, 0.0), (0.0, 1.0))]
        kept = [measure.kept(one) for one in bone]
    gc.collect()  # the model of this soup, before the next is loaded
    theirs = [_beside(soup, one, grid, measure.samples, checkpoint) for one in others]
    models = [*bone, *direct, *(one for them in theirs for one in them)]
    in_units = [_in_units(soup, one.rewards) for one in models]
    reference = min(p[0] for p in in_units), min(p[1] for p in in_units)
    made = SoupReport(
        soup,
        measure.merged.steps,
        measure.samples,
        reference,
        _front(soup, bone, reference),
        _front(soup, direct, reference),
        [(one.rewards, hypervolume([_in_units(soup, one.rewards)], reference)) for one in alone],
        [_compared(soup, one, them, reference) for one, them in zip(others, theirs, strict=True)],
        kept,
    )
    write_atomic(folder / NAME, json.dumps(made.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return made


@dataclass(frozen=True)
class Measuring:
    """Measures merges of a soup of two rewards; one that was measured before (equal weights) is not measured again."""

    soup: Soup
    merged: Merged
    heldout: Evaluator
    samples: int
    known: dict[tuple[float, ...], tuple[Point, Made]] = field(default_factory=dict)

    def __call__(self, mu: Point, weights: Sequence[float]) -> Measured:
        """The model that counts each backbone with its number of ``weights``. Raises ``UserError``."""
        key = _key(weights)
        if key not in self.known:
            self.merged.weigh(weights)
            self.known[key] = scored(self.heldout, self.soup.rewards, self.samples)
        return Measured(mu, tuple(weights), self.known[key][0])

    def kept(self, one: Measured) -> Made:
        """The first held-out samples of a merge that was measured, with their scores."""
        return self.known[_key(one.weights)][1]


def _key(weights: Sequence[float]) -> tuple[float, ...]:
    return tuple(round(w, 9) for w in weights)


@contextmanager
def measuring(soup: Soup, samples: int | None = None, checkpoint: str = "latest") -> Generator[Measuring]:
    """Open a soup to measure merges of it, all with the same held-out prompts and noise. Raises ``UserError``."""
    recipe, saved = found(soup, checkpoint)
    merged = opened(soup, recipe, saved)
    with closing(merged.context):
        heldout = Evaluator(merged.context, load_prompts(merged.context.recipe, "heldout"))
        yield Measuring(soup, merged, heldout, samples or recipe.eval.samples)


def rewards_of(heldout: Evaluator, labels: Sequence[str], samples: int) -> Point:
    """The mean rewards of two labels of the model as it is now. Raises ``UserError`` where one has no score."""
    return scored(heldout, labels, samples)[0]


def scored(heldout: Evaluator, labels: Sequence[str], samples: int) -> tuple[Point, Made]:
    """``rewards_of``, and the first ``SHOWN`` samples with their scores. Raises ``UserError``."""
    row, made, failures = heldout.score(samples)
    if failures:
        print(f"warning: {summary(row, failures)}", file=sys.stderr)
    first = Made(made.samples[:SHOWN], made.scores[:SHOWN])
    return (reward_of(row, labels[0]), reward_of(row, labels[1])), first


# -- what the soup is compared with ------------------------------------------------------------------------------------


def comparable(soup: Soup, path: Path, checkpoint: str) -> Soup | Path:
    """The soup at ``path``, or the run there, if it is measured on the same held-out samples. Raises ``UserError``."""
    ours = found(soup, checkpoint)[0]
    if (path / SOUP).exists():
        other = read_soup(path)
        if (other.rewards, other.units) != (soup.rewards, soup.units):
            raise UserError(
                f"--beside {path}: its rewards are {', '.join(other.rewards)} with the weights "
                f"{', '.join(f'{u:g}' for u in other.units)}; train it with the same recipe"
            )
        theirs = found(other, checkpoint)[0]
    else:
        other, theirs = path, open_run(path)[0]
        labels = [label_of(reward.name, reward.label) for reward in theirs.rewards]
        if lacks := [label for label in soup.rewards if label not in labels]:
            raise UserError(f"--beside {path}: this run has no reward {lacks[0]}; train it with the same recipe")
    differ = [name for name, (a, b) in _measured_alike(ours, theirs).items() if a != b]
    if differ:
        raise UserError(
            f"--beside {path}: its settings of {', '.join(differ)} differ from those of {soup.path}, so other held-out "
            "samples would be compared; train it with the same recipe"
        )
    return other


def _measured_alike(ours: Recipe, theirs: Recipe) -> dict[str, tuple[object, object]]:
    """What has to be equal for the same held-out prompts and noise, of both."""
    free = {"every", "samples", "grid", "early_stopping"}
    evals = [recipe.eval.model_dump(mode="json", exclude=free) for recipe in (ours, theirs)]
    return {
        "pipeline": (ours.pipeline, theirs.pipeline),
        "data": (ours.data, theirs.data),
        "sampling": (ours.sampling, theirs.sampling),
        "eval": (evals[0], evals[1]),
    }


def _beside(soup: Soup, other: Soup | Path, grid: Sequence[Point], samples: int, checkpoint: str) -> list[Measured]:
    """The merges of another soup for the preferences of ``grid``, or the run alone."""
    if isinstance(other, Soup):
        with measuring(other, samples, checkpoint) as measure:
            made = [measure(mu, merging_weights(other.matrix, mu)) for mu in grid]
    else:
        run, _, _ = restored(other, checkpoint)
        with closing(run):
            heldout = Evaluator(run, load_prompts(run.recipe, "heldout"))
            made = [Measured((math.nan, math.nan), (), rewards_of(heldout, soup.rewards, samples))]
    gc.collect()
    return made


def _compared(soup: Soup, other: Soup | Path, made: list[Measured], reference: Point) -> Beside:
    if isinstance(other, Soup):
        front = _front(soup, made, reference)
        return Beside(other.path, front, None, front.hypervolume, other.beta)
    rewards = made[0].rewards
    return Beside(other, None, rewards, hypervolume([_in_units(soup, rewards)], reference))


def reward_of(row: dict[str, float], label: str) -> float:
    """The mean of a reward in the metrics of an evaluation. Raises ``UserError`` where it has no score."""
    found = row.get(f"reward/{label}", math.nan)
    if not math.isfinite(found):
        raise UserError(f"the reward {label} could score no held-out sample, so there is nothing to compare")
    return found


def _in_units(soup: Soup, rewards: Point) -> Point:
    """Each times its weight in the recipe, so that more is better."""
    return soup.units[0] * rewards[0], soup.units[1] * rewards[1]


def _front(soup: Soup, points: list[Measured], reference: Point) -> Front:
    found = [_in_units(soup, one.rewards) for one in points]
    return Front(points, hypervolume(found, reference), controllability(found), sparsity(found))


def _front_json(front: Front) -> JsonObject:
    return {
        "hypervolume": front.hypervolume,
        "controllability": front.controllability,
        "sparsity": finite(front.sparsity),
        "points": [{"mu": one.mu, "lambda": one.weights, "rewards": one.rewards} for one in front.points],
    }

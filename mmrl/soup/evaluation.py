"""Measure a soup of two rewards on held-out prompts, for several preferences, with and without the paper's mapping."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from mmrl.datasets.loading import load_prompts
from mmrl.errors import UserError
from mmrl.files import write_atomic
from mmrl.json_types import JsonObject
from mmrl.soup.formulas import Point, controllability, guaranteed_interval, hypervolume, merging_weights, sparsity
from mmrl.soup.merging import Merged, found, opened
from mmrl.soup.record import Soup, read_soup
from mmrl.training.evaluation import Evaluator, summary

NAME = "soup_report.json"
MOST = 21


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
class SoupReport:
    """``reference``: the point that the hypervolumes are above, the worst of each reward among all models, in units."""

    soup: Soup
    steps: list[int]
    samples: int
    reference: Point
    bone: Front
    direct: Front

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
        }


def report(folder: Path, points: int = 5, samples: int | None = None, checkpoint: str = "latest") -> SoupReport:
    """Evaluate the soup in ``folder`` for ``points`` preferences from (0, 1) to (1, 0), and write soup_report.json.

    ``direct`` is the same backbones with ``lambda = mu``: the paper's ablation, and Rewarded Soup only with beta 1. All
    models get the same held-out prompts and noise, with ``samples`` samples each (None: as many as the recipe says).
    Raises ``UserError`` for more than two rewards.
    """
    soup = read_soup(folder)
    if len(soup.rewards) != 2:
        raise UserError(
            f"mmrl soup report compares two rewards, and {folder} has {len(soup.rewards)} ({', '.join(soup.rewards)}); "
            "merge the weights that you want, and sample or evaluate these models"
        )
    if not 2 <= points <= MOST:
        raise UserError(f"--points {points}: give 2 to {MOST}")
    grid = [(k / (points - 1), 1 - k / (points - 1)) for k in range(points)]
    with measuring(soup, samples, checkpoint) as measure:
        bone = [measure(mu, merging_weights(soup.matrix, mu)) for mu in grid]
        direct = [measure(mu, mu) for mu in grid]
    both = [_in_units(soup, one.rewards) for one in (*bone, *direct)]
    reference = min(p[0] for p in both), min(p[1] for p in both)
    fronts = [_front(soup, of, reference) for of in (bone, direct)]
    made = SoupReport(soup, measure.merged.steps, measure.samples, reference, *fronts)
    write_atomic(folder / NAME, json.dumps(made.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return made


@dataclass(frozen=True)
class Measuring:
    """Measures merges of a soup of two rewards; one that was measured before (equal weights) is not measured again."""

    soup: Soup
    merged: Merged
    heldout: Evaluator
    samples: int
    known: dict[tuple[float, ...], Point] = field(default_factory=dict)

    def __call__(self, mu: Point, weights: Sequence[float]) -> Measured:
        """The model that counts each backbone with its number of ``weights``. Raises ``UserError``."""
        key = tuple(round(w, 9) for w in weights)
        if key not in self.known:
            self.merged.weigh(weights)
            self.known[key] = rewards_of(self.heldout, self.soup.rewards, self.samples)
        return Measured(mu, tuple(weights), self.known[key])


@contextmanager
def measuring(soup: Soup, samples: int | None = None, checkpoint: str = "latest") -> Generator[Measuring]:
    """Open a soup to measure merges of it, all with the same held-out prompts and noise. Raises ``UserError``."""
    recipe, saved = found(soup, checkpoint)
    merged = opened(soup, recipe, saved)
    root = soup.backbones[0]
    try:
        heldout = Evaluator(merged.context, load_prompts(merged.context.recipe, root, "heldout"), root)
        yield Measuring(soup, merged, heldout, samples or recipe.eval.samples)
    finally:
        merged.context.pipeline.close()
        merged.context.compute.devices.close()


def rewards_of(heldout: Evaluator, labels: Sequence[str], samples: int) -> Point:
    """The mean rewards of two labels of the model as it is now. Raises ``UserError`` where one has no score."""
    row, _, failures = heldout.score(samples)
    if failures:
        print(f"warning: {summary(row, failures)}", file=sys.stderr)
    return _reward(row, labels[0]), _reward(row, labels[1])


def _reward(row: dict[str, float], label: str) -> float:
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
        "sparsity": front.sparsity if math.isfinite(front.sparsity) else None,
        "points": [{"mu": one.mu, "lambda": one.weights, "rewards": one.rewards} for one in front.points],
    }

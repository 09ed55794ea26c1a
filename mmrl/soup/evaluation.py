"""Measure a soup of two rewards on held-out prompts, for several preferences, with and without the paper's mapping."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
    recipe, saved = found(soup, checkpoint)
    merged = opened(soup, recipe, saved)
    root = soup.backbones[0]
    count = samples or recipe.eval.samples
    try:
        heldout = Evaluator(merged.context, load_prompts(merged.context.recipe, root, "heldout"), root)
        bone, direct = _measured(soup, merged, heldout, points, count)
    finally:
        merged.context.pipeline.close()
        merged.context.compute.devices.close()
    both = [_in_units(soup, one.rewards) for one in (*bone, *direct)]
    reference = min(p[0] for p in both), min(p[1] for p in both)
    made = SoupReport(
        soup, merged.steps, count, reference, _front(soup, bone, reference), _front(soup, direct, reference)
    )
    write_atomic(folder / NAME, json.dumps(made.as_json(), indent=1, ensure_ascii=False, allow_nan=False) + "\n")
    return made


def _measured(
    soup: Soup, merged: Merged, heldout: Evaluator, points: int, samples: int
) -> tuple[list[Measured], list[Measured]]:
    """The models of both ways to merge; one that both have (equal weights) is measured once."""
    known: dict[tuple[float, ...], Point] = {}

    def measure(mu: Point, weights: Sequence[float]) -> Measured:
        key = tuple(round(w, 9) for w in weights)
        if key not in known:
            merged.weigh(weights)
            row, _, failures = heldout.score(samples)
            if failures:
                print(f"warning: {summary(row, failures)}", file=sys.stderr)
            known[key] = _reward(row, soup.rewards[0]), _reward(row, soup.rewards[1])
        return Measured(mu, tuple(weights), known[key])

    grid = [(k / (points - 1), 1 - k / (points - 1)) for k in range(points)]
    bone = [measure(mu, merging_weights(soup.matrix, mu)) for mu in grid]
    return bone, [measure(mu, mu) for mu in grid]


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

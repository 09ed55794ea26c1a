"""Choose beta as published (Bone Soup, arXiv 2502.10762): train short backbones with several, and compare hypervolumes.

Each of ``BETAS`` gets a soup of its own, ``DIR/beta-0.6`` say, whose backbones are trained for a fifth of the steps.
Merges of each are measured for the same preferences, on the same held-out prompts with the same noise. The
hypervolumes are above one point, the worst value of each reward among all merges of all betas, so that they can be
compared. The soup goes on with the beta whose hypervolume is the largest. Departure: Rewarded Soup (beta 1) is tried
too, because it was better in most of our measurements (docs/soup.md).
"""

from __future__ import annotations

import gc
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import BaseModel

from mmrl.config.loader import LoadedRecipe
from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.stored import Number, Text, read_as
from mmrl.planner.plan import changed
from mmrl.studies.soup.backbones import begun, planned, train_backbones, train_rest
from mmrl.studies.soup.evaluation import measuring
from mmrl.studies.soup.formulas import Point, hypervolume, merging_weights
from mmrl.studies.soup.record import AUTO, NAME, Soup, Trial, read_soup

BETAS = (0.6, 0.7, 0.8, 1.0)
"""The paper tries the first three. The last one is Rewarded Soup."""
PREFERRED = 0.7
"""Of betas whose hypervolumes are equal: the best one in the paper's comparison."""
SHARE = 5
"""A trial has one step of so many."""
POINTS = 5
"""Preferences for which a merge of each trial is measured."""
_MERGES = "merges.json"


class _Kept(BaseModel):
    """The schema of ``merges.json``: what the merges were made of, and their rewards, in units."""

    of: list[Text]
    rewards: list[tuple[Number, Number]]


def train_with_best_beta(
    loaded: LoadedRecipe, out: Path, rewards: Sequence[str] | None = None, *, resume: bool = False
) -> Soup | None:
    """``train_backbones`` with the best of ``BETAS``. ``soup.json`` says what was tried. With a constant learning rate
    the trial of the chosen beta is the beginning of its backbones, and is not trained again; a falling rate depends on
    the number of steps, so that they begin anew.

    Returns the soup; None where Ctrl-C has stopped it. Raises ``UserError`` as ``train_backbones`` does, and for more
    than two rewards.
    """
    soup = planned(loaded, out, PREFERRED, rewards)
    if len(soup.rewards) != 2:
        raise UserError(
            f"--beta {AUTO} compares two rewards, and this soup has {len(soup.rewards)} ({', '.join(soup.rewards)}); "
            "give --beta a number, or name two with --rewards"
        )
    if (out / NAME).exists():
        soup = _chosen_before(soup, resume=resume)
    else:
        tried = _tried(loaded, soup, resume=resume)
        if tried is None:
            return None
        soup = replace(soup, trials=tried, beta=max(tried, key=lambda one: (one[1], one[0] == PREFERRED))[0])
        soup.write()
    if loaded.recipe.optim.schedule == "constant":
        _take_over(soup)
    print(f"training goes on with beta {soup.beta:g}", file=sys.stderr)
    return train_rest(loaded, soup, resume=True)


def _chosen_before(soup: Soup, *, resume: bool) -> Soup:
    """The soup whose beta is chosen. Raises ``UserError``."""
    before = read_soup(soup.path)
    if resume and not before.trials:
        raise UserError(
            f"--beta {AUTO}: {soup.path} was begun with beta {before.beta:g}; continue with:\n{before.command}"
        )
    return begun(replace(soup, beta=before.beta), resume=resume)


def _tried(loaded: LoadedRecipe, soup: Soup, *, resume: bool) -> tuple[Trial, ...] | None:
    """Each of ``BETAS`` with the hypervolume of its merges; None where Ctrl-C has stopped a trial."""
    trials = [_trial(soup, beta) for beta in BETAS]
    began = any((path / NAME).exists() for path in trials)
    if not (resume and began):
        begun(soup, resume=resume)  # refuses a folder with something else, and one with nothing to resume
    recipe = loaded.recipe
    steps = -(-recipe.train.steps // SHARE)
    shorter = [f"train.steps={steps}"]
    if recipe.train.max_cpu_seconds is not None:
        shorter.append(f"train.max_cpu_seconds={recipe.train.max_cpu_seconds / SHARE:g}")
    short = replace(changed(loaded, shorter), overrides=(*loaded.overrides, *shorter))
    found: list[list[Point]] = []
    for beta, path in zip(BETAS, trials, strict=True):
        print(f"beta {beta:g}: a trial of {steps} steps", file=sys.stderr)
        made = train_backbones(short, path, beta, soup.rewards, resume=(path / NAME).exists())
        if made is None:
            words = ["mmrl", "soup", "train", *soup.recipe, *soup.overrides, "--out", str(soup.path), "--beta", AUTO]
            again = shlex.join([*words, "--rewards", ",".join(soup.rewards), "--resume"])
            print(f"continue the choice of beta with: {again}", file=sys.stderr)
            return None
        found.append(_merges(made))
    worst = [min(point[i] for points in found for point in points) for i in (0, 1)]
    volumes = [hypervolume(points, (worst[0], worst[1])) for points in found]
    for beta, volume in zip(BETAS, volumes, strict=True):
        print(f"beta {beta:g}: hypervolume {volume:.4g} after {steps} of {recipe.train.steps} steps", file=sys.stderr)
    return tuple(map(Trial, BETAS, volumes))


def _trial(soup: Soup, beta: float) -> Path:
    return soup.path / f"beta-{beta:g}"


def _merges(soup: Soup) -> list[Point]:
    """The held-out rewards, in units, of the trial's merges for ``POINTS`` preferences; measured once and kept."""
    kept, made_of = soup.path / _MERGES, [*soup.recipe, *soup.overrides]
    if kept.exists():
        said = read_as(_Kept, kept)
        if said.of == made_of:
            return said.rewards
    grid = [(k / (POINTS - 1), 1 - k / (POINTS - 1)) for k in range(POINTS)]
    with measuring(soup) as measure:
        rewards = [measure(mu, merging_weights(soup.matrix, mu)).rewards for mu in grid]
    found = [(soup.units[0] * a, soup.units[1] * b) for a, b in rewards]
    write_atomic(kept, json.dumps({"of": made_of, "preferences": grid, "rewards": found}, indent=1) + "\n")
    gc.collect()  # the model that was measured, before the next is loaded
    return found


def _take_over(soup: Soup) -> None:
    """Move the backbones of the chosen trial to the soup, where they go on."""
    for path in soup.backbones:
        trained = _trial(soup, soup.beta) / path.name
        if trained.exists() and not path.exists():
            trained.rename(path)

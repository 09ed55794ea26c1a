"""Train the backbones of a soup: the same recipe once for each reward, on another mix of all of them."""

from __future__ import annotations

import gc
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mmrl.config.evaluation_checks import label_of
from mmrl.config.loader import LoadedRecipe
from mmrl.config.masked_text import masked_override
from mmrl.config.schema import Recipe, Reward
from mmrl.core.errors import UserError
from mmrl.logging.rundir import has_begun
from mmrl.planner.plan import changed
from mmrl.runtime.start import train_to_end
from mmrl.studies.soup.record import NAME, Soup, read_soup


def train_backbones(
    loaded: LoadedRecipe, out: Path, beta: float, rewards: Sequence[str] | None = None, *, resume: bool = False
) -> Soup | None:
    """Train a backbone for each of ``rewards`` (labels; None takes all that have a weight) into ``out``, one after
    another. Returns the soup; None where Ctrl-C has stopped it.

    Backbone ``j`` is trained as the recipe says, with the weight ``B_ji`` times its own for each reward ``i``; other
    rewards keep their weights. All have the recipe's seed, and so the same prompts. ``resume`` leaves out those that
    are finished, and goes on with the one that is not. Raises ``UserError`` for a recipe that cannot be a soup, and as
    ``mmrl train`` does.
    """
    return train_rest(loaded, begun(planned(loaded, out, beta, rewards), resume=resume), resume=resume)


def planned(loaded: LoadedRecipe, out: Path, beta: float, rewards: Sequence[str] | None = None) -> Soup:
    """The soup that ``train_backbones`` trains, before anything is written. Raises ``UserError``."""
    chosen = _chosen(loaded.recipe, rewards)
    return Soup(
        out,
        tuple(_label(loaded.recipe.rewards[i]) for i in chosen),
        tuple(loaded.recipe.rewards[i].weight for i in chosen),
        beta,
        tuple(map(str, loaded.paths)),
        tuple(masked_override(text, loaded.tree.values) for text in loaded.overrides),
    )


def train_rest(loaded: LoadedRecipe, soup: Soup, *, resume: bool) -> Soup | None:
    """Train the backbones of ``soup`` that are not finished; with ``resume`` a run that has begun goes on. Returns and
    raises as ``train_backbones``."""
    chosen, matrix = _chosen(loaded.recipe, soup.rewards), soup.matrix.tolist()
    backbones = [
        changed(loaded, [f"rewards[{i}].weight={b * u:.12g}" for i, b, u in zip(chosen, row, soup.units, strict=True)])
        for row in matrix
    ]
    soup.write()
    for number, (one, path) in enumerate(zip(backbones, soup.backbones, strict=True), 1):
        if number in soup.finished:
            print(f"{path} is finished", file=sys.stderr)
            continue
        mix = " + ".join(f"{b:.3g} {name}" for b, name in zip(matrix[number - 1], soup.rewards, strict=True))
        print(f"backbone {number} of {len(backbones)}: {mix}", file=sys.stderr)
        if not train_to_end(one, path, resume=resume and has_begun(path)):
            print(f"continue the soup with: {soup.command}", file=sys.stderr)
            return None
        soup = soup.done(number)
        gc.collect()  # the model of this backbone, before the next is loaded
    return soup


def _label(reward: Reward) -> str:
    return label_of(reward.name, reward.label)


def _chosen(recipe: Recipe, rewards: Sequence[str] | None) -> list[int]:
    """The places of the soup's rewards in the recipe. Raises ``UserError``."""
    if recipe.algorithm.kind == "offline":
        raise UserError(
            f"algorithm.type: {recipe.algorithm.label} trains on given data, and weights of rewards change nothing; a "
            "soup needs an algorithm that samples, such as grpo or flow_grpo"
        )
    places = {_label(reward): i for i, reward in enumerate(recipe.rewards)}
    weighted = [label for label, i in places.items() if recipe.rewards[i].weight]
    asked = weighted if rewards is None else list(rewards)
    for label in asked:
        if label not in weighted:
            why = "has weight 0" if label in places else "is no reward of this recipe"
            raise UserError(f"--rewards: {label} {why}; it has {', '.join(weighted)}")
    if len(set(asked)) != len(asked):
        raise UserError(f"--rewards {','.join(asked)}: a reward is named twice; name each once")
    if len(asked) < 2:
        raise UserError(
            f"a soup needs at least two rewards with a weight, and this one has {', '.join(asked) or 'none'}; add one "
            "under rewards, or use mmrl train"
        )
    return [places[label] for label in asked]


def begun(soup: Soup, *, resume: bool) -> Soup:
    """The soup with what of it is finished. Raises ``UserError`` where another one, or something else, is there."""
    if not (soup.path / NAME).exists():
        if soup.path.exists() and (not soup.path.is_dir() or any(soup.path.iterdir())):
            raise UserError(f"{soup.path} is not empty and has no {NAME}; name another directory with --out")
        if resume:
            raise UserError(f"there is no soup in {soup.path} to resume; leave out --resume, or correct --out")
        return soup
    if not resume:
        raise UserError(f"{soup.path} already holds a soup; continue it with --resume, or use --out other")
    before = read_soup(soup.path)
    if (before.rewards, before.units, before.beta) != (soup.rewards, soup.units, soup.beta):
        had = f"beta {before.beta:g} and the rewards {_listed(before)}"
        raise UserError(
            f"--resume: {soup.path} has {had}, not beta {soup.beta:g} and {_listed(soup)}; continue with:\n"
            f"{before.command}"
        )
    # With other settings (more steps, say) a finished run goes on, or refuses them, as mmrl train --resume does.
    same = (before.recipe, before.overrides) == (soup.recipe, soup.overrides)
    return replace(soup, finished=before.finished if same else (), trials=before.trials)


def _listed(soup: Soup) -> str:
    return ", ".join(f"{label} (weight {unit:g})" for label, unit in zip(soup.rewards, soup.units, strict=True))

"""How far a merge goes beyond the backbones, away from the base model, chosen as the authors of Bone Soup do.

For each reward the model of it alone is merged with several shares ``a``, ``1 / (1 - a)`` times as far from the base
model, and the share is kept whose model has the most of this reward (github.com/andyclsr/BoneSoups, ppo/BoneSoups.py,
which takes prompts of the training split as well). Departure: no step (0) is tried too.
"""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path

from mmrl.data.loading import load_prompts
from mmrl.studies.soup.evaluation import reward_of
from mmrl.studies.soup.formulas import merging_weights
from mmrl.studies.soup.merging import found, opened
from mmrl.studies.soup.record import read_soup
from mmrl.training.evaluation import Evaluator

SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


def best_shares(folder: Path, checkpoint: str = "latest") -> list[float]:
    """For each reward of the soup in ``folder`` the best of ``SHARES``, measured with ``eval.samples`` samples of
    prompts spread over those of training. Raises ``UserError``."""
    soup = read_soup(folder)
    recipe, saved = found(soup, checkpoint)
    merged = opened(soup, recipe, saved, beyond=True)
    with closing(merged.context):
        every = load_prompts(recipe, "train")
        count = min(recipe.eval.samples, len(every))
        prompts = [every[n * len(every) // count] for n in range(count)]
        evaluator, best = Evaluator(merged.context, prompts), list[float]()
        for i, (label, unit) in enumerate(zip(soup.rewards, soup.units, strict=True)):
            alone = [float(i == j) for j in range(len(soup.rewards))]
            scores = list[float]()
            for share in SHARES:
                merged.weigh(merging_weights(soup.matrix, alone, beyond=[share] * len(alone)))
                scores.append(unit * reward_of(evaluator.score(recipe.eval.samples)[0], label))
            best.append(SHARES[scores.index(max(scores))])
            said = ", ".join(f"{share:g}: {score:.4f}" for share, score in zip(SHARES, scores, strict=True))
            print(f"beyond the backbones, {label} of {said}", file=sys.stderr)
    return best

"""Measure a recipe's judge on the samples of the recipe's model for held-out prompts, before any training.

    python benchmarks/judge_agreement.py --recipe scenes-judge --truth exact/correct --at-least 0.85
    python benchmarks/judge_agreement.py --recipe shapes-judge --truth shapes/success

``--truth`` is a measure of the recipe's ``eval.rewards``, right at 0.5 or more; ``--judge`` the label of its judge.
``--run`` takes the weights of a run's last checkpoint instead, whose samples the judge has been trained against. Exits
with 1 where the agreement is below ``--at-least``. (``mmrl judge`` measures a judge on cases of your own.)
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path

import torch

from mmrl.app.build import build, restored
from mmrl.config.loader import load_recipe
from mmrl.data.loading import load_prompts
from mmrl.rewards.judging.statistics import Confusions, auc, auc_interval, wilson
from mmrl.training.evaluation import Evaluator


def measure(scores: list[dict[str, float]], judge: str, truth: str) -> dict[str, float]:
    """Agreement, its interval, the area under the ROC curve with its own, and the share of right samples."""
    both = [(row[judge], row[truth] >= 0.5) for row in scores if judge in row and truth in row]
    said, right = [value for value, _ in both], [true for _, true in both]
    counts = Confusions.of([value >= 0.5 for value in said], right)
    area, positives = auc(said, right), sum(right)
    low, high = wilson(counts.both + counts.neither, counts.n)
    area_low, area_high = auc_interval(area, positives, counts.n - positives)
    found = {"samples": len(scores), "judged": counts.n, "agreement": counts.accuracy, "low": low, "high": high}
    found |= {"kappa": counts.kappa, "auc": area, "auc_low": area_low, "auc_high": area_high}
    found["right"] = positives / counts.n if counts.n else math.nan
    found["judged_right"] = (counts.both + counts.judge_alone) / counts.n if counts.n else math.nan
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", help="whose model is asked, as it is before training")
    parser.add_argument("--run", type=Path, help="a run, whose last weights are asked")
    parser.add_argument("--judge", default="judge", help="the label of the judge")
    parser.add_argument("--truth", default="exact/correct", help="what is true, among the recipe's eval.rewards")
    parser.add_argument("--samples", type=int, default=1024)
    parser.add_argument("--at-least", type=float, default=0.0)
    parser.add_argument("overrides", nargs="*", help="a.b=c")
    arguments = parser.parse_args()
    if (arguments.recipe is None) == (arguments.run is None):
        parser.error("give --recipe or --run, one of the two")
    torch.set_num_threads(1)
    if arguments.run is not None:
        run, _, _ = restored(arguments.run, "latest")
    else:
        run = build(load_recipe([arguments.recipe], arguments.overrides).recipe)
    _, made, failures = Evaluator(run, load_prompts(run.recipe, "heldout")).score(arguments.samples)
    found = measure(made.scores, arguments.judge, arguments.truth)
    print(json.dumps({"failures": len(failures), **found}))
    for failure in failures[:3]:
        print(f"failed: {failure.reason}", file=sys.stderr)
    sys.exit(0 if found["agreement"] >= arguments.at_least else 1)


if __name__ == "__main__":
    main()

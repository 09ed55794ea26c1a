"""The objective that a recipe names."""

from __future__ import annotations

import importlib

from mmrl.algorithms.objective import Objective
from mmrl.config.algorithms import with_length_limit
from mmrl.config.schema import Recipe


def load_objective(recipe: Recipe) -> Objective:
    """The objective of the recipe's algorithm, from the file of that name in ``mmrl.algorithms``."""
    module = importlib.import_module(f"mmrl.algorithms.{recipe.algorithm.type}")
    text = recipe.sampling.type == "text"
    settings = with_length_limit(recipe.algorithm, recipe.decoding.max_new_tokens) if text else recipe.algorithm
    return module.Objective(settings)

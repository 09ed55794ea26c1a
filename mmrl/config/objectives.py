"""The objective that a recipe names."""

from __future__ import annotations

from mmrl.algorithms.objective import Objective
from mmrl.algorithms.settings import with_length_limit
from mmrl.config.algorithms import find_algorithm
from mmrl.config.schema import Recipe


def load_objective(recipe: Recipe) -> Objective:
    """The objective of the recipe's algorithm, of its settings."""
    text = recipe.sampling.type == "text"
    settings = with_length_limit(recipe.algorithm, recipe.decoding.max_new_tokens) if text else recipe.algorithm
    return find_algorithm(recipe.algorithm.type).objective(settings)

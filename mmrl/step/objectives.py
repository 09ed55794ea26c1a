"""The objective that a recipe names."""

from __future__ import annotations

from mmrl.algorithms.forward_process import ForwardObjective
from mmrl.algorithms.objective import PROTOCOLS, Objective, lacking
from mmrl.config.algorithm_settings import with_length_limit
from mmrl.config.algorithms import AlgorithmError, find_algorithm, one_line
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.plugins.user_code import place_of


def load_objective(recipe: Recipe) -> Objective:
    """Construct the objective of the recipe's algorithm. Raises ``UserError`` if it does not follow its protocol."""
    text = recipe.sampling.type == "text"
    settings = with_length_limit(recipe.algorithm, recipe.response_tokens) if text else recipe.algorithm
    try:
        objective: Objective = find_algorithm(settings.type).objective(settings)
    except UserError:
        raise
    except Exception as error:
        raise AlgorithmError(
            f"constructing {settings.type} with its settings raised {one_line(error)} at "
            f"{place_of(error, settings.type.rpartition(':')[0])}; mend that line"
        ) from error
    if missing := lacking(objective):
        raise AlgorithmError(
            f"{settings.type} is of kind {objective.kind} and lacks {', '.join(missing)}; write what the protocol "
            f"{PROTOCOLS[objective.kind].__name__} of mmrl.algorithms.objective requires"
        )
    if recipe.train.updates_per_step == 1 and isinstance(objective, ForwardObjective):
        objective.in_one_update()
    return objective

"""The objective that a recipe names."""

from __future__ import annotations

from mmrl.algorithms.denoising import DenoisingObjective
from mmrl.algorithms.forward_process import ForwardObjective
from mmrl.algorithms.objective import PROTOCOLS, Objective, lacking
from mmrl.algorithms.policy_gradient import TokenObjective
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
    if recipe.teacher:
        if not isinstance(objective, TokenObjective | DenoisingObjective):
            raise UserError(
                f"algorithm.type: {settings.type} has a loss that no divergence from a teacher can be added to; derive "
                "its class from TokenObjective or DenoisingObjective, or remove teacher"
            )
        if any(teacher.model for teacher in recipe.teacher):
            objective.needs = objective.needs | {"teacher_kl"}
    if recipe.train.updates_per_step == 1 and isinstance(objective, ForwardObjective):
        objective.in_one_update()
    return objective

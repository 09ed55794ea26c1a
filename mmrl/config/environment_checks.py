"""What cannot be done with an environment, as ``key: why; the edit that fixes it``."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config.schema import Recipe
from mmrl.episodes.contract import REWARD


def of_environment(recipe: Recipe) -> Iterator[str]:
    """Contradictions of the section ``environment`` with others."""
    section = recipe.environment
    if section is None:
        listed = [("rewards", recipe.rewards), ("eval.rewards", recipe.eval.rewards)]
        for key, rewards in listed:
            for i, reward in enumerate(rewards):
                if reward.name == REWARD:
                    yield (
                        f"{key}[{i}].name: it is the reward of an environment, and the recipe has none; set "
                        "environment, or take another reward"
                    )
        return
    if recipe.sampling.type != "text":
        yield "environment: a model that makes pictures writes no turns; remove environment, or take a text pipeline"
        return
    if recipe.algorithm.trains_on in ("pairs", "responses"):
        yield (
            f"environment: {recipe.algorithm.type} trains on given responses and samples none; remove environment, or "
            "set algorithm.type to grpo"
        )
    if recipe.rollout.partial is not None:
        yield "rollout.partial: an episode is not cut and gone on with in a later step; remove it"
    if recipe.midway is not None:
        yield "midway: a part of an episode has no reward yet; remove it"
    if recipe.rollout.engine == "transformers" and (recipe.train.context_parallel > 1 or recipe.train.sharing > 1):
        yield (
            "environment: devices that share a row do not sample by turns; set rollout.engine to vllm, or remove "
            "train.context_parallel, train.tensor_parallel and train.pipeline_parallel"
        )
    if recipe.rollout.engine == "sglang" and recipe.pipeline.startswith("vlm/"):
        yield (
            "environment: SGLang's server cannot be asked for a turn behind pictures and sampled tokens; set "
            "rollout.engine to vllm"
        )
    if section.max_tokens < recipe.decoding.max_new_tokens:
        yield (
            f"environment.max_tokens: an episode may have {section.max_tokens} tokens and one turn "
            f"{recipe.decoding.max_new_tokens} (sampling.max_new_tokens); raise it"
        )

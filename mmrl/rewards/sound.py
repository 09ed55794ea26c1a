"""What a recipe's rewards can do with the sound of clips, checked before a model is loaded."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from mmrl.algorithms.modality_routing import routed, trained
from mmrl.config.schema import Recipe, Reward
from mmrl.core.reward_contract import Input


def problems_of_sound(
    recipe: Recipe, reads: Sequence[Collection[Input]], watched: Sequence[Collection[Input]] = (), *, sounds: bool
) -> Iterator[str]:
    """What is wrong with the rewards of ``recipe`` in a model that makes sound (``sounds``) or not, with the edit.

    ``reads``: the inputs of each reward of ``rewards``; ``watched``: of ``eval.rewards``, where they are known.
    """
    listed: list[tuple[str, Reward]] = [
        *((f"rewards[{i}]", reward) for i, reward in enumerate(recipe.rewards)),
        *((f"eval.rewards[{i}]", reward) for i, reward in enumerate(recipe.eval.rewards)),
    ]
    if not sounds:
        for (key, reward), inputs in zip(listed, [*reads, *watched], strict=False):
            if "audio" in inputs:
                yield f"{key} ({reward.name}): it reads 'audio', and {recipe.pipeline} makes none; take another reward"
            if reward.modality != "both":
                yield f"{key}.modality: {recipe.pipeline} makes no sound; remove modality"
        return
    heard = any(reward.weight and "audio" in inputs for reward, inputs in zip(recipe.rewards, reads, strict=False))
    sampled = recipe.algorithm.kind in ("policy_gradient", "forward_process")
    if sampled and not heard and "audio" in trained(recipe.rewards):
        yield (
            f"rewards: none reads the sound that {recipe.pipeline} makes, so that it would be trained by what the "
            "picture earns; add a reward that reads audio, or set modality: video for each reward"
        )
    if not sampled and (other := next((key for key, reward in listed if reward.modality != "both"), None)):
        yield f"{other}.modality: {recipe.algorithm.type} has no advantages; remove modality"
    elif routed(recipe.rewards) and not _one_each(recipe):
        yield (
            f"rewards: {recipe.algorithm.type} has one advantage for picture and sound, and not all rewards have the "
            "same modality; give all the same, or set algorithm={type: diffusion_nft, advantage_aggregation: each}"
        )
    elif routed(recipe.rewards) and recipe.algorithm.aggregates == "sum":
        yield (
            "algorithm.advantage_aggregation: picture and sound have an advantage each, of several rewards; "
            "set it to each"
        )


def _one_each(recipe: Recipe) -> bool:
    """Whether the algorithm can have an advantage for picture and one for sound: of separate rewards, without
    log-probs of recorded steps."""
    apart = "advantage_aggregation" in type(recipe.algorithm).model_fields
    return apart and recipe.algorithm.kind == "forward_process"

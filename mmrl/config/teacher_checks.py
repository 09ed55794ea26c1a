"""Contradictions of the section ``teacher`` with others."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config.evaluation_checks import label_of
from mmrl.config.schema import Recipe
from mmrl.config.teacher import Teacher

_OF_PICTURES = ("reverse", "velocity")


def teaches_alone(recipe: Recipe) -> bool:
    """Whether teachers are all that the recipe learns from: it has no reward, or none with a weight."""
    return bool(recipe.teacher) and not any(reward.weight for reward in recipe.rewards)


def of_teachers(recipe: Recipe) -> Iterator[str]:
    """Contradictions of the section ``teacher`` with others."""
    if not recipe.teacher:
        return
    text, kind = recipe.sampling.type == "text", recipe.algorithm.kind
    if kind != "policy_gradient":
        instead = "grpo" if text else "flow_grpo"
        yield (
            f"teacher: {recipe.algorithm.type} computes no divergence on what the student samples step by step; set "
            f"algorithm.type to {instead}, or remove teacher"
        )
    if text and recipe.decoding.picture is not None:
        yield "teacher: models that write pictures as tokens are not taught; remove it, or remove sampling.picture"
    if any(teacher.model for teacher in recipe.teacher) and (divides := recipe.train.divides):
        yield (
            f"{divides[0]}: a teacher in the process computes whole rows with whole weights; set it to {divides[1]}, "
            "or remove teacher (one that is a reward may stay)"
        )
    if teaches_alone(recipe):
        for key in ("drop_zero_std_groups", "dynamic_sampling"):
            if getattr(recipe.algorithm, key, False):
                yield (
                    f"algorithm.{key}: without a reward no group has an advantage; remove it, or give a reward a weight"
                )
    for n, teacher in enumerate(recipe.teacher):
        yield from (f"teacher[{n}].{line}" for line in _of_one(recipe, teacher, text=text))


def of_self_teaching(recipe: Recipe) -> Iterator[str]:
    """Contradictions of an algorithm by which the policy teaches itself."""
    kind, instead = recipe.algorithm.type, "set algorithm.type to grpo"
    if not recipe.algorithm.teaches_itself or recipe.sampling.type != "text":
        return
    without = {
        "environment": f"{kind} puts a hint behind the one message that is answered; remove it, or {instead}",
        "sampling.picture": f"{kind} has no hints for pictures that are written as tokens; {instead}",
    }
    yield from recipe.in_vain(without)
    if divides := recipe.train.divides:
        key, value = divides
        yield f"{key}: the teacher of {kind} computes whole rows with whole weights; set it to {value}, or {instead}"


def _of_one(recipe: Recipe, teacher: Teacher, *, text: bool) -> Iterator[str]:
    labels, lora = recipe.data.labels, recipe.model.lora
    if teacher.prompts is not None and teacher.prompts not in labels:
        has = f"its sources are {', '.join(labels)}; write one of them" if labels else "it is empty; name its sources"
        yield f"prompts: {teacher.prompts!r} is no source of data.mixture: {has}, or remove the key"
    if (teacher.model is None) == (teacher.reward is None):
        has = "has neither model nor reward; write one" if teacher.model is None else "has model and reward; remove one"
        yield f"model: a teacher is a model or a reward, and this one {has} of the two"
    if teacher.reward is not None:
        yield from _of_reward(recipe, teacher, teacher.reward, text=text)
    if text and teacher.divergence == "velocity":
        yield "divergence: velocity is of pictures, and text has tokens; set it to reverse, forward, mixed or sampled"
    elif not text and teacher.divergence not in _OF_PICTURES:
        yield (
            f"divergence: {teacher.divergence}: the two Gaussians of a step have one spread, so all their divergences "
            "are one; set it to reverse or velocity"
        )
    if teacher.is_adapter and lora is None:
        yield "model: it is an adapter, and the student trains all weights; set model.lora, or name a whole model"


def _of_reward(recipe: Recipe, teacher: Teacher, label: str, *, text: bool) -> Iterator[str]:
    """Contradictions of a teacher that is the reward ``label``."""
    if not text or recipe.pipeline.startswith("vlm/"):
        what = "reads pictures" if text else "makes pictures"
        yield f"reward: {recipe.pipeline} {what}, and a reward reads tokens alone; name a model in place of it"
        return
    if teacher.divergence != "sampled":
        yield (
            f"divergence: {teacher.divergence} needs the whole vocabulary, and a reward says the log-prob of one "
            "token; set it to sampled, or name a model in place of reward"
        )
    labels = [label_of(reward.name, reward.label) for reward in recipe.rewards]
    if label not in labels:
        made = f"add {{name: teacher, label: {label}, weight: 0, options: {{path: MODEL}}}} to rewards"
        has = f"they are {', '.join(labels)}; write one of them" if labels else "there are none"
        yield f"reward: {label!r} is no label of rewards: {has}, or {made}"
        return
    n = labels.index(label)
    if weight := recipe.rewards[n].weight:
        yield f"reward: rewards[{n}] has weight {weight:g}, and a log-prob is no reward; set its weight to 0"

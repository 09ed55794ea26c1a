"""The section ``teacher``: models whose distance is a loss on the student's own samples. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import PositiveFloat

from mmrl.config.adapters import CONFIG
from mmrl.config.section import Section

if TYPE_CHECKING:
    from mmrl.config.schema import Recipe

MOST_TEACHERS = 16
Divergence = Literal["reverse", "forward", "mixed", "sampled", "velocity"]
_OF_PICTURES = ("reverse", "velocity")


class Teacher(Section):
    """A frozen model that says of what the student samples how it would have gone on (on-policy distillation)."""

    model: str
    """A LoRA folder that peft or ``mmrl export --what lora`` wrote, which is swapped into the student's own adapter and
    needs no second model; or, for text, a model with the student's vocabulary."""
    weight: PositiveFloat = 1.0
    """Its divergence times this is added to the algorithm's loss, which averages it as it does its own."""
    divergence: Divergence = "reverse"
    """Text, per token and over the whole vocabulary: ``reverse``, KL(student, teacher); ``forward``, KL(teacher,
    student); ``mixed``, half of each (NeMo-RL's 0.5). ``sampled``: the reverse one, estimated from the sampled token
    alone. Pictures: ``reverse``, the KL of each recorded step's two Gaussians; ``velocity``, the squared distance of
    the two velocities there."""
    prompts: str | None = None
    """The label of a source of data.mixture, whose prompts it teaches; None teaches all."""

    @property
    def is_adapter(self) -> bool:
        """Whether it is a LoRA of the student's base, and not a model of its own."""
        return (Path(self.model) / CONFIG).is_file()


def as_list(value: object) -> object:
    """One teacher as a list of it."""
    return [] if value is None else value if isinstance(value, list | tuple) else [value]


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
    train = recipe.train
    if train.backend != "replicated" or train.width > 1:
        key = "train.backend" if train.backend != "replicated" else "train.context_parallel"
        value = "replicated" if train.backend != "replicated" else "1"
        yield f"{key}: a teacher computes whole rows with whole weights; set it to {value}, or remove teacher"
    if teaches_alone(recipe):
        for key in ("drop_zero_std_groups", "dynamic_sampling"):
            if getattr(recipe.algorithm, key, False):
                yield (
                    f"algorithm.{key}: without a reward no group has an advantage; remove it, or give a reward a weight"
                )
    for n, teacher in enumerate(recipe.teacher):
        yield from (f"teacher[{n}].{line}" for line in _of_one(recipe, teacher, text=text))


def _of_one(recipe: Recipe, teacher: Teacher, *, text: bool) -> Iterator[str]:
    labels, lora = recipe.data.labels, recipe.model.lora
    if teacher.prompts is not None and teacher.prompts not in labels:
        has = f"its sources are {', '.join(labels)}; write one of them" if labels else "it is empty; name its sources"
        yield f"prompts: {teacher.prompts!r} is no source of data.mixture: {has}, or remove the key"
    if text and teacher.divergence == "velocity":
        yield "divergence: velocity is of pictures, and text has tokens; set it to reverse, forward, mixed or sampled"
    elif not text and teacher.divergence not in _OF_PICTURES:
        yield (
            f"divergence: {teacher.divergence}: the two Gaussians of a step have one spread, so all their divergences "
            "are one; set it to reverse or velocity"
        )
    if teacher.is_adapter and lora is None:
        yield "model: it is an adapter, and the student trains all weights; set model.lora, or name a whole model"
    elif not teacher.is_adapter and not text:
        yield (
            f"model: {teacher.model} has no {CONFIG}, and only a LoRA of the student's base teaches a model that makes "
            "pictures; name the folder that mmrl export --what lora wrote"
        )

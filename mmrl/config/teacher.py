"""The section ``teacher``: models whose distance is a loss on the student's own samples. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import PositiveFloat

from mmrl.config.adapters import CONFIG
from mmrl.config.section import Section

MOST_TEACHERS = 16
Divergence = Literal["reverse", "forward", "mixed", "sampled", "velocity"]


class Teacher(Section):
    """A frozen model that says of what the student samples how it would have gone on (on-policy distillation)."""

    model: str | None = None
    """A LoRA folder that peft or ``mmrl export --what lora`` wrote, which is swapped into the student's own adapter and
    needs no second model; or, for text, a model with the student's vocabulary."""
    reward: str | None = None
    """In place of ``model``, for text and ``sampled``: the label of a reward of weight 0 that says log-probs of tokens
    (``teacher``). It computes where rewards do, on devices of its own if there are some."""
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
        return self.model is not None and (Path(self.model) / CONFIG).is_file()


def as_list(value: object) -> object:
    """One teacher as a list of it."""
    return [] if value is None else value if isinstance(value, list | tuple) else [value]

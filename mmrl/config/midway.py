"""The section ``midway`` of a recipe: rewards that prune a group while it is sampled. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmrl.config.sampling import Sampling
from mmrl.config.section import Count, Many, Section


class Midway(Section):
    """Begin more samples of a prompt than are trained on, score their predicted results after some denoising steps, and
    finish those that are kept (docs/midway.md)."""

    step: Count
    """Denoising steps before the results are predicted and scored."""
    group_size: Many
    """Samples of each prompt that are begun; train.group_size of them are finished and trained on."""
    keep: Literal["spread", "extremes"] = "spread"
    """``spread`` keeps those whose rewards have the largest variance (PODS, arXiv 2504.13818); ``extremes`` the best
    half and the worst half of a group."""
    rewards: list[str] = Field(default_factory=list)
    """Labels of the recipe's rewards that score the predicted results; empty takes all whose weight is not 0."""

    def records_before(self, sampling: Sampling) -> bool:
        """Whether a policy gradient may record a denoising step before the group is pruned, or the next one, whose
        velocity is known then."""
        return (sampling.window.first if sampling.window else 0) <= self.step

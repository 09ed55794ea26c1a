"""The section ``midway`` of a recipe: rewards that prune a group while it is sampled. Imports no torch."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mmrl.config.sampling import Sampling, TextSampling
from mmrl.config.section import Count, Many, Section


class Midway(Section):
    """Begin more samples of a prompt than are trained on, score them in the middle of sampling, and finish those that
    are kept (docs/midway.md)."""

    step: Count | None = None
    """Pictures and clips, where it or ``draft_steps`` is required: denoising steps before the results are predicted and
    scored."""
    draft_steps: Count | None = None
    """In place of ``step``: each begun sample is a draft, drawn whole in so many denoising steps and scored; what is
    kept is drawn again with all steps from the same noise (Sol-RL, arXiv 2604.06916; forward-process objectives)."""
    tokens: Count | None = None
    """Text, required there: tokens of each response before it is scored; a response that ended before is scored as it
    is."""
    group_size: Many
    """Samples of each prompt that are begun; train.group_size of them are finished and trained on."""
    branches: Many = 1
    """Continuations of each kept sample, with other noise or tokens: train.group_size / branches samples are kept, and
    branches of one share their beginning. 1 only finishes them. Policy gradients only."""
    keep: Literal["spread", "extremes", "best"] = "spread"
    """``spread`` keeps those whose rewards have the largest variance (PODS, arXiv 2504.13818); ``extremes`` the best
    half and the worst half of a group (Sol-RL, of 96 drafts 12 each); ``best`` those with the highest rewards."""
    rewards: list[str] = Field(default_factory=list)
    """Labels of the recipe's rewards that score the begun samples; empty takes all whose weight is not 0."""

    @property
    def at(self) -> int:
        """Denoising steps, or tokens, before the samples are scored."""
        found = self.step or self.tokens or self.draft_steps
        assert found is not None  # the recipe's checks refuse others
        return found

    def records_before(self, sampling: Sampling | TextSampling) -> bool:
        """Whether a policy gradient may record a denoising step before the group is pruned, or the next one, whose
        velocity is known then. Of text every log-prob is recomputed in the update anyway."""
        if sampling.type == "text" or self.draft_steps is not None:
            return False
        return (sampling.window.first if sampling.window else 0) <= self.at

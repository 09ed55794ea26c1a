"""What every section of a recipe is, and the ranges of its numbers; what every algorithm's section is."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

_DURATION = re.compile(r"(?:([\d.]+) *h)? *(?:([\d.]+) *m(?:in)?)? *(?:([\d.]+) *s)?")


def seconds_of(value: Any) -> Any:
    """``90s``, ``10m``, ``1h 30m`` as seconds; anything else as it is."""
    found = _DURATION.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None or not any(found.groups()):
        return value
    try:
        return sum(float(n) * unit for n, unit in zip(found.groups(), (3600, 60, 1), strict=True) if n is not None)
    except ValueError:  # 1.2.3s
        return value


Duration = Annotated[float, Field(ge=0), BeforeValidator(seconds_of)]
"""Seconds, or a text with units: ``90s``, ``10m``, ``1h 30m``."""

MOST_REWARDS = 64
Count = Annotated[int, Field(gt=0, le=10**9)]
"""How often, how many tokens, pixels: past this it is a slip, and what is computed from it takes for ever."""
Many = Annotated[int, Field(gt=0, le=10**6)]
"""Samples and prompts of a step, which are listed one by one."""
Few = Annotated[int, Field(gt=0, le=4096)]
"""Processes, threads and devices."""
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Decay = Annotated[float, Field(ge=0, lt=1)]
Spread = Literal["group", "batch", "none"]
"""What centred rewards are divided by: the standard deviation of their group, of the batch, or nothing."""
Kind = Literal["policy_gradient", "forward_process", "pathwise", "offline"]
"""What an update is made of: recorded actions, clean results noised afresh, a differentiable reward, or
given pairs."""
AdvantageAggregation = Literal["sum", "each", "gdpo"]
"""How several rewards become one advantage: of their weighted sum; one of each reward, then their weighted sum
(MixGRPO, arXiv 2507.21802), so that a reward that varies much does not drown the others; or the same, standardised over
the batch again (GDPO, arXiv 2601.05242)."""


TrainsOn = Literal["denoising", "tokens", "pairs", "picture_pairs"]


class Section(BaseModel):
    """A part of a recipe: immutable, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)


class AlgorithmSection(Section):
    """What every algorithm says of itself, beside its settings (abstract)."""

    trains_on: ClassVar[TrainsOn] = "denoising"
    """What a step is made of: denoised pictures and clips, sampled text, or pairs of a better and a worse text or
    picture."""
    kind: ClassVar[Kind] = "policy_gradient"
    uses_token_rewards: ClassVar[bool] = False
    """Rewards of single tokens count; elsewhere they would be lost."""
    whole: ClassVar[Literal["group", "pair"] | None] = None
    """What an update must see in one slice."""

    @property
    def compares_group(self) -> bool:
        """Whether a sample is judged against the others of its prompt, so that a group of one teaches nothing."""
        return True

    def loss_guidance(self, sampling: float) -> float:
        """The guidance scale of the predictions that train; ``sampling`` is sampling.guidance_scale."""
        return sampling

"""SDPO: the policy that is shown feedback teaches itself, token by token (Hübotter et al. 2026, arXiv 2601.20802).

    D_t = (1 - alpha) KL(p, m) + alpha KL(q, m),   m = (1 - alpha) p + alpha q;   alpha 0: KL(q, p), 1: KL(p, q)
    L = sum_t min(ratio, ratio_cap) D_t / number of tokens with a hint

``p`` is the policy's distribution of a response's next token. ``q`` is that of the same response, behind a prompt
with a hint, by a moving average of the policy: a right response of the same group (``success``), without its thoughts,
or where there is none the feedback that rewards give as a text (``mmrl.core.reward_contract``). A response without a
hint does not train, and no advantage is read. The gradient goes through ``p`` alone. Two forwards are computed, the
teacher's without a graph.

Departs: the divergence is over the whole vocabulary; the authors' code takes the policy's 100 likeliest tokens and one
for the rest. The mean is over all tokens of the update that have a hint; their code divides each micro-batch by its
own, so that with their micro-batch of one response a long one counts no more than a short one
(``seq_mean_token_mean``) and one without a hint lowers the mean. A prompt with a hint that is too long is left out
and counted; theirs is cut. The words of a hint are not theirs. With LoRA the average is that of the adapter. Their
other teacher, a mixture with the first policy (``trust-region``), is not built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import ClassVar, Literal

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from mmrl.algorithms.policy_gradient import LOG_RATIO_BOUND, Surrogate, TokenObjective
from mmrl.config.algorithm_settings import AggregationMode, TokenSettings
from mmrl.config.sampling import Sampling, TextSampling
from mmrl.config.section import Fraction

COPY = "teacher"
"""The name of the policy's copy that teaches."""


class SDPOSettings(TokenSettings):
    """Self-distillation from feedback (Hübotter et al. 2026, arXiv 2601.20802)."""

    teaches_itself: ClassVar[bool] = True
    trains_few: ClassVar[bool] = True
    takes_older_samples: ClassVar[bool] = False
    aggregation: AggregationMode = "token_mean"
    alpha: Fraction = 0.5
    """Which divergence: 0 KL(teacher, policy), 1 KL(policy, teacher), between them a Jensen-Shannon divergence."""
    vocabulary: Literal["whole", "sampled"] = "whole"
    """``sampled`` estimates the divergence of alpha 1 from the sampled token alone."""
    teacher_rate: Fraction = 0.05
    """How far the teacher's weights move to the policy's after each step; 0 keeps the first policy, 1 the latest."""
    ratio_cap: PositiveFloat | None = 2.0
    """Limit of the ratio to the policy that sampled, by which a token counts; null has every token count once."""
    success: float = 0.5
    """The reward from which on a response is right, and may be shown to the teacher of others of its prompt."""
    feedback: bool = True
    """Show the feedback of rewards for a response whose group has no other right one."""
    keep_thoughts: bool = False
    """Show a right response with its thoughts."""
    max_prompt_tokens: PositiveInt = 10240
    """The most tokens of a prompt with its hint; a response whose hint makes it longer does not train."""
    solution_text: str = "A correct answer to this is: {answer}"
    """What the prompt's last message ends with for the teacher, where there is a right response: ``{answer}``."""
    feedback_text: str = "An earlier answer was wrong, and this was said about it: {feedback}"
    """The same where there is feedback: ``{feedback}``."""
    task_text: str = "Now answer what was asked correctly."
    """What is behind either. There is an empty line before each part."""

    @property
    def compares_group(self) -> bool:
        return not self.feedback

    def conflicts(self, sampling: Sampling | TextSampling) -> Iterator[str]:
        yield from super().conflicts(sampling)
        if self.vocabulary == "sampled" and self.alpha != 1:
            yield (
                f"algorithm.alpha: {self.alpha:g}: from a sampled token only the divergence of alpha 1 is estimated; "
                "set it to 1, or algorithm.vocabulary to whole"
            )
        for key, mark in (("solution_text", "{answer}"), ("feedback_text", "{feedback}")):
            if mark not in getattr(self, key):
                yield f"algorithm.{key}: it shows the teacher nothing; write {mark} into it"

    def hint(self, answer: str | None, feedback: str | None) -> str:
        """What is put behind a prompt's last message: with a right ``answer``, else with ``feedback``; empty without
        either. What they spell is not replaced again."""
        if answer is not None:
            shown = self.solution_text.replace("{answer}", answer)
        elif feedback is not None:
            shown = self.feedback_text.replace("{feedback}", feedback)
        else:
            return ""
        return f"\n\n{shown}\n\n{self.task_text}"


class SDPO(TokenObjective):
    """Final class; see ``mmrl.algorithms.objective.PolicyGradient``. Advantages are those of groups, and not read."""

    def __init__(self, settings: SDPOSettings) -> None:
        super().__init__(settings, settings.aggregation)
        self.cap, self._rate = settings.ratio_cap, settings.teacher_rate
        self.needs = self.needs | {"self_divergence"}

    @property
    def copies(self) -> Mapping[str, Callable[[int], float]]:
        """The copy that teaches, and its decay after step ``n``."""
        return {COPY: lambda step: 1 - self._rate}

    def surrogate(self, log_probs: Tensor, log_ratio: Tensor, advantages: Tensor, mask: Tensor) -> Surrogate:
        ratio, never = log_ratio.exp(), torch.zeros_like(log_probs, dtype=torch.bool)
        high = never if self.cap is None else ratio.detach() > self.cap
        return Surrogate(0 * log_probs, ratio, never, high)

    def terms(
        self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], inside: Tensor
    ) -> dict[str, tuple[float, Tensor]]:
        """``new`` has ``self_divergence`` ``[B, T]`` too, with its graph."""
        found = torch.where(inside, new["self_divergence"], 0.0)
        counts = torch.where(inside, old["importance"], 0.0) if "importance" in old else torch.ones_like(found)
        if self.cap is not None:
            apart = torch.where(inside, new["log_probs"] - old["log_probs"], 0.0).detach()
            counts = counts * apart.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=self.cap)
        own = {"self_teacher/divergence": (0.0, found), "self_teacher/loss": (1.0, counts * found)}
        return super().terms(new, old, inside) | own

"""SFT: the likelihood of given responses, token by token.

    L = - sum over responses and their tokens of log policy(token | prompt, earlier tokens) / number of tokens

The tokens are those of the whole update, on all controllers, so that the split into micro-batches does not change the
gradient. Prompts are not trained on. It equals the loss of transformers' causal models with prompt labels of -100, and
that of TRL's SFTTrainer on prompt-completion data.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from mmrl.algorithms.objective import Loss, OfflineObjective
from mmrl.config.algorithm_settings import ResponseSettings


class SFTSettings(ResponseSettings):
    """Supervised fine-tuning on given responses."""


class SFT(OfflineObjective):
    """Final class; see ``mmrl.algorithms.objective.Offline``. ``B`` is a number of responses."""

    needs = frozenset({"completion_log_probs"})

    def __init__(self, settings: SFTSettings) -> None:
        self.settings = settings

    def loss_denominator(self, weights: Tensor, lengths: Tensor) -> float:
        """The number of tokens of the responses that count, end-of-sequence tokens included."""
        return float((weights.double() * lengths.double()).sum())

    def loss(self, new: Mapping[str, Tensor], old: Mapping[str, Tensor], total: float) -> Loss:
        """``new``: completion_log_probs ``[B]``, summed over the response's tokens; ``old``: weights ``[B]`` (0 leaves
        a response out). ``sft/log_prob`` is the mean log-prob of a token, which rises as the loss falls."""
        log_probs = (new["completion_log_probs"] * old["weights"]).sum()
        return Loss(
            value=-log_probs / total,
            sums={"policy/loss": -log_probs.detach(), "sft/log_prob": log_probs.detach()},
            maxima={},
        )

"""Given responses, one a prompt: tokens and log-probs.

A prompt carries its response in ``meta``, by the columns of TRL's prompt-completion data: ``completion``, a text or a
list of messages that ends with the assistant's.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from mmrl.pipelines.protocol import Weights
from mmrl.text.given import GivenTexts, given_text
from mmrl.trajectory import Prompt, Trajectory


class Responses(GivenTexts):
    """Final class. The responses of a run of ``pipeline``, which calls it. Log-probs are among all tokens, as in
    transformers' own loss: a model that has not seen many answers must learn not to draw those that stand for
    pictures."""

    every_token = True

    def texts(self, prompt: Prompt) -> Mapping[str, str]:
        column = self.columns["completion"]
        return {"completion": given_text(prompt, column, [column])}

    def recorded(self, trajectory: Trajectory) -> dict[str, Tensor]:
        return {}

    def sizes(self, trajectory: Trajectory) -> list[int]:
        """The tokens of each response, its end among them."""
        return [self.pipeline.features.ref(self.key(slot.prompt)).shapes["completion"][0] for slot in trajectory.slots]

    def compare(self, trajectory: Trajectory, needs: frozenset[str], weights: Weights) -> dict[str, Tensor]:
        """What is needed of completion_log_probs, summed over the response and its end, and the same of the reference
        without a graph: ``[B]`` float32 each."""
        rows = self.rows(trajectory.slots)
        out = self.by_name("log_probs", self.log_probs(rows))
        if "reference_completion_log_probs" in needs:
            with torch.no_grad(), weights("reference"):
                out |= {f"reference_{k}": v for k, v in self.by_name("log_probs", self.log_probs(rows)).items()}
        return out

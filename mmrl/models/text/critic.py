"""A critic for tokens: the policy's architecture with one number per position instead of the vocabulary."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from mmrl.models.text.base_model import base_model, has_adapter, peft_model


class Critic(nn.Module):
    """Final class. ``body`` is a copy of the policy's transformer as the run begins; all its weights train.

    The head starts at zero, so that every first value is 0.
    """

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        whole = copy.deepcopy(policy)
        # adapters start without effect
        model = base_model(peft_model(whole).unload() if has_adapter(whole) else whole)
        writes = model.config.model_type == "emu3"  # the values need nothing of what decodes its pictures
        self.body: nn.Module = model.get_submodule("model.text_model") if writes else model.base_model
        self.body.eval()
        self.body.requires_grad_(True).float()
        self.head = nn.Linear(model.config.get_text_config().hidden_size, 1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, **inputs: Tensor) -> Tensor:
        """Values ``[B, L]`` float32 of the state after each position of the input."""
        hidden = self.body(**inputs, use_cache=False).last_hidden_state
        with torch.autocast(hidden.device.type, enabled=False):
            return self.head(hidden.to(self.head.weight.dtype)).squeeze(-1).float()

"""The transformers model and the adapter in a text policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:  # slow to import
    from peft import PeftModel
    from transformers import PreTrainedModel


def base_model(policy: nn.Module) -> PreTrainedModel:
    """The transformers model itself: of a policy with an adapter, the model that the adapter is added to."""
    from transformers import PreTrainedModel

    if isinstance(policy, PreTrainedModel):
        return policy
    model = peft_model(policy).get_base_model()
    assert isinstance(model, PreTrainedModel)
    return model


def has_adapter(policy: nn.Module) -> bool:
    """Whether ``policy`` is a model with an adapter."""
    return hasattr(policy, "peft_config")


def peft_model(policy: nn.Module) -> PeftModel:
    """``policy``, which has an adapter."""
    from peft import PeftModel

    assert isinstance(policy, PeftModel)
    return policy

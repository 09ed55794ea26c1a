"""The section ``model`` of a recipe. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PositiveFloat, model_validator

from mmrl.config.adapters import with_adapters_settings
from mmrl.config.chat_template import checked
from mmrl.config.dtype import Dtype
from mmrl.config.section import Count, Section

Quantize = Literal["int8", "fp8", "nf4"]


class Lora(Section):
    """Low-rank adapters on the policy's linear layers; the base weights stay frozen."""

    rank: Count = 32
    """LoRA rank."""
    alpha: PositiveFloat = 64.0
    """An adapter's output is multiplied by alpha / rank."""
    targets: list[str] | None = None
    """Names of the modules that get an adapter, or ``[all-linear]``; None takes the pipeline's list."""
    init: Literal["gaussian", "default"] = "gaussian"
    """Of the first matrix: peft's ``gaussian``, or its default (Kaiming). The second is 0."""
    path: str | None = None
    """A folder that peft wrote, or for pictures a LoRA file of diffusers, kohya and others: training goes on with that
    adapter, with its rank, alpha and targets. The reference is then the model with the adapter as it was loaded."""

    @model_validator(mode="before")
    @classmethod
    def _as_saved(cls, values: object) -> object:
        return with_adapters_settings(values) if isinstance(values, Mapping) else values


class Model(Section):
    left_to_plan = ("gradient_checkpointing", "offload")

    path: str
    """A local directory (relative to the recipe's folder), a hub name, or ``package:NAME`` of ``mmrl fetch``."""
    dtype: Dtype = "float32"
    """Dtype of the frozen weights, and of matrix products with and without LoRA. Trainable weights, step maths and
    log-probs are always float32. ``auto`` is bfloat16 if the device has instructions for it, else float32; it is
    resolved when the recipe is read."""
    lora: Lora | None = None
    """None trains all weights of the policy."""
    quantize: Quantize | None = None
    """With LoRA: keep the frozen linear layers of the blocks in 8 bits (``int8`` or ``fp8``, by torchao) or 4 (``nf4``,
    by bitsandbytes); of pictures those of the text encoders, too. They take a half, or little more than a quarter, of
    bfloat16's memory, and more time."""
    gradient_checkpointing: bool = False
    """Compute activations again in the backward pass: less memory, more time. ``auto``, or no value: on a GPU where the
    plan is faster with it, or does not fit without it."""
    freeze: list[str] = Field(default_factory=list)
    """Names of modules (``visual``) to freeze; with LoRA all base weights are frozen."""
    chat_template: Annotated[str, AfterValidator(checked)] | None = None
    """Text: a Jinja template, or a file with one, in place of the checkpoint's. Exports keep it."""
    min_pixels: Count | None = None
    """A picture in a prompt with fewer pixels is made larger (Qwen-VL); None keeps the checkpoint's limit."""
    max_pixels: Count | None = None
    """A picture in a prompt with more pixels is made smaller (Qwen-VL); None keeps the checkpoint's limit."""
    offload: bool = True
    """Move text encoders and VAE off the accelerator while they are idle (no effect on a CPU). ``auto``, or no value:
    true, but on a GPU where the plan finds room for them."""

    @property
    def continues_adapter(self) -> bool:
        """Whether training begins with a saved adapter."""
        return self.lora is not None and self.lora.path is not None

    def contradictions(self) -> Iterator[str]:
        if self.dtype == "float16":
            yield (
                "model.dtype: the gradients of float16 underflow without loss scaling, which is not built; "
                "use bfloat16, or float32"
            )
        if self.quantize is not None and self.lora is None:
            yield (
                f"model.quantize: all weights train, and weights in {self.quantize} cannot; set "
                "model.lora={rank: 32}, or remove model.quantize"
            )

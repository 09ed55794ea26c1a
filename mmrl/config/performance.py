"""The section ``performance`` of a recipe: settings for speed and for memory on the device."""

from __future__ import annotations

from typing import Literal

from mmrl.config.section import Section

TEXT_ATTENTION = ("eager", "sdpa", "flash_attention_2")
"""As transformers calls them (``attn_implementation``)."""
PICTURE_ATTENTION = (
    *("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math"),
    *("flash", "_flash_3", "xformers"),
)
"""As diffusers calls them (``set_attention_backend``): those that have gradients and load no code from the hub."""

NEEDS_HALF = ("flash_attention_2", "flash", "_flash_3", "_native_flash", "_native_cudnn")
"""Of both, those whose kernels take no float32."""


class Performance(Section):
    """Speed and memory of the same work (docs/gpus.md). What a device lacks is refused before a model is loaded."""

    tf32: bool | None = None
    """CUDA: ``true`` computes float32 products of matrices and convolutions with TensorFloat-32 (10 bits of mantissa),
    ``false`` neither. None leaves torch's choice: convolutions only. Log-probs and SDE steps stay float32: they have no
    products of matrices."""
    optimizer: Literal["adamw", "adamw_fused", "adamw_8bit"] = "adamw"
    """``adamw_fused``: torch's fused kernel. ``adamw_8bit``: moments in 8 bits (bitsandbytes), a quarter of the memory;
    the weights take other values for it."""
    attention: str | None = None
    """What computes attention in the model that trains. Text, as transformers names it: ``eager``, ``sdpa``,
    ``flash_attention_2``. Pictures and clips, as diffusers names it: ``native``, ``_native_flash``, ``_native_cudnn``,
    ``_native_efficient``, ``_native_math``, ``flash``, ``_flash_3``, ``xformers``. None leaves the library's choice."""
    offload_optimizer: bool = False
    """The optimizer's state lives in page-locked memory of the host, and comes to the device for each update (no effect
    on a CPU)."""
    offload_reference: bool = False
    """So does the reference where it is a copy of the weights: it comes for the slices that need it and goes before the
    update (no effect on a CPU). With LoRA the reference is the base model, of which there is one."""
    compile: bool = False
    """Pictures and clips: compile the repeated blocks of what predicts (torch.compile), for sampling and training
    alike."""

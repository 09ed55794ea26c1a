"""The section ``performance`` of a recipe: settings for speed and for memory on the device."""

from __future__ import annotations

from typing import Literal

from mmrl.config.section import Section

TEXT_ATTENTION = ("eager", "sdpa", "flash_attention_2")
"""Names of transformers (``attn_implementation``)."""
PICTURE_ATTENTION = (
    *("native", "_native_cudnn", "_native_efficient", "_native_flash", "_native_math"),
    *("flash", "_flash_3", "xformers"),
)
"""Names of diffusers (``set_attention_backend``): those that have gradients and load no code from the hub."""

NEEDS_HALF = ("flash_attention_2", "flash", "_flash_3", "_native_flash", "_native_cudnn")
"""The names of both whose kernels do not support float32."""


class Performance(Section):
    """Speed and memory (docs/gpus.md). What the device does not support is refused before a model is loaded."""

    left_to_plan = ("compile",)

    tf32: bool | None = None
    """CUDA: ``true`` computes float32 matrix products and convolutions in TensorFloat-32 (10 bits of mantissa),
    ``false`` neither. None is ``true`` beside ``model.dtype: bfloat16``, where the GPU has it; else it keeps torch's
    default: convolutions only. Log-probs and SDE steps stay float32: they have no matrix products."""
    optimizer: Literal["auto", "adamw", "adamw_fused", "adamw_8bit"] = "auto"
    """``adamw_fused``: torch's fused kernel; ``auto`` takes it on CUDA, else ``adamw``. ``adamw_8bit``: moments in 8
    bits (bitsandbytes), a quarter of the memory; the trained weights differ from those of ``adamw``."""
    attention: str | None = None
    """The attention kernel of the trained model. Text, by transformers' names: ``eager``, ``sdpa``,
    ``flash_attention_2``. Pictures and clips, by diffusers' names: ``native``, ``_native_flash``, ``_native_cudnn``,
    ``_native_efficient``, ``_native_math``, ``flash``, ``_flash_3``, ``xformers``. None keeps the library's default."""
    vae: Literal["auto", "float32", "bfloat16"] = "auto"
    """Pictures and clips: what the VAE multiplies in when it decodes for rewards; its weights are float32, and pathwise
    gradients go through float32. ``auto`` is bfloat16 on CUDA beside ``model.dtype: bfloat16``, if pictures of noise
    that both decode differ by at most 1/255 on average; else float32."""
    offload_optimizer: bool = False
    """Keep the optimizer's state in page-locked host memory and move it to the device for each update (no effect on a
    CPU)."""
    offload_reference: bool = False
    """Keep the reference's copy of the weights there, too. It is moved to the device for the slices that need it, and
    back before the update (no effect on a CPU). With LoRA the reference is the base model, which has no second copy."""
    gather_dtype: Literal["float32", "bfloat16"] = "float32"
    """With ``train.backend: fsdp``: the dtype in which weights that train are gathered to compute with. ``bfloat16``
    halves the memory and the traffic of gathering, and the whole model that a device samples with; shards, optimizer
    and the sums of gradients stay float32. Results differ: what autocast leaves in float32 (embeddings, the weights of
    norms) is rounded too. Needs ``model.dtype: bfloat16``."""
    compile: bool = False
    """Pictures and clips: compile the repeated blocks of the denoiser (torch.compile), for sampling and training. Text:
    sample in this process row by row, each row at a fixed place of the cache, and on CUDA record a step once and replay
    it (CUDA graphs); training is not compiled. ``auto``, or no value: on a GPU where it saves minutes by the
    plan; else false."""

    def tf32_beside(self, dtype: str) -> bool | None:
        """``tf32`` of a run with this ``model.dtype``; None keeps torch's default."""
        return True if self.tf32 is None and dtype == "bfloat16" else self.tf32

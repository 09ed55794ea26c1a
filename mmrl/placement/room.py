"""Whether a plan has room: what does not fit, and the edits that mend it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mmrl.placement.tables import size

if TYPE_CHECKING:
    from mmrl.placement.plan import PhaseMemory, Plan


def room(plan: Plan) -> list[str]:
    """Why a controller, or all that are to run on this machine, cannot have the memory or the GPUs they need."""
    peak, memory, n = plan.peak, plan.device_memory, plan.recipe.controllers
    if peak is None or memory is None:
        return []
    if peak.total > memory:
        return [_too_big(plan, peak, memory)]
    if n == 1 or plan.recipe.ray != "local":
        return []
    if plan.device.startswith("cuda"):
        import torch

        has = torch.cuda.device_count()
        lacks = f"{n} take a GPU each, and this machine has {has}" if n > has else None
    else:
        total = n * peak.total
        lacks = f"{n} need {size(total)} together in {peak.name}, and this machine has {size(memory)}"
        lacks = lacks if total > memory else None
    if lacks is None:
        return []
    return [f"controllers: {lacks}; lower controllers, or name a cluster (ray=auto or its address)"]


def _too_big(plan: Plan, peak: PhaseMemory, memory: int) -> str:
    largest = sorted(peak.parts.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {size(n)}" for name, n in largest)
    return (
        f"the phase {peak.name} needs {size(peak.total)} and {plan.device} has {size(memory)} "
        f"(most of it: {listed}). Try: {'; '.join(_edits(plan, peak))}"
    )


def _edits(plan: Plan, peak: PhaseMemory) -> Iterator[str]:
    """Edits that lower the peak, the cheapest first."""
    recipe = plan.recipe
    train, sampling, text = recipe.train, recipe.sampling, recipe.sampling.type == "text"
    rows = plan.counts.slice_rows if plan.counts and peak.name == "train" else train.micro_batch_size
    if not recipe.model.offload and plan.device != "cpu" and not text:
        yield "model.offload=true"
    if peak.name == "train" and not recipe.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    if peak.name in ("sample", "decode") and sampling.batch_size and sampling.batch_size > 1:
        yield f"sampling.batch_size={sampling.batch_size // 2}"
    elif peak.name in ("sample", "decode", "train") and rows > 1:
        yield f"train.micro_batch_size={rows // 2}"
    if recipe.controllers > 1 and recipe.train.backend == "replicated" and peak.name in ("train", "optimizer"):
        yield "train.backend=fsdp"
    if recipe.model.lora is None:
        yield "model.lora={rank: 32} (its gradients and optimizer state take megabytes)"
    if recipe.model.dtype == "float32":
        yield "model.dtype=bfloat16"
    if train.prompts_per_step > 1 and peak.parts.get("trajectories", 0) > peak.total // 10:
        yield f"train.prompts_per_step={train.prompts_per_step // 2}"
    yield "a device with more memory, or a smaller model.path"

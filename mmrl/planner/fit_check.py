"""Check whether a plan fits the device: what does not fit, and the edits that help."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from mmrl.config.checks import impossibilities
from mmrl.config.left_to_plan import with_values
from mmrl.core.sizes import size
from mmrl.models.quantized import NEEDS
from mmrl.planner.device_roles import SAMPLED, judges_beside_sampling
from mmrl.planner.gpus import GPUS
from mmrl.planner.plan_data import PhaseMemory, Plan


def does_not_fit(plan: Plan) -> list[str]:
    """Why one device, or all devices on this machine together, lack memory or GPUs."""
    peak, memory, devices = plan.peak, plan.device_memory, plan.recipe.devices_per_controller
    n = plan.recipe.controllers * devices
    if peak is None or memory is None:
        return []
    if peak.total > memory:
        return [_too_big(plan, peak, memory)]
    if plan.gpus is not None and n > plan.gpus:
        lower = "controllers or devices_per_controller" if devices > 1 else "controllers"
        return [f"--gpus {plan.gpus}: {_all(plan)} take a GPU each; lower {lower}, or write --gpus {n}"]
    if n == 1 or plan.recipe.ray != "local" or plan.gpu is not None:
        return []
    if plan.device.startswith("cuda"):
        has = torch.cuda.device_count()
        lacks = f"{_all(plan)} take a GPU each, and this machine has {has}" if n > has else None
    else:
        of_controller = sum(peak.parts.get(name, 0) for name in ("trajectories", "pictures for the rewards"))
        total = n * peak.total - (n - plan.recipe.controllers) * of_controller  # only its main process has these
        lacks = f"{_all(plan)} need {size(total)} together in {peak.name}, and this machine has {size(memory)}"
        lacks = lacks if total > memory else None
    if lacks is None:
        return []
    key = "controllers" if devices == 1 else "devices_per_controller"
    lower = key if plan.recipe.controllers == 1 or devices == 1 else f"controllers or {key}"
    return [f"{key}: {lacks}; lower {lower}, or name a cluster (ray=auto or its address)"]


def _all(plan: Plan) -> str:
    n, devices = plan.recipe.controllers, plan.recipe.devices_per_controller
    if devices == 1:
        return str(n)
    return f"{n * devices} devices ({n} controller{'s' * (n > 1)} x {devices})"


def _too_big(plan: Plan, peak: PhaseMemory, memory: int) -> str:
    largest = sorted(peak.parts.items(), key=lambda item: -item[1])[:3]
    listed = ", ".join(f"{name} {size(n)}" for name, n in largest)
    return (
        f"the phase {peak.name} needs {size(peak.total)} and {plan.where} has {size(memory)} "
        f"(most of it: {listed}). Try: {'; '.join(edits(plan, peak))}"
    )


def _holding(plan: Plan, peak: PhaseMemory) -> str:
    """The smallest GPU that the peak fits into."""
    if plan.device == "cpu":
        return ""
    smallest = min((one for one in GPUS.values() if one.memory >= peak.total), key=lambda gpu: gpu.memory, default=None)
    return "" if smallest is None else f" ({smallest.name} is the smallest of those in docs/gpus.md that holds it)"


def _sleep_helps(plan: Plan, peak: PhaseMemory, awake: tuple[str, ...]) -> bool:
    """Whether models that are awake in the phases ``awake``, on several devices, could sleep in the peak phase."""
    recipe = plan.recipe
    if judges_beside_sampling(recipe):
        awake = ("encode", "sample", "decode")
        if recipe.algorithm.kind not in SAMPLED:
            return False
    return not recipe.placement.sleep and peak.name not in awake


def _smaller_judges(plan: Plan, peak: PhaseMemory) -> Iterator[str]:
    recipe = plan.recipe
    if _sleep_helps(plan, peak, ("judge",)):
        yield f"placement={{type: {recipe.placement.type}, sleep: true}}"
    labels = ", ".join(one.label for one in plan.asked if one.bytes)
    yield f"a smaller model for {labels}, or one on a separate server (a judge's model: {{url: ..., name: ...}})"


def _smaller_engine(plan: Plan, peak: PhaseMemory) -> Iterator[str]:
    recipe = plan.recipe
    if _sleep_helps(plan, peak, ("sample", "decode")):
        yield f"placement={{type: {recipe.placement.type}, sleep: true}}"
    setting = "kv_cache_memory_bytes" if plan.device == "cpu" else "gpu_memory_utilization"
    yield f"a lower rollout.options.{setting}"


def _less_state(plan: Plan, peak: PhaseMemory) -> Iterator[str]:
    """Edits for the optimizer state and copies: keep them on the host while unused, or in fewer bits."""
    asked, much, backend = plan.recipe.performance, peak.total // 20, plan.recipe.train.backend
    state = peak.parts.get("optimizer state", 0) > much
    copies = peak.parts.get("copies of the trained weights", 0) > much
    if plan.device != "cpu":
        if state and peak.name != "optimizer" and not asked.offload_optimizer and backend != "megatron":
            yield "performance.offload_optimizer=true"
        reference = any(role.name == "copy: reference" for role in plan.roles)
        if copies and peak.name != "train" and reference and not asked.offload_reference:
            yield "performance.offload_reference=true"
    if state and backend == "replicated" and asked.optimizer != "adamw_8bit":
        yield "performance.optimizer=adamw_8bit (needs bitsandbytes)"


def _fewer_bits(plan: Plan) -> Iterator[str]:
    """A quantised base, if all phases fit with it: in the most bits that do."""
    for kind, less in plan.quantized.items():
        phases = [*plan.phases, *([plan.load] if plan.load else [])]
        needs = [phase.total - sum(less.get(role, 0) for role in phase.parts) for phase in phases]
        if plan.device_memory is None or max(needs) > plan.device_memory:
            continue
        asked = with_values(plan.recipe, {"model.quantize": kind})
        if not [one for one in impossibilities(asked) if one.startswith("model.quantize")]:
            yield f"model.quantize={kind} (needs {NEEDS[kind][0]}, and fits)"
            return


def edits(plan: Plan, peak: PhaseMemory) -> Iterator[str]:
    """Edits that lower the peak, the cheapest first."""
    recipe = plan.recipe
    train, sampling, text = recipe.train, recipe.sampling, recipe.sampling.type == "text"
    rows = plan.counts.slice_rows if plan.counts and peak.name == "train" else train.micro_batch_size
    if not recipe.model.offload and plan.device != "cpu" and not text:
        yield "model.offload=true"
    if peak.parts.get("rewards' models", 0) > peak.total // 20:
        yield from _smaller_judges(plan, peak)
    if peak.parts.get("engine", 0) > peak.total // 20:
        yield from _smaller_engine(plan, peak)
    yield from _less_state(plan, peak)
    if peak.name == "train" and not recipe.model.gradient_checkpointing:
        yield "model.gradient_checkpointing=true"
    whole = peak.parts.get("weights gathered for the phase", 0)
    if plan.device_memory is not None and whole > plan.device_memory:
        yield (
            f"a model whose whole weights ({size(whole)} here) fit a device: each device that samples gathers them"
            + ", unless an engine on several devices samples (rollout.options.tensor_parallel_size)" * text
        )
    elif peak.name in ("sample", "decode") and sampling.batch_size and sampling.batch_size > 1:
        yield f"sampling.batch_size={sampling.batch_size // 2}"
    elif peak.name in ("sample", "decode", "train") and rows > 1:
        yield f"train.micro_batch_size={rows // 2}"
    ranks = recipe.controllers * recipe.devices_per_controller
    if ranks > 1 and recipe.train.backend == "replicated" and peak.name in ("train", "optimizer"):
        yield "train.backend=fsdp"
    shared = train.context_parallel * 2
    if peak.name == "train" and text and ranks > 1 and rows == 1 and train.tensor_parallel == 1:
        yield f"train.context_parallel={shared} (and devices_per_controller a multiple of it)"
    if recipe.model.lora is None:
        yield "model.lora={rank: 32} (its gradients and optimizer state take megabytes)"
    if recipe.model.dtype == "float32":
        yield "model.dtype=bfloat16"
    yield from _fewer_bits(plan)
    if train.prompts_per_step > 1 and peak.parts.get("trajectories", 0) > peak.total // 10:
        yield f"train.prompts_per_step={train.prompts_per_step // 2}"
    yield f"a device with more memory{_holding(plan, peak)}, or a smaller model.path"

"""Find unsupported settings of controllers, devices and training engines; see ``mmrl.config.checks``."""

from __future__ import annotations

from collections.abc import Iterator
from math import lcm

from mmrl.config.algorithm_settings import CriticSettings, GivenSettings
from mmrl.config.megatron_layouts import untested
from mmrl.config.replicas import has_replicas, of_replicas, spread
from mmrl.config.schema import Recipe


def of_placement(recipe: Recipe) -> Iterator[str]:
    """Contradictions in the roles of devices."""
    yield from _several(recipe)
    yield from _placement(recipe)
    yield from of_replicas(recipe)
    yield from _controllers(recipe)
    if recipe.ray != "local" and recipe.controllers * recipe.devices_per_controller == 1:
        yield (
            "ray: one device trains in the process that is started, and on no cluster; remove it, or set controllers "
            "to 2 or more"
        )


def _several(recipe: Recipe) -> Iterator[str]:
    """Check an advantage per reward."""
    how = recipe.algorithm.aggregates
    if how == "sum":
        return
    if sum(reward.weight != 0 for reward in recipe.rewards) < 2:
        yield (
            f"algorithm.advantage_aggregation: {how} computes one advantage per reward, and there is one reward; "
            "set it to sum, or add to rewards"
        )
    for i, reward in enumerate(recipe.rewards):
        if reward.normalize != "none":
            yield f"rewards[{i}].normalize: the advantage of each reward ({how}) is already normalised; set it to none"


def _placement(recipe: Recipe) -> Iterator[str]:
    placement, devices = recipe.placement, recipe.devices_per_controller
    if devices == 1 and placement.type != "colocate":
        yield (
            f"placement: {placement.type} needs devices that sample and others that judge; set devices_per_controller "
            "to 2 or more, or placement to colocate"
        )
    elif placement.judges is not None and placement.type == "colocate":
        yield "placement.judges: all devices judge where the placement is colocate; remove it, or set placement.type"
    elif placement.apart:
        yield from _disaggregated(recipe)
    elif placement.judges is not None and placement.judges >= devices:
        yield (
            f"placement.judges: of {devices} devices (devices_per_controller) one must sample; "
            f"set it to {devices - 1} or less"
        )
    if placement.one_judge and (not placement.sleep or devices == 1):
        yield (
            "placement.one_judge: only where several devices of a controller put judges to sleep; set "
            "placement.sleep=true and set devices_per_controller to 2 or more, or remove it"
        )
    if placement.log and devices == 1:
        yield (
            "placement.log: with one device to a controller the scheduler has nothing to decide; set "
            "devices_per_controller to 2 or more, or remove it"
        )
    if placement.sleep and devices == 1 and recipe.algorithm.kind in ("pathwise", "offline"):
        yield f"placement.sleep: {recipe.algorithm.type} does not sample before it trains, so nothing sleeps; remove it"
    if not placement.apart:
        kind, edit = placement.type, "remove it, or set placement.type to disaggregated"
        of_trainers = "only disaggregated devices train while others sample; remove it"
        of_apart = {
            "placement.split": f"with {kind} every device also trains; {edit}",
            "placement.trainers": of_trainers,
            "placement.staleness": of_trainers,
            "placement.lend": f"with {kind} every device samples and trains, so none waits to be lent; {edit}",
        }
        yield from recipe.in_vain(of_apart)
    if not placement.inside and not placement.follows:
        yield f"placement.inside: with {placement.type} no device changes its role to save time; remove it"
    if devices > 1 and not recipe.rollout.in_process:
        yield from _engine_devices(recipe)


def _engine_devices(recipe: Recipe) -> Iterator[str]:
    """Check engines with several devices in a controller: each engine uses the one device beside it."""
    rollout, devices = recipe.rollout, f"{recipe.devices_per_controller} devices (devices_per_controller)"
    if rollout.engine == "vllm":
        yield (
            f"rollout.engine: vLLM in the process of one of {devices} would join their process group; set it to "
            "vllm_server, which every sampling device starts for itself, or devices_per_controller to 1"
        )
    if rollout.partial is not None and not recipe.placement.apart:
        yield (
            f"rollout.partial: responses are continued in every step, and the {devices} also judge and train; set "
            "placement to disaggregated, devices_per_controller to 1 and controllers to more, or remove rollout.partial"
        )
    if "url" in rollout.options:
        yield (
            f"rollout.options: one of a controller's {devices} would replace the server's weights while a different "
            "one samples from it; remove url, so that each sampling device starts its own server, or set "
            "devices_per_controller to 1"
        )
    if "CUDA_VISIBLE_DEVICES" in (rollout.options.get("environment") or {}):
        yield (
            f"rollout.options: environment puts the engines of {devices} on the same GPU; remove CUDA_VISIBLE_DEVICES, "
            "so that each uses its own, or set devices_per_controller to 1"
        )


def _disaggregated(recipe: Recipe) -> Iterator[str]:
    """Check disaggregated placement."""
    placement, devices, algorithm = recipe.placement, recipe.devices_per_controller, recipe.algorithm
    if placement.training(devices) + (placement.judges or 0) >= devices:
        yield (
            f"placement: of {devices} devices (devices_per_controller) {placement.training(devices)} train and "
            f"{placement.judges or 0} judge, and one must sample; lower placement.trainers or placement.judges, or set "
            "devices_per_controller higher"
        )
    if placement.lend:
        yield from _lending(recipe)
    if placement.split != "fixed":
        yield from _moving(recipe)
    if placement.sleep:
        yield "placement.sleep: the models of disaggregated devices stay awake; remove it"
    if not algorithm.takes_older_samples:
        yield (
            f"algorithm.type: {algorithm.type} needs samples of the current policy and has no importance weight for "
            "older ones; set placement to adaptive, or algorithm.type to flow_grpo or diffusion_nft"
        )
    if algorithm.kind in ("pathwise", "offline"):
        yield f"placement: {algorithm.type} samples nothing ahead of its update; set placement to colocate"


def _moving(recipe: Recipe) -> Iterator[str]:
    """Check devices that move between sampling and judging while others train."""
    placement, fixed = recipe.placement, "set placement.split to fixed"
    if has_replicas(recipe):
        yield (
            "placement.split: a replica of several devices keeps its server, so its devices do not move; "
            f"{fixed}, or remove the parallel size of the engine and of the judges"
        )
    elif not recipe.rollout.in_process:
        yield (
            f"placement.split: {recipe.rollout.engine_name} runs beside the devices that sample, and a judge that "
            f"begins to sample has none; {fixed}, or rollout.engine to transformers"
        )
    if not placement.inside and recipe.devices_per_controller - placement.training(recipe.devices_per_controller) < 2:
        yield (
            "placement.inside: one device samples and judges, so it changes its role within a step; remove it, or "
            "lower placement.trainers"
        )


def _lending(recipe: Recipe) -> Iterator[str]:
    """Check devices that train and are lent to sampling."""
    if not recipe.rollout.in_process:
        yield (
            f"placement.lend: {recipe.rollout.engine_name} runs beside the devices that sample, and there is none "
            "beside those that train; remove it, or set rollout.engine to transformers"
        )
    if recipe.train.divides:
        yield (
            "placement.lend: a device that trains a part of the weights cannot sample without the others; remove it, "
            "or set train.backend to replicated"
            + " and train.context_parallel to 1"
            * (recipe.train.backend == "replicated")
        )


def _controllers(recipe: Recipe) -> Iterator[str]:
    n, one_each = recipe.controllers, recipe.devices_per_controller == 1  # else _engine_devices reports it
    if ":" in recipe.device and recipe.devices_per_controller > 1:
        yield f"device: {recipe.device} is one device, and a controller takes several; set device to auto, cpu or cuda"
    if n * recipe.devices_per_controller > 1 and recipe.train.backend == "fsdp":
        yield from _sharded(recipe, "weights in shards (fsdp)")
    if recipe.train.shard_size is not None:
        yield from _groups_of_shards(recipe)
    yield from _megatron(recipe)
    yield from _context(recipe)
    if n == 1:
        return
    for key, most in (("train.prompts_per_step", recipe.train.prompts_per_step), ("eval.samples", recipe.eval.samples)):
        if n > most:
            yield f"controllers: {n} controllers share {most} ({key}), and each needs one; lower controllers"
    if recipe.rollout.engine == "vllm" and one_each:
        yield (
            f"rollout.engine: vLLM in the process of one of {n} controllers would join their process group; set it to "
            "vllm_server, which each starts for itself, or controllers to 1"
        )
    if "url" in recipe.rollout.options and one_each:
        yield (
            f"rollout.options: {n} controllers would replace one server's weights while others sample from it; "
            "remove url, so that each starts its own server, or set controllers to 1"
        )
    if "CUDA_VISIBLE_DEVICES" in (recipe.rollout.options.get("environment") or {}) and one_each:
        yield (
            f"rollout.options: environment puts the engines of {n} controllers on the same devices; remove "
            "CUDA_VISIBLE_DEVICES, so that each uses its controller's, or set controllers to 1"
        )
    if one_each and "url" not in recipe.rollout.options and (size := spread(recipe.rollout.options)) > 1:
        yield (
            f"rollout.options: an engine of {size} devices does not fit beside a controller of one; set placement to "
            "disaggregated and devices_per_controller to as many as train and sample, or controllers to 1"
        )
    if ":" in recipe.device:
        yield f"device: {recipe.device} is one, and {n} controllers take one each; set device to auto, cpu or cuda"


def _groups_of_shards(recipe: Recipe) -> Iterator[str]:
    train, size = recipe.train, recipe.train.shard_size or 1
    ranks = recipe.controllers * recipe.placement.training(recipe.devices_per_controller)
    if train.backend != "fsdp":
        yield f"train.shard_size: {train.backend} has no shards of FSDP; remove it, or set train.backend to fsdp"
    elif ranks % size:
        several = [str(n) for n in range(2, ranks + 1) if ranks % n == 0]
        yield (
            f"train.shard_size: {ranks} devices that train are no multiple of {size}; set it to "
            f"{' or '.join(several) or 'null'}"
        )
    elif size == 1:
        yield "train.shard_size: a group of 1 holds all weights; remove it and set train.backend to replicated"


def _sharded(recipe: Recipe, what: str) -> Iterator[str]:
    """With sharded weights all ranks must run each forward and backward pass together."""
    algorithm = recipe.algorithm
    if recipe.performance.compile and recipe.sampling.type != "text":
        yield (
            "performance.compile: weights in shards (fsdp) are gathered inside the modules to compile; set it to "
            "false, or train.backend to replicated"
        )
    if algorithm.kind == "pathwise":
        yield (
            f"train.backend: {algorithm.type} back-propagates through several denoising steps at once, which {what} "
            "cannot do; set train.backend to replicated"
        )
    if not recipe.rollout.in_process and recipe.devices_per_controller > 1 and recipe.placement.sleep:
        yield (
            f"placement.sleep: {recipe.rollout.engine_name} would wake without weights: {what} can only be sent to the "
            "engines of all devices at once; remove it, or set train.backend to replicated"
        )
    compared = (
        isinstance(algorithm, GivenSettings)
        and algorithm.needs_reference
        and (recipe.model.lora is None or recipe.model.continues_adapter)
    )
    if compared and recipe.eval.every is not None:
        yield (
            f"train.backend: held-out records are compared under the weights and the reference in turn, which {what} "
            "cannot do; set eval.every to null, model.lora={rank: 32}, or train.backend to replicated"
        )


_OF_MEGATRON = (
    *("tensor_parallel", "sequence_parallel", "pipeline_parallel", "pipeline_chunks", "expert_parallel"),
    "distributed_optimizer",
)
"""Keys of ``train`` that divide layers."""


def _megatron(recipe: Recipe) -> Iterator[str]:
    train, algorithm, size = recipe.train, recipe.algorithm, recipe.train.width
    if train.backend != "megatron":
        for key in train.changed(*_OF_MEGATRON):
            yield f"train.{key}: {train.backend} does not split layers; set train.backend=megatron, or remove it"
        return
    devices = recipe.placement.training(recipe.devices_per_controller)
    fsdp = "set train.backend to fsdp"
    if recipe.sampling.type != "text":
        yield f"train.backend: megatron trains language models, and this recipe makes pictures or clips; {fsdp}"
    if size == train.expert_parallel == 1 and not train.distributed_optimizer:
        yield (
            "train.tensor_parallel: megatron needs at least 2 devices that share a model; set it, "
            "train.pipeline_parallel, train.context_parallel, train.expert_parallel or train.distributed_optimizer, "
            f"or {fsdp}"
        )
    if train.pipeline_chunks > 1 and train.pipeline_parallel == 1:
        yield "train.pipeline_chunks: it needs several pipeline stages; set train.pipeline_parallel, or remove it"
    if train.pipeline_chunks > 1 and train.context_parallel > 1:
        yield "train.pipeline_chunks: interleaved stages need whole rows; remove it, or train.context_parallel"
    if train.sequence_parallel and train.tensor_parallel == 1:
        yield "train.sequence_parallel: it needs train.tensor_parallel; set that, or remove it"
    if train.pipeline_parallel > 1 and algorithm.kind == "offline" and not algorithm.trains_scores:
        yield f"train.pipeline_parallel: pipeline stages do not support training on given texts; set it to 1, or {fsdp}"
    if train.pipeline_parallel > 1 and isinstance(algorithm, CriticSettings):
        yield f"train.pipeline_parallel: log-probs and values are computed in one pass; set it to 1, or {fsdp}"
    elif isinstance(algorithm, CriticSettings) and train.context_parallel == 1:
        yield from untested("critic", train)
    if devices % size:
        yield (
            f"devices_per_controller: the {size} devices that share a model belong to one controller, and "
            f"{devices} train there; set devices_per_controller{_trainers(recipe)} to a multiple of {size}"
        )
    elif devices % train.expert_parallel:
        yield (
            f"devices_per_controller: the {train.expert_parallel} devices that share experts belong to one controller, "
            f"and {devices} train there; set devices_per_controller{_trainers(recipe)} to a multiple of "
            f"{lcm(size, train.expert_parallel)}"
        )
    if recipe.model.lora is not None:
        yield f"model.lora: megatron trains whole weights; remove it, or {fsdp}"
    if recipe.model.dtype == "float16":
        yield f"model.dtype: megatron scales no losses for float16; set it to bfloat16 or float32, or {fsdp}"
    if algorithm.trains_scores:
        yield f"train.backend: {algorithm.type} trains a head for scores, which megatron lacks; {fsdp}"
    yield from _sharded(recipe, "weights in parts (megatron)")


def _context(recipe: Recipe) -> Iterator[str]:
    """Check context parallelism."""
    train, algorithm, size = recipe.train, recipe.algorithm, recipe.train.context_parallel
    if size == 1:
        return
    devices = recipe.placement.training(recipe.devices_per_controller)
    remove = "remove train.context_parallel"
    if recipe.sampling.type != "text":
        yield from _sequences(recipe)
    elif algorithm.trains_scores or isinstance(algorithm, CriticSettings):
        yield f"train.context_parallel: {algorithm.type} trains a value or score head, which needs whole rows; {remove}"
    if train.backend != "megatron" and devices % size:
        yield (
            f"train.context_parallel: the {size} devices that share a row belong to one controller, and {devices} "
            f"train there; set devices_per_controller{_trainers(recipe)} to a multiple of {size}"
        )


def _sequences(recipe: Recipe) -> Iterator[str]:
    """Check devices that share samples of a denoiser."""
    remove, what = "remove train.context_parallel", "devices that share a sample"
    if recipe.placement.type != "colocate":
        yield f"placement: {what} all draw it, then train; set placement to colocate, or {remove}"
    if recipe.train.balance == "moving":
        yield f"train.balance: {what} draw it at the same time; set train.balance to predicted, or {remove}"
    if recipe.algorithm.kind == "pathwise":
        yield (
            f"train.context_parallel: {recipe.algorithm.type} back-propagates through several denoising steps, of "
            f"which a device has the gradient of its tokens alone; {remove}"
        )
    if recipe.performance.compile:
        yield f"performance.compile: {what} exchange tokens inside the blocks to compile; set it to false, or {remove}"


def _trainers(recipe: Recipe) -> str:
    return " or placement.trainers" if recipe.placement.apart else ""

"""What a recipe asks for that cannot work, as ``key: why; the edit that mends it``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mmrl.config.picture_checks import of_pictures

if TYPE_CHECKING:
    from mmrl.config.schema import Recipe


def impossibilities(recipe: Recipe) -> list[str]:
    """All contradictions between sections, at once; each names the key to change."""
    if recipe.sampling.type == "text":
        return [
            *_groups(recipe),
            *_batches(recipe),
            *_half(recipe),
            *_text(recipe),
            *_pairs(recipe),
            *_several(recipe),
            *_partial(recipe),
            *_placement(recipe),
            *_controllers(recipe),
            *_labels(recipe),
            *_evaluation(recipe),
        ]
    return [
        *_groups(recipe),
        *_diffusion(recipe),
        *_pairs(recipe),
        *of_pictures(recipe),
        *_batches(recipe),
        *_half(recipe),
        *_several(recipe),
        *_placement(recipe),
        *_controllers(recipe),
        *_labels(recipe),
        *_evaluation(recipe),
    ]


def label_of(name: str, label: str | None) -> str:
    """What metrics call a reward: its label, else the attribute it is loaded from, or the file if that is ``score``."""
    return label or name.removesuffix(":score").rpartition(":")[2].rpartition("/")[2].removesuffix(".py")


def _groups(recipe: Recipe) -> Iterator[str]:
    if recipe.algorithm.compares_group and recipe.train.group_size < 2:
        yield (
            "train.group_size: a group of 1 has no advantage (its reward minus its own mean is 0); "
            "set train.group_size to 2 or more"
        )


def _text(recipe: Recipe) -> Iterator[str]:
    if recipe.algorithm.trains_on in ("denoising", "picture_pairs"):
        yield (
            f"algorithm.type: {recipe.algorithm.type} trains denoising steps, and this recipe samples text "
            "(sampling.max_new_tokens); use grpo, or a diffusion pipeline and its sampling section"
        )
    if recipe.train.micro_batch_tokens is not None:
        needed = recipe.decoding.max_new_tokens
        if recipe.train.micro_batch_tokens < needed:
            yield (
                f"train.micro_batch_tokens: one response may have {needed} tokens (sampling.max_new_tokens), which do "
                f"not fit; set it to {needed} plus the longest prompt, or more"
            )
    if recipe.model.compile:
        yield "model.compile: what samples text has another shape for every token; remove it"
    if recipe.train.steps_per_forward > 1:
        yield "train.steps_per_forward: text has no denoising steps, all tokens of a row are one forward; remove it"
    if recipe.features.cache is not None:
        yield "features.cache: prompts of text are not encoded by a model of their own; remove it"


def _pairs(recipe: Recipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    if algorithm.kind != "offline":
        return
    if recipe.train.group_size != 1:
        yield (
            f"train.group_size: {algorithm.type} trains on one given pair per prompt and samples no group; "
            "set train.group_size to 1"
        )
    if recipe.rewards:
        yield (
            f"rewards: {algorithm.type} trains on given pairs and samples nothing that could be rewarded; remove "
            "rewards (eval.rewards measures held-out samples)"
        )
    if algorithm.type == "reward_model" and recipe.eval.rewards:
        yield "eval.rewards: a reward model writes no text that could be rewarded; remove eval.rewards"
    if recipe.rollout.engine != "transformers" and not recipe.eval.rewards:
        yield (
            f"rollout.engine: {algorithm.type} samples nothing without eval.rewards, so {recipe.rollout.engine} would "
            "idle; remove rollout"
        )


def _partial(recipe: Recipe) -> Iterator[str]:
    partial, algorithm = recipe.rollout.partial, recipe.algorithm
    if partial is None:
        return
    if recipe.rollout.engine == "transformers":
        yield (
            "rollout.partial: only an engine with weights of its own can stop in the middle of a response and go on; "
            "set rollout.engine to vllm, vllm_server or sglang, or remove rollout.partial"
        )
    if algorithm.trains_on == "pairs":
        yield f"rollout.partial: {algorithm.type} samples nothing in training; remove rollout.partial"
    if getattr(algorithm, "dynamic_sampling", False):
        yield (
            "rollout.partial: dynamic sampling draws groups anew until they differ, and a response in flight cannot be "
            "waited for; set algorithm.dynamic_sampling to false, or remove rollout.partial"
        )
    if partial.cut_after >= recipe.decoding.max_new_tokens:
        yield (
            f"rollout.partial.cut_after: no response is longer than {recipe.decoding.max_new_tokens} tokens "
            "(sampling.max_new_tokens), so none would be cut; set it lower, or remove rollout.partial"
        )
    for key, most in (("train.prompts_per_step", recipe.train.prompts_per_step), ("extra", partial.extra)):
        if partial.pools > most:
            yield (
                f"rollout.partial.pools: {partial.pools} pools share {most} ({key}), and one without waits for its "
                f"longest response; set pools to {most} or less, or {key} to {partial.pools} or more"
            )
    if partial.pools % recipe.controllers:
        yield (
            f"rollout.partial.pools: {partial.pools} do not divide among {recipe.controllers} controllers, which have "
            f"whole ones; set it to {-(-partial.pools // recipe.controllers) * recipe.controllers}, or controllers to "
            "a divisor of it"
        )


def _diffusion(recipe: Recipe) -> Iterator[str]:
    if recipe.algorithm.trains_on == "pairs":
        yield (
            f"algorithm.type: {recipe.algorithm.type} trains on given pairs, which are of texts; use picture_dpo, "
            "whose pairs are of pictures, or diffusion_dpo, which makes pairs of its own samples"
        )
    elif recipe.algorithm.trains_on == "tokens":
        yield (
            f"algorithm.type: {recipe.algorithm.type} trains tokens, and this recipe samples pictures "
            "(sampling.height, sampling.width); use flow_grpo, or a text pipeline and sampling.max_new_tokens"
        )
    if recipe.train.micro_batch_tokens is not None:
        yield "train.micro_batch_tokens: pictures have no tokens to count; set train.micro_batch_size and remove it"
    if recipe.rollout.engine != "transformers":
        yield f"rollout.engine: {recipe.rollout.engine} samples text; remove rollout"
    if recipe.rollout.partial is not None:
        yield "rollout.partial: pictures are not drawn in parts; remove rollout"


def _batches(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if recipe.algorithm.kind != "pathwise" and train.group_size % train.updates_per_step:
        yield (
            f"train.updates_per_step: {train.group_size} samples of a group do not divide into "
            f"{train.updates_per_step} updates; use a divisor of train.group_size"
        )


def _half(recipe: Recipe) -> Iterator[str]:
    if recipe.model.dtype == "float16":
        yield (
            "model.dtype: the gradients of float16 underflow without loss scaling, which is not built; "
            "use bfloat16, or float32"
        )


def _several(recipe: Recipe) -> Iterator[str]:
    """Of an advantage for each reward."""
    how = getattr(recipe.algorithm, "advantage_aggregation", "sum")
    if how == "sum":
        return
    if sum(reward.weight != 0 for reward in recipe.rewards) < 2:
        yield (
            f"algorithm.advantage_aggregation: {how} makes an advantage of each reward, and there is one; "
            "set it to sum, or add to rewards"
        )
    for i, reward in enumerate(recipe.rewards):
        if reward.normalize != "none":
            yield f"rewards[{i}].normalize: an advantage of each reward ({how}) is normalised already; set it to none"


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
    if placement.sleep and devices == 1:
        yield "placement.sleep: one device does everything in turn and its judges stay awake; remove it"
    for key in ("trainers", "staleness"):
        if getattr(placement, key) is not None and not placement.apart:
            yield f"placement.{key}: only disaggregated devices train while others sample; remove it"
    if not placement.inside and placement.type != "adaptive":
        yield f"placement.inside: with {placement.type} no device changes its role to save time; remove it"
    if devices > 1 and recipe.rollout.engine != "transformers":
        yield from _beside_devices(recipe)


def _beside_devices(recipe: Recipe) -> Iterator[str]:
    """An engine beside every device of a controller has that device alone."""
    rollout, devices = recipe.rollout, f"{recipe.devices_per_controller} devices (devices_per_controller)"
    if rollout.engine == "vllm":
        yield (
            f"rollout.engine: vLLM in the process of one of {devices} would join their process group; set it to "
            "vllm_server, which each that samples starts for itself, or devices_per_controller to 1"
        )
    if rollout.partial is not None and not recipe.placement.apart:
        yield (
            f"rollout.partial: responses go on in every step, and the {devices} judge and train between; set placement "
            "to disaggregated, devices_per_controller to 1 and controllers to more, or remove rollout.partial"
        )
    if "url" in rollout.options:
        yield (
            f"rollout.options: of a controller's {devices} one would replace the server's weights while another "
            "samples from it; remove url, and each that samples starts a server of its own, or set "
            "devices_per_controller to 1"
        )
    if "CUDA_VISIBLE_DEVICES" in (rollout.options.get("environment") or {}):
        yield (
            f"rollout.options: environment puts the engines of {devices} on the same; remove CUDA_VISIBLE_DEVICES, and "
            "each uses its own, or set devices_per_controller to 1"
        )
    for name, size in _parallel(recipe):
        yield (
            f"rollout.options: an engine of {size} devices does not fit beside one of {devices}; remove {name}, or "
            "set devices_per_controller to 1"
        )


def _parallel(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """The options that spread an engine over several devices."""
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "tp_size", "pp_size"):
        if (size := recipe.rollout.options.get(name, 1)) != 1:
            yield name, size


def _disaggregated(recipe: Recipe) -> Iterator[str]:
    """Some devices train while others sample and judge."""
    placement, devices, algorithm = recipe.placement, recipe.devices_per_controller, recipe.algorithm
    if placement.training(devices) + (placement.judges or 0) >= devices:
        yield (
            f"placement: of {devices} devices (devices_per_controller) {placement.training(devices)} train and "
            f"{placement.judges or 0} judge, and one must sample; lower placement.trainers or placement.judges, or set "
            "devices_per_controller higher"
        )
    if placement.sleep:
        yield "placement.sleep: disaggregated devices keep their role, and their models stay awake; remove it"
    apart = algorithm.kind == "forward_process" and algorithm.type != "diffusion_nft"
    if apart or algorithm.type in ("grpo_guard", "flow_dppo"):
        yield (
            f"algorithm.type: {algorithm.type} compares samples with the very policy that drew them and has no weight "
            "that corrects older ones; set placement to adaptive, or algorithm.type to flow_grpo or diffusion_nft"
        )
    if algorithm.kind in ("pathwise", "offline"):
        yield f"placement: {algorithm.type} samples nothing ahead of its update; set placement to colocate"


def _controllers(recipe: Recipe) -> Iterator[str]:
    n, one_each = recipe.controllers, recipe.devices_per_controller == 1  # else _beside_devices has said it
    if ":" in recipe.device and recipe.devices_per_controller > 1:
        yield f"device: {recipe.device} is one, and a controller takes several; set device to auto, cpu or cuda"
    if n * recipe.devices_per_controller > 1 and recipe.train.backend == "fsdp":
        yield from _sharded(recipe, "weights in shards (fsdp)")
    yield from _megatron(recipe)
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
            f"rollout.options: {n} controllers would replace one server's weights while another samples from it; "
            "remove url, and each starts a server of its own, or set controllers to 1"
        )
    if "CUDA_VISIBLE_DEVICES" in (recipe.rollout.options.get("environment") or {}) and one_each:
        yield (
            f"rollout.options: environment puts the engines of {n} controllers on the same devices; remove "
            "CUDA_VISIBLE_DEVICES, and each uses its controller's, or set controllers to 1"
        )
    for name, size in _parallel(recipe) if one_each and "url" not in recipe.rollout.options else ():
        yield (
            f"rollout.options: an engine of {size} devices does not fit beside a controller of one; remove {name}, or "
            "set controllers to 1"
        )
    if ":" in recipe.device:
        yield f"device: {recipe.device} is one, and {n} controllers take one each; set device to auto, cpu or cuda"


def _sharded(recipe: Recipe, what: str) -> Iterator[str]:
    """Where weights lie in shards, forward and backward passes are of all ranks together."""
    algorithm = recipe.algorithm
    if recipe.model.compile and recipe.sampling.type != "text":
        yield (
            "model.compile: weights in shards (fsdp) are gathered in the middle of what would be compiled; set it to "
            "false, or train.backend to replicated"
        )
    if algorithm.kind == "pathwise":
        yield (
            f"train.backend: {algorithm.type} back-propagates through several denoising steps at once, which {what} "
            "cannot do; set train.backend to replicated"
        )
    if recipe.rollout.engine != "transformers":
        yield (
            f"train.backend: {recipe.rollout.engine} takes whole weights after every update, which {what} "
            "do not give it yet; set train.backend to replicated, or remove rollout"
        )
    reference = algorithm.type == "dpo" and not algorithm.reference_free and recipe.model.lora is None
    if reference and recipe.eval.every is not None:
        yield (
            f"train.backend: held-out pairs are compared under the weights and the reference in turn, which {what} "
            "cannot do; set eval.every to null, model.lora={rank: 32}, or train.backend to replicated"
        )


def _megatron(recipe: Recipe) -> Iterator[str]:
    train, algorithm, size = recipe.train, recipe.algorithm, recipe.train.tensor_parallel
    if train.backend != "megatron":
        for key, given in (("tensor_parallel", size > 1), ("sequence_parallel", train.sequence_parallel)):
            if given:
                yield f"train.{key}: {train.backend} cuts no layer in parts; set train.backend=megatron, or remove it"
        return
    devices = recipe.placement.training(recipe.devices_per_controller)
    fsdp = "set train.backend to fsdp"
    if recipe.sampling.type != "text":
        yield f"train.backend: megatron trains language models, and this recipe makes pictures or clips; {fsdp}"
    if size == 1:
        yield f"train.tensor_parallel: megatron needs at least 2 devices that share a model; set it, or {fsdp}"
    if devices % size:
        yield (
            f"train.tensor_parallel: the {size} devices that share a model belong to one controller, and "
            f"{devices} train there; set devices_per_controller{_trainers(recipe)} to a multiple of {size}"
        )
    if recipe.model.lora is not None:
        yield f"model.lora: megatron trains whole weights; remove it, or {fsdp}"
    if recipe.model.dtype != "float32":
        yield f"model.dtype: megatron trains in float32 so far; set it to float32, or {fsdp}"
    if algorithm.type in ("ppo", "reward_model"):
        yield f"train.backend: {algorithm.type} trains a head for numbers, which megatron lacks; {fsdp}"
    yield from _sharded(recipe, "weights in parts (megatron)")


def _trainers(recipe: Recipe) -> str:
    return " or placement.trainers" if recipe.placement.apart else ""


def _labels(recipe: Recipe) -> Iterator[str]:
    counts = Counter(label_of(r.name, r.label) for r in [*recipe.rewards, *recipe.eval.rewards])
    for label, n in counts.items():
        if n > 1:
            yield f"rewards: {n} rewards are called {label!r}; give them different labels (rewards[i].label)"
        if label in ("mean", "std", "dropped"):
            yield f"rewards: the label {label!r} is the log's own; set rewards[i].label to another"


def _evaluation(recipe: Recipe) -> Iterator[str]:
    evaluation, stopping = recipe.eval, recipe.eval.early_stopping
    if evaluation.tuned_fraction < 1 and recipe.sampling.type == "text":
        yield "eval.tuned_fraction: text has no denoising steps; remove it"
    elif evaluation.tuned_fraction < 1 and recipe.model.lora is None:
        yield (
            "eval.tuned_fraction: without an adapter there is no base model to take the last steps; set model.lora="
            "{rank: 32}, or remove eval.tuned_fraction"
        )
    if stopping is None:
        return
    if evaluation.every is None:
        yield "eval.early_stopping: nothing is evaluated, so nothing would stop; set eval.every, or remove it"
    labels = [label_of(r.name, r.label) for r in [*recipe.rewards, *evaluation.rewards]]
    kind, _, rest = stopping.metric.partition("/")
    known = rest.partition("/")[0] in labels if kind == "reward" else recipe.algorithm.kind == "offline"
    if not known:
        named = " or ".join(f"reward/{label}" for label in labels) or "a figure of the pairs, such as dpo/accuracy"
        yield (
            f"eval.early_stopping.metric: {stopping.metric!r} is no reward of this recipe; set it to {named}, or a "
            "part of one (reward/label/part)"
        )

"""Find settings of a diffusion recipe that its algorithm does not support, as ``mmrl.config.checks`` reports them."""

from __future__ import annotations

from collections.abc import Iterator

from mmrl.config.algorithm_settings import ForwardSettings, StepSettings
from mmrl.config.schema import Recipe

SERVED = {"diffusion/z_image": "Z-Image", "diffusion/qwen_image": "Qwen-Image"}
"""The pipelines that SGLang's diffusion server samples, and its names of the models."""


def of_pictures(recipe: Recipe) -> list[str]:
    """All contradictions; each names the key to change."""
    return [
        *_buckets(recipe),
        *_strength(recipe),
        *_window(recipe),
        *_negative_prompt(recipe),
        *_noise(recipe),
        *_levels(recipe),
        *_steps(recipe),
        *_compiled(recipe),
        *_replaced(recipe),
        *_whole(recipe),
        *_pathwise(recipe),
        *_scored_steps(recipe),
        *_served(recipe),
    ]


def _buckets(recipe: Recipe) -> Iterator[str]:
    sampling = recipe.denoising
    sizes = sampling.sizes
    twice = [size for n, size in enumerate(sizes) if size in sizes[:n]]
    if twice:
        yield f"sampling.buckets: {twice[0]} is listed twice; take one of them out"
    if sampling.size not in sizes:
        yield (
            f"sampling.buckets: {sampling.size} (sampling.height x sampling.width), the size of records that say "
            f"nothing of theirs, is none of them; add [{sampling.height}, {sampling.width}], or set sampling.height "
            f"to {sizes[0].height} and sampling.width to {sizes[0].width}"
        )


def _strength(recipe: Recipe) -> Iterator[str]:
    """Check how many steps are taken, of training and of evaluation."""
    sampling = recipe.denoising
    for key, steps, least in (("sampling.steps", sampling.steps, 2), ("eval.steps", recipe.eval.steps, 1)):
        if steps is not None and (taken := sampling.takes(steps)) < least:
            yield (
                f"sampling.strength: of {steps} steps ({key}) {sampling.strength:g} takes {taken}, and {least} or more "
                f"are needed; raise it or {key}"
            )


_MOVES = {
    "every": ("decay", "exp_decay", "progressive"),
    "decay_from": ("exp_decay",),
    "decay_rate": ("exp_decay",),
}
"""The keys of a window that moves, and the strategies that read them."""


def _window(recipe: Recipe) -> Iterator[str]:
    window, steps = recipe.denoising.window, recipe.denoising.taken
    if window is None:
        return
    if recipe.algorithm.kind != "policy_gradient":
        yield (
            f"sampling.window: {recipe.algorithm.type} records no denoising actions, so there is nothing to window; "
            "remove sampling.window"
        )
    for key in window.changed(*_MOVES):
        if window.strategy not in _MOVES[key]:
            yield (
                f"sampling.window.{key}: the strategy {window.strategy} does not read it; remove it, or set "
                f"sampling.window.strategy to {_MOVES[key][-1]}"
            )
    last = steps - 1 if window.last is None else window.last
    if last > steps - 1:
        yield f"sampling.window.last: step {steps - 1} is the final one, without noise; set it to {steps - 1} or less"
    elif window.first + window.size > last:
        yield (
            f"sampling.window: {window.size} steps do not fit into [{window.first}, {last}); "
            "lower sampling.window.size or raise sampling.steps"
        )


def _negative_prompt(recipe: Recipe) -> Iterator[str]:
    scale, algorithm = recipe.denoising.guidance_scale, recipe.algorithm
    most = max(scale, algorithm.loss_guidance(scale))
    if isinstance(algorithm, ForwardSettings):
        most = max(most, algorithm.guidance_of_reference(scale))
    if recipe.denoising.negative_prompt is not None and most <= 1:
        yield (
            f"sampling.negative_prompt: sampling.guidance_scale is {scale:g}, and without guidance no negative prompt "
            "is used; set sampling.guidance_scale above 1 (4.5, say), or remove sampling.negative_prompt"
        )


def _noise(recipe: Recipe) -> Iterator[str]:
    if recipe.algorithm.kind == "forward_process" and recipe.denoising.same_initial_noise:
        yield (
            f"sampling.same_initial_noise: {recipe.algorithm.type} adds no noise between steps, so a group would be "
            "one picture many times; set it to false"
        )


def _levels(recipe: Recipe) -> Iterator[str]:
    algorithm, steps = recipe.algorithm, recipe.denoising.taken
    if not isinstance(algorithm, ForwardSettings):
        return
    most = len(algorithm.levels(steps))
    if (algorithm.noise_levels or 0) > most:
        fewer = f"set it to {most} or less" if most else "lower algorithm.t_min"
        yield f"algorithm.noise_levels: of {steps} sampling steps {most} have a level that trains; {fewer}"
    elif most == 0:
        yield f"algorithm.t_min: none of {steps} sampling steps has a level that trains; lower it"


def _steps(recipe: Recipe) -> Iterator[str]:
    """Check policy gradients over denoising steps."""
    algorithm, sampling = recipe.algorithm, recipe.denoising
    recorded = sampling.window.size if sampling.window else sampling.taken - 1
    trained = (algorithm.trained_steps if isinstance(algorithm, StepSettings) else None) or recorded
    if trained > recorded:
        yield f"algorithm.trained_steps: {recorded} steps carry noise and can be trained; set it to {recorded} or less"
    if recipe.train.steps_per_forward != 1 and algorithm.kind != "policy_gradient":
        yield f"train.steps_per_forward: {algorithm.type} replays no recorded steps; remove it"
    elif recipe.train.at_once > trained:
        yield f"train.steps_per_forward: {trained} steps of a sample train; set it to {trained} or less"


def _compiled(recipe: Recipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    if recipe.replays_first and algorithm.exact_replay:
        yield (
            f"performance.compile: compiled kernels round {recipe.model.dtype} differently with and without gradients, "
            f"and {algorithm.type} needs the same step mean at sampling and at training; "
            "set performance.compile to false, model.dtype to float32, or algorithm.type to flow_grpo"
        )


def _replaced(recipe: Recipe) -> Iterator[str]:
    """Check dynamic sampling."""
    algorithm = recipe.algorithm
    if algorithm.attempts is None:
        return
    if recipe.placement.apart:
        yield (
            "algorithm.dynamic_sampling: replacement prompts would be encoded while a different step trains with the "
            "same modules; set it to false, or placement to colocate"
        )
    if algorithm.exact_replay and recipe.model.dtype != "float32":
        yield (
            "algorithm.dynamic_sampling: replaced groups are trained in different batches than they were sampled in, "
            f"which changes the rounding of {recipe.model.dtype}, and {algorithm.type} needs the same step mean at "
            "sampling and at training; set it to false, model.dtype to float32, or algorithm.type to flow_grpo"
        )


def _whole(recipe: Recipe) -> Iterator[str]:
    """Check objectives that compare samples inside an update."""
    algorithm, train = recipe.algorithm, recipe.train
    if algorithm.whole is None:
        return
    rows = {"group": train.group_size, "pair": 2}[algorithm.whole]
    if train.micro_batch_size % rows:
        yield (
            f"train.micro_batch_size: {algorithm.type} compares the {rows} samples of a {algorithm.whole} in one "
            f"slice; set it to a multiple of {rows}"
        )
    if train.updates_per_step > 1:
        yield f"train.updates_per_step: {algorithm.type} compares all samples of a group in one update; set it to 1"


def _pathwise(recipe: Recipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    if algorithm.kind != "pathwise":
        return
    name, last = algorithm.type, getattr(algorithm, "last_steps", None) or 1
    if last > recipe.denoising.taken:
        yield (
            f"algorithm.last_steps: {last} of {recipe.denoising.taken} sampling steps; "
            f"set it to {recipe.denoising.taken} or less"
        )
    if last > 1 and getattr(algorithm, "renoise", 0):
        yield (
            f"algorithm.renoise: it needs a graph through the last step only, and {last} steps carry a graph "
            "(algorithm.last_steps); set one of them to its default"
        )
    for i, reward in enumerate(recipe.rewards):
        if reward.name.partition(":")[0] == "http":
            yield (
                f"rewards[{i}].name: {reward.name!r} is remote and returns no gradient, which {name} needs; "
                "use a differentiable reward or algorithm={type: flow_grpo}"
            )
        if reward.normalize != "none":
            yield f"rewards[{i}].normalize: {name} follows the reward's own gradient; set it to none"
        if reward.on_failure == "drop":
            yield f"rewards[{i}].on_failure: {name} cannot drop a sample after its gradient is computed; set it to fail"
    if recipe.denoising.same_initial_noise and recipe.train.group_size > 1:
        yield (
            f"sampling.same_initial_noise: {name} adds no noise between steps, so a group would be one picture many "
            "times; set it to false, or train.group_size to 1"
        )
    needs = {
        "sampling.solver": f"{name} back-propagates through Euler's steps; set it to euler",
        "train.updates_per_step": f"{name} samples inside its one update; set it to 1",
    }
    yield from recipe.in_vain(needs)


def _scored_steps(recipe: Recipe) -> Iterator[str]:
    """Check algorithms that have the predictions of steps scored."""
    name = recipe.algorithm.type
    if not recipe.algorithm.scores_steps:
        return
    if recipe.midway is not None:
        yield (
            f"midway: {name} scores the predictions of every recorded step, and groups are pruned before they are "
            "complete; remove midway, or set algorithm.type to flow_grpo"
        )
    for n, reward in enumerate(recipe.rewards):
        if reward.weight and reward.normalize != "none":
            yield (
                f"rewards[{n}].normalize: {name} subtracts the reward of a step's prediction from that of the next, "
                "and both would be divided by different deviations; set it to none"
            )


def _served(recipe: Recipe) -> Iterator[str]:
    """Check what SGLang's diffusion server samples: one device, one shape of noise, the checkpoint's own schedule."""
    rollout, sampling, algorithm = recipe.rollout, recipe.denoising, recipe.algorithm
    if rollout.engine != "sglang":
        return
    if recipe.pipeline not in SERVED:
        yield f"rollout.engine: SGLang samples pictures of {' and '.join(SERVED)} here, not {recipe.pipeline}; {_ALONE}"
    if algorithm.kind not in ("policy_gradient", "forward_process"):
        yield f"rollout.engine: {algorithm.type} samples nothing with an engine; {_ALONE}"
    if algorithm.scores_steps or algorithm.exact_replay:
        what = "predictions of single steps" if algorithm.scores_steps else "the noise of every step"
        yield f"rollout.engine: {algorithm.type} needs {what}, which SGLang keeps; set algorithm.type to flow_grpo"
    if recipe.controllers > 1 or recipe.devices_per_controller > 1:
        yield (
            "rollout.engine: SGLang's pictures are for one controller with one device; set controllers and "
            f"devices_per_controller to 1, or {_ALONE}"
        )
    for key, wrong, edit in (
        ("sampling.sde.kind", sampling.sde.kind not in ("flow", "cps"), "set it to flow or cps"),
        ("sampling.solver", sampling.solver != "euler", "set it to euler"),
        ("sampling.shift", sampling.shift is not None, "write the shift into scheduler/scheduler_config.json"),
        ("sampling.same_initial_noise", sampling.same_initial_noise, "set it to false"),
        ("sampling.max_sequence_length", sampling.max_sequence_length > _READS, f"set it to {_READS} or less"),
        ("midway", recipe.midway is not None, "remove it"),
        ("placement.sleep", recipe.placement.sleep, "set it to false"),
        ("train.backend", recipe.train.backend != "replicated", "set it to replicated"),
    ):
        if wrong:
            yield f"{key}: SGLang's pictures are sampled without it; {edit}, or {_ALONE}"
    for key in rollout.changed("reproducible", "rejection", *(f"importance{end}" for end in _WEIGHTS)):
        yield f"rollout.{key}: it is for sampled text; remove it"


_ALONE = "remove rollout, which samples in the training process"
_WEIGHTS = ("", "_cap", "_floor", "_mode", "_normalize")
_READS = 512
"""Tokens of a prompt that SGLang has Z-Image read."""

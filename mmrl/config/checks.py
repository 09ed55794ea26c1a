"""Find settings of a recipe that cannot work, as ``key: why; the edit that fixes it``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from mmrl.config.algorithm_settings import CriticSettings, ResponseSettings, TurnSettings
from mmrl.config.evaluation_checks import label_of, of_evaluation
from mmrl.config.midway_checks import of_midway
from mmrl.config.moving_checks import of_moving
from mmrl.config.performance import NEEDS_HALF, PICTURE_ATTENTION, TEXT_ATTENTION
from mmrl.config.picture_checks import of_pictures
from mmrl.config.placement_checks import of_placement
from mmrl.config.sampling import TextSampling
from mmrl.config.schema import Recipe
from mmrl.config.section import Section
from mmrl.config.teacher_checks import of_self_teaching, of_teachers, teaches_alone
from mmrl.config.written_picture_checks import of_written_pictures
from mmrl.core.episode import REWARD
from mmrl.core.json_types import elements
from mmrl.core.plugins.python_objects import in_this_process

DEVICES = ("auto", "cpu", "cuda", "mps", "xpu", "npu", "hpu")
MOST_SAMPLES = 10**6
"""Largest number of samples in a step: they are listed one by one."""
_NO_STEPS = "text has no denoising steps; remove it"
_NOT_OF_TEXT = {
    "performance.vae": "text has no VAE that decodes; remove it",
    "train.steps_per_forward": "text has no denoising steps, all tokens of a row are one forward; remove it",
    "features.cache": "prompts of text are not encoded by a model of their own; remove it",
    **dict.fromkeys(("eval.steps", "eval.solver", "eval.tuned_fraction"), _NO_STEPS),
}
"""Keys without effect where text is sampled, and why."""
_CLIPS = "it is for clips in prompts of vision-language models; remove it"
_CHAT = "a model that makes pictures has no chat; remove it"
_NOT_OF_PICTURES = {
    **dict.fromkeys(("data.fps", "data.max_frames"), _CLIPS),
    **dict.fromkeys(("model.chat_template", "model.min_pixels", "model.max_pixels"), _CHAT),
    "train.micro_batch_tokens": "pictures have no tokens to count; set train.micro_batch_size and remove it",
    "train.packing": "pictures have no rows of tokens; remove it",
    "rollout.sampling": "it is for sampled text; remove it",
    "rollout.partial": "pictures are not sampled in parts; remove rollout",
    "eval.temperature": "pictures are not drawn from tokens; remove it",
    "eval.maj_at": "pictures have no answers to vote for; remove it (eval.pass_at works)",
}
"""Keys without effect where pictures are sampled, and why."""
_NOT_OF_EPISODES = {
    "rollout.partial": "an episode is not cut and gone on with in a later step; remove it",
    "midway": "a part of an episode has no reward yet; remove it",
}


def of_environment(recipe: Recipe) -> Iterator[str]:
    """Contradictions of the section ``environment`` with others."""
    section, algorithm = recipe.environment, recipe.algorithm
    by_turn = isinstance(algorithm, TurnSettings) and algorithm.credit == "turn"
    if section is None:
        if by_turn:
            yield (
                "algorithm.credit: turns are those of an environment, and the recipe has none; set environment, or "
                "set algorithm.credit to episode"
            )
        for key, rewards in (("rewards", recipe.rewards), ("eval.rewards", recipe.eval.rewards)):
            for i, reward in enumerate(rewards):
                if reward.name == REWARD:
                    yield (
                        f"{key}[{i}].name: it is the reward of an environment, and the recipe has none; set "
                        "environment, or take another reward"
                    )
        return
    if recipe.sampling.type != "text":
        yield "environment: a model that makes pictures writes no turns; remove environment, or take a text pipeline"
        return
    if recipe.algorithm.trains_on in ("pairs", "responses"):
        yield (
            f"environment: {recipe.algorithm.type} trains on given responses and samples none; remove environment, or "
            "set algorithm.type to grpo"
        )
    for i, reward in enumerate(recipe.rewards):
        if by_turn and reward.name == REWARD and reward.normalize != "none":
            yield (
                f"rewards[{i}].normalize: the rewards of turns are counted as the environment gives them; remove it, "
                "or set algorithm.credit to episode"
            )
    yield from recipe.in_vain(_NOT_OF_EPISODES)
    if recipe.rollout.in_process and (recipe.train.context_parallel > 1 or recipe.train.sharing > 1):
        yield (
            "environment: devices that share a row do not sample by turns; set rollout.engine to vllm, or remove "
            "train.context_parallel, train.tensor_parallel and train.pipeline_parallel"
        )
    if recipe.rollout.engine == "sglang" and recipe.pipeline.startswith("vlm/"):
        yield (
            "environment: SGLang's server cannot be asked for a turn behind pictures and sampled tokens; set "
            "rollout.engine to vllm"
        )
    names = [name for name in (section.name, *elements(section.options.get("tools"))) if isinstance(name, str)]
    if section.isolate and (held := [name for name in names if in_this_process(name)]):
        yield (
            f"environment.isolate: {', '.join(held)} is in this process only; define it at the top of a file other "
            "than the script and import it from there, or set environment.isolate to false"
        )
    if section.name == "draw" and recipe.performance.compile:
        yield (
            "performance.compile: what is recorded on a device must not meet pictures that are drawn there meanwhile; "
            "set performance.compile to false"
        )
    if section.max_tokens < recipe.decoding.max_new_tokens:
        yield (
            f"environment.max_tokens: an episode may have {section.max_tokens} tokens and one turn "
            f"{recipe.decoding.max_new_tokens} (sampling.max_new_tokens); raise it"
        )


def impossibilities(recipe: Recipe) -> list[str]:
    """All contradictions in and between sections, at once; each names the key to change."""
    sections = [section for _, section in recipe if isinstance(section, Section)]
    of_kind = (_text, _partial, of_written_pictures) if recipe.sampling.type == "text" else (_diffusion, of_pictures)
    return [
        *(line for section in sections for line in section.contradictions()),
        *recipe.algorithm.conflicts(recipe.sampling),
        *(line for rule in (*of_kind, *_RULES) for line in rule(recipe)),
    ]


def possible(recipe: Recipe) -> Recipe:
    """The recipe itself. Raises ``ValueError`` with all its contradictions, a line each."""
    if found := impossibilities(recipe):
        raise ValueError("\n".join(found))
    return recipe


def _sampler(recipe: Recipe) -> Iterator[str]:
    if recipe.data.sampler is None:
        return
    ahead = {
        "placement": ("devices sample for later steps (disaggregated)", recipe.placement.apart),
        "rollout.partial": ("responses of later steps begin", recipe.rollout.partial is not None),
    }
    for key, (what, there) in ahead.items():
        if there:
            yield f"{key}: {what} before data.sampler has learned from this one; remove {key} or data.sampler"


def _device(recipe: Recipe) -> Iterator[str]:
    kind, colon, number = recipe.device.partition(":")
    if kind not in DEVICES or (colon and not (number.isascii() and number.isdigit() and len(number) < 4)):
        yield f"device: there is no {recipe.device!r}; write {', '.join(DEVICES)}, or one of several as cuda:1"
    elif kind == "auto" and colon:
        yield f"device: auto has no number; write cuda:{number}, or auto"


def _groups(recipe: Recipe) -> Iterator[str]:
    samples = recipe.train.prompts_per_step * recipe.train.group_size
    if samples > MOST_SAMPLES:
        yield (
            f"train.group_size: {recipe.train.prompts_per_step:,} prompts with {recipe.train.group_size:,} samples "
            f"each are {samples:,} samples a step, and at most {MOST_SAMPLES:,} can be; lower one of the two"
        )
    if recipe.algorithm.compares_group and recipe.train.group_size < 2 and not teaches_alone(recipe):
        yield (
            "train.group_size: a group of 1 has no advantage (its reward minus its own mean is 0); "
            "set train.group_size to 2 or more"
        )


def _text(recipe: Recipe) -> Iterator[str]:
    if recipe.algorithm.trains_on in ("denoising", "picture_pairs", "given_pictures"):
        yield (
            f"algorithm.type: {recipe.algorithm.type} trains denoising steps, and this recipe samples text "
            "(sampling.max_new_tokens); use grpo, or a diffusion pipeline and its sampling section"
        )
    if recipe.train.micro_batch_tokens is not None:
        needed = recipe.response_tokens
        if recipe.train.micro_batch_tokens < needed:
            yield (
                f"train.micro_batch_tokens: one response may have {needed} tokens (sampling.max_new_tokens), which do "
                f"not fit; set it to {needed} plus the longest prompt, or more"
            )
    if not recipe.model.offload and not any(teacher.model for teacher in recipe.teacher):
        yield "model.offload: it moves the encoders and the VAE of picture models, and text has none; remove it"
    yield from recipe.in_vain(_NOT_OF_TEXT)
    yield from _pixels(recipe)
    least, most = recipe.decoding.min_new_tokens, recipe.decoding.max_new_tokens
    if least > most:
        yield (
            f"sampling.min_new_tokens: no response has more than {most} tokens (sampling.max_new_tokens); set it to "
            f"{most} or less"
        )
    if recipe.rollout.engine == "sglang" and least and recipe.decoding.stop:
        yield (
            "sampling.min_new_tokens: with sglang a string of sampling.stop may end a response before; remove one of "
            "the two, or set rollout.engine to vllm_server"
        )
    if recipe.rollout.engine == "sglang" and recipe.rollout.partial and recipe.decoding.repetition_penalty != 1:
        yield (
            "sampling.repetition_penalty: sglang counts no tokens that a response had before it was cut; remove it or "
            "rollout.partial, or set rollout.engine to vllm_server"
        )
    if recipe.performance.compile and not recipe.rollout.in_process:
        samples = recipe.rollout.engine_name
        yield f"performance.compile: of text it is for sampling in this process, and {samples} samples; remove it"
    if recipe.pipeline.startswith("llm/"):
        clips = f"{recipe.pipeline} reads no clips; remove it, or set a pipeline of vlm/"
        pictures = f"{recipe.pipeline} sees no pictures; remove it, or set a pipeline of vlm/"
        yield from recipe.in_vain(dict.fromkeys(("data.fps", "data.max_frames"), clips))
        yield from recipe.in_vain(dict.fromkeys(("model.min_pixels", "model.max_pixels"), pictures))


def _unused(recipe: Recipe) -> Iterator[str]:
    """Keys of ``rollout`` that nothing reads where the weights that train also sample."""
    if not recipe.rollout.in_process or recipe.placement.apart:
        return
    for key in recipe.rollout.changed("update_bucket_mib", "weight_transport"):
        yield f"rollout.{key}: the weights that train also sample, so none travel; remove it"
    if recipe.makes != "text" or recipe.algorithm.kind == "offline":
        what = "pictures that the trained weights draw have" if recipe.makes != "text" else "texts that are given have"
        for key in recipe.rollout.changed("importance", "importance_cap", "importance_floor", "importance_mode"):
            yield f"rollout.{key}: {what} no importance weights; remove it"
    elif recipe.rollout.importance in ("auto", "none"):
        for key in recipe.rollout.changed("importance_cap", "importance_floor", "importance_mode"):
            yield f"rollout.{key}: there are no importance weights here; remove it, or set rollout.importance=token"


def _scores(recipe: Recipe) -> Iterator[str]:
    """A reward model reads given texts, and writes none."""
    if not recipe.algorithm.trains_scores or not isinstance(recipe.sampling, TextSampling):
        return
    keys = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    why = f"{recipe.algorithm.type} samples nothing; remove it"
    yield from recipe.in_vain(dict.fromkeys((*(f"sampling.{key}" for key in keys), "eval.temperature"), why))


def _pixels(recipe: Recipe) -> Iterator[str]:
    """Check limits for pictures in prompts: engines that preprocess pictures themselves must have the same limits."""
    low, high, rollout = recipe.model.min_pixels, recipe.model.max_pixels, recipe.rollout
    key = "model.max_pixels" if low is None else "model.min_pixels"
    if low is None and high is None:
        return
    if low is not None and high is not None and low > high:
        yield f"model.min_pixels: {low} is above model.max_pixels, {high}; lower it"
    if rollout.own_class:
        yield f"{key}: {rollout.engine_name} would not apply it to pictures; remove it, or use a different engine"
    if rollout.engine == "sglang" and "mm_process_config" not in rollout.options:
        yield (
            f"{key}: sglang resizes pictures by itself; set the same limit in rollout.options "
            "({mm_process_config: {image: {max_pixels: ...}}}), or set rollout.engine to vllm_server"
        )


def _pairs(recipe: Recipe) -> Iterator[str]:
    algorithm = recipe.algorithm
    if algorithm.kind != "offline":
        return
    one = {"responses": "response", "given_pictures": "picture"}.get(algorithm.trains_on, "pair")
    if recipe.train.group_size != 1:
        yield (
            f"train.group_size: {algorithm.type} trains on one given {one} per prompt and samples no group; "
            "set train.group_size to 1"
        )
    if isinstance(algorithm, ResponseSettings) and algorithm.mismatches and recipe.train.prompts_per_step < 2:
        yield (
            f"train.prompts_per_step: {algorithm.type} pairs each prompt with the response of a different prompt of "
            "its step, and a step with 1 prompt has none; set it to 2 or more"
        )
    if recipe.rewards:
        yield (
            f"rewards: {algorithm.type} trains on given {one}s and samples nothing that could be rewarded; remove "
            "rewards (eval.rewards measures held-out samples)"
        )
    for key in recipe.scoring.changed("max_failed", "patience"):
        if key == "patience" or recipe.eval.early_stopping is None:  # which counts no evaluation with more failures
            yield f"scoring.{key}: {algorithm.type} calls no reward in its steps; remove it"
    if algorithm.trains_scores and recipe.eval.rewards:
        yield "eval.rewards: a reward model writes no text that could be rewarded; remove eval.rewards"
    if not recipe.rollout.in_process and not recipe.eval.rewards:
        yield (
            f"rollout.engine: {algorithm.type} samples nothing without eval.rewards, so {recipe.rollout.engine_name} "
            "would idle; remove rollout"
        )


def _partial(recipe: Recipe) -> Iterator[str]:
    partial, algorithm = recipe.rollout.partial, recipe.algorithm
    if partial is None:
        return
    if recipe.rollout.in_process:
        yield (
            "rollout.partial: only an engine with its own copy of the weights can interrupt a response and continue it "
            "later; set rollout.engine to vllm, vllm_server or sglang, or remove rollout.partial"
        )
    if algorithm.kind == "offline":
        yield f"rollout.partial: {algorithm.type} samples nothing in training; remove rollout.partial"
    if algorithm.attempts is not None:
        yield (
            "rollout.partial: dynamic sampling needs complete groups to decide which to replace, and partial rollout "
            "leaves responses unfinished; set algorithm.dynamic_sampling to false, or remove rollout.partial"
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
            f"rollout.partial.pools: {partial.pools} do not divide evenly among {recipe.controllers} controllers; "
            f"set it to {-(-partial.pools // recipe.controllers) * recipe.controllers}, or controllers to "
            "a divisor of it"
        )


def _normalize(recipe: Recipe) -> Iterator[str]:
    rollout = recipe.rollout
    if rollout.importance_normalize == "none":
        return
    if recipe.sampling.type != "text" or recipe.algorithm.kind != "policy_gradient":
        yield "rollout.importance_normalize: only sampled text has such weights; remove it"
    elif rollout.in_process and rollout.importance == "auto" and not recipe.placement.apart:
        yield (
            "rollout.importance_normalize: the trained weights also sample, so there are no importance weights; remove "
            "it, or set rollout.importance"
        )


def _diffusion(recipe: Recipe) -> Iterator[str]:
    if recipe.algorithm.trains_on in ("pairs", "responses"):
        yield (
            f"algorithm.type: {recipe.algorithm.type} trains on given {recipe.algorithm.trains_on} of texts; use "
            "picture_dpo, which takes pairs of pictures, diffusion_dpo, which makes pairs from the run's samples, or "
            "sft, which takes pictures with captions"
        )
    elif recipe.algorithm.trains_on == "tokens":
        yield (
            f"algorithm.type: {recipe.algorithm.type} trains tokens, and this recipe samples pictures "
            "(sampling.height, sampling.width); use flow_grpo, or a text pipeline and sampling.max_new_tokens"
        )
    yield from recipe.in_vain(_NOT_OF_PICTURES)
    for key in recipe.rollout.changed("options", "max_gap") if recipe.rollout.in_process else ():
        yield f"rollout.{key}: it is for sampled text; remove it"
    if not recipe.rollout.in_process and recipe.rollout.engine != "sglang":
        yield f"rollout.engine: {recipe.rollout.engine_name} samples text; remove rollout"


def _batches(recipe: Recipe) -> Iterator[str]:
    train = recipe.train
    if recipe.algorithm.kind != "pathwise" and train.group_size % train.updates_per_step:
        yield (
            f"train.updates_per_step: {train.group_size} samples of a group do not divide into "
            f"{train.updates_per_step} updates; use a divisor of train.group_size"
        )
    yield from recipe.algorithm.unread(train.updates_per_step)


def _performance(recipe: Recipe) -> Iterator[str]:
    asked = recipe.performance
    if asked.offload_reference and recipe.model.lora is not None and not recipe.model.continues_adapter:
        yield (
            "performance.offload_reference: with LoRA the reference is the base model with its adapter off, and the "
            "policy needs the base model too; remove it"
        )
    text = recipe.sampling.type == "text"
    known = TEXT_ATTENTION if text else PICTURE_ATTENTION
    if asked.attention is not None and asked.attention not in known:
        yield (
            f"performance.attention: {'transformers' if text else 'diffusers'} has no {asked.attention!r} to train "
            f"with; use {', '.join(known[:-1])} or {known[-1]}, or remove it"
        )
    elif asked.attention in NEEDS_HALF and recipe.model.dtype == "float32":
        yield (
            f"performance.attention: {asked.attention} computes in half precision; set model.dtype to bfloat16, or "
            "remove performance.attention"
        )
    shared = recipe.train.context_parallel > 1
    if not text and shared and asked.attention not in (None, "native"):
        yield (
            f"performance.attention: {asked.attention} was not checked on samples that devices share "
            "(train.context_parallel); set performance.attention to native, or remove it"
        )
    elif text and asked.attention is not None and (recipe.train.backend == "megatron" or shared):
        key = "backend: megatron" if recipe.train.backend == "megatron" else "context_parallel"
        yield f"performance.attention: train.{key} brings its own attention; remove one of the two"
    if asked.optimizer == "adamw_8bit" and recipe.train.backend != "replicated":
        yield (
            "performance.optimizer: 8-bit moments of sharded weights cannot be saved for a different number of "
            f"devices; set it to adamw, or train.backend to replicated (it is {recipe.train.backend})"
        )
    if asked.gather_dtype != "float32":
        if recipe.train.backend != "fsdp":
            yield (
                f"performance.gather_dtype: only weights in shards are gathered, and train.backend is "
                f"{recipe.train.backend}; set it to fsdp, or remove performance.gather_dtype"
            )
        if recipe.model.dtype != asked.gather_dtype:
            yield (
                f"performance.gather_dtype: the model computes in {recipe.model.dtype}; set model.dtype to "
                f"{asked.gather_dtype} too, or remove performance.gather_dtype"
            )
    if asked.offload_optimizer and recipe.train.backend == "megatron":
        yield (
            "performance.offload_optimizer: the state of Megatron-Core's layers stays on its device; remove it, and "
            "set train.distributed_optimizer to divide it among devices with the same weights"
        )


def _quantized(recipe: Recipe) -> Iterator[str]:
    if (kind := recipe.model.quantize) is None:
        return
    if recipe.train.backend != "replicated":
        yield (
            f"model.quantize: weights in {kind} are not divided over devices; set train.backend to replicated, or "
            "remove model.quantize"
        )
    if not recipe.rollout.in_process:
        yield (
            f"model.quantize: {recipe.rollout.engine_name} would sample from a base that is not in {kind}, and "
            "training computes with another; remove rollout, or model.quantize"
        )
    if isinstance(recipe.algorithm, CriticSettings):
        yield (
            f"model.quantize: the critic of {recipe.algorithm.type} trains all weights of a copy of the base, and "
            f"those in {kind} cannot train; set algorithm.type to grpo, or remove model.quantize"
        )


def _labels(recipe: Recipe) -> Iterator[str]:
    counts = Counter(label_of(r.name, r.label) for r in [*recipe.rewards, *recipe.eval.rewards])
    for label, n in counts.items():
        if n > 1:
            yield f"rewards: {n} rewards are called {label!r}; give them different labels (rewards[i].label)"
        if label in ("mean", "std", "dropped"):
            yield f"rewards: the label {label!r} is reserved for the log; set rewards[i].label to a different one"


def _weights(recipe: Recipe) -> Iterator[str]:
    if recipe.rewards and not recipe.teacher and not any(reward.weight for reward in recipe.rewards):
        yield (
            "rewards: all weights are 0, so nothing would be learned; give one of them a weight (rewards[0].weight), "
            "and move rewards that are only measured to eval.rewards"
        )


_RULES: tuple[Callable[[Recipe], Iterable[str]], ...] = (
    *(_device, _sampler, _groups, _batches, _performance, _quantized, _pairs, _unused, _normalize, _scores),
    *(of_midway, of_environment, of_placement, of_moving, of_teachers, of_self_teaching),
    *(_labels, _weights, of_evaluation),
)
"""What is checked of several sections together, whatever is sampled."""

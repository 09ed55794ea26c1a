"""A text pipeline on the meta device, before a weight is loaded, for ``mmrl plan``.

The pipeline's own code then runs on tensors without data (``mmrl.planner.memory``). Only ``generate`` is replaced,
because it reads the values of the drawn tokens. The replacement runs the two forwards that take most memory: the
prompt, and the last token with a full cache. Each is followed by the real sampling code.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from mmrl.config.algorithm_settings import CriticSettings
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError, first_of
from mmrl.core.library_loading import refused
from mmrl.core.rollout_engine import Completion, Request, Settings
from mmrl.core.trajectory import Prompt, Slot
from mmrl.families.text.pipeline import LanguagePipeline
from mmrl.families.text.scoring import open_scorer, score_class
from mmrl.models.description import Beside, Component, Description, Longest, Phase
from mmrl.models.text.base_model import base_model
from mmrl.models.text.conditioner import tokenizer_of
from mmrl.models.text.critic import Critic
from mmrl.models.text.features import PER_TOKEN
from mmrl.models.text.generation import GENERATE
from mmrl.models.text.loading import AutoModel, check_kind, why, without_sampling_defaults
from mmrl.models.text.overlong import OverlongError
from mmrl.models.text.recorded_config import Files
from mmrl.models.text.token_sampling import Draw

if TYPE_CHECKING:  # slow to import
    from transformers import LogitsProcessorList, PretrainedConfig, PreTrainedModel
    from transformers.cache_utils import Cache

CONFIGURED = 512 * 2**20
"""Bytes of vLLM's key-value cache on a CPU (``mmrl.inference.vllm``)."""
LOOKED_AT = 16
"""Prompts that are encoded with their media to find the longest: those whose texts have the most tokens."""
WITH_CLIPS = 16
"""Prompts whose clips are opened to say how many frames are shown."""
MOST_COUNTED = 4000
"""Prompts whose texts are tokenised for that; of a larger data set, those with the most characters."""
PIXELS = 28 * 28
"""Pixels of a picture per token, roughly (Qwen-VL). Only the order in which prompts are encoded depends on it."""
NAMED = 5
"""Prompts that a message names."""


def empty_model(
    auto: type[AutoModel], recipe: Recipe, path: str, tested: tuple[str, ...], otherwise: str
) -> PreTrainedModel:
    """The model of ``mmrl.models.text.loading.load_model`` on the meta device, from ``config.json`` alone. Raises
    ``UserError``."""
    from transformers import AutoConfig, GenerationConfig

    dtype = getattr(torch, recipe.model.dtype) if recipe.model.lora else torch.float32
    wanted = "a directory with config.json"
    with refused(
        lambda reason: f"model.path: {path} cannot be made by {auto.__name__}: {why(reason, wanted, otherwise)}"
    ):
        config = AutoConfig.from_pretrained(path)
        check_kind(config.model_type)
        with torch.device("meta"):
            model = auto.from_config(config, dtype=dtype)
        with suppress(OSError):  # without this file transformers takes the settings of config.json
            model.generation_config = GenerationConfig.from_pretrained(path)
    return without_sampling_defaults(model)


def empty_scorer(path: str, pad_token: int, recipe: Recipe) -> nn.Module:
    """The model of ``mmrl.families.text.scoring.open_policy`` on the meta device. Raises ``UserError``."""
    from transformers import AutoConfig

    with refused(lambda reason: f"model.path: {path} cannot be made a reward model: {reason}"):
        config = AutoConfig.from_pretrained(path)
        config.num_labels = 1
        with torch.device("meta"):
            model = score_class(config)(config)
    nn.Module.to(model, getattr(torch, recipe.model.dtype) if recipe.model.lora else torch.float32)
    config.get_text_config().pad_token_id = pad_token
    return open_scorer(model.requires_grad_(False).eval(), recipe)


def describe(pipeline: LanguagePipeline, files: Files) -> Description:
    """Describe a ``pipeline`` whose policy is on the meta device. Raises ``UserError`` if no response would fit."""
    recipe, context = pipeline.recipe, pipeline.context
    if pipeline.pairs is None and context is not None and recipe.response_tokens >= context:
        key = "sampling.max_new_tokens" if recipe.environment is None else "environment.max_tokens"
        raise UserError(
            f"{key}: {recipe.response_tokens} tokens leave no room for a prompt in the "
            f"model's context of {context}; set it to less than {context}"
        )
    if pipeline.world is not None:  # the longest episode, as one turn
        pipeline.settings = pipeline.settings.model_copy(update={"max_new_tokens": recipe.response_tokens})
        pipeline.world.plays = False
    if files.recorded:
        _take_the_limit(pipeline)
    policy = pipeline.policy
    setattr(policy, GENERATE, partial(_two_forwards, policy))
    for router in (module for module in policy.modules() if type(module).__name__ in _ROUTERS):
        router.forward = partial(_evenly, router, router.forward)
    phases = frozenset(get_args(Phase))
    name = type(base_model(policy)).__name__
    components = [Component("policy", name, policy, phases)]
    if isinstance(recipe.algorithm, CriticSettings):
        with torch.device("meta"):
            pipeline.critic = Critic(policy)
        components.append(Component("critic", type(pipeline.critic.body).__name__, pipeline.critic, phases))
    for teacher in pipeline.teachers.values():
        components.append(Component("teacher", type(teacher).__name__, teacher, frozenset({"train"})))
    if not recipe.rollout.in_process:
        pipeline.engine = _FullLength()  # type: ignore[assignment]  # sampling asks it for nothing else
    beside = _beside(recipe, policy)
    if pipeline.world is not None and (drawer := pipeline.world.drawer) is not None:
        beside.append(Beside("model that draws", drawer.what, drawer.bytes, kept=drawer.bytes))
    return Description(
        pipeline,
        components,
        files.source,
        partial(_longest, pipeline),
        beside,
        cache_numbers=cached(base_model(policy).config),
        by_rows=getattr(base_model(policy).config, "quantization_config", None) is None,
    )


_ROUTERS = ("JetMoeTopKGating",)
"""Modules that ask how many tokens each expert has, which nothing without data can answer."""


class _Numbers(TorchFunctionMode):
    """Inside, ``Tensor.item`` gives these numbers, one after another."""

    def __init__(self, numbers: Iterable[int]) -> None:
        super().__init__()
        self._numbers = iter(numbers)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return next(self._numbers) if func is Tensor.item else func(*args, **(kwargs or {}))


def _evenly(router: Any, forward: Callable[[Tensor], Any], hidden_states: Tensor) -> Any:
    """The output of ``router`` for ``hidden_states`` ``[tokens, H]``, as if all of its experts had as many tokens."""
    tokens = router.top_k * len(hidden_states)
    with _Numbers((tokens + n) // router.num_experts for n in range(router.num_experts)):
        return forward(hidden_states)


def cached(config: PretrainedConfig) -> Callable[[float], float]:
    """How many numbers a row of so many tokens leaves in the keys and values of all layers, by the kinds of layers that
    transformers makes its cache of: a window holds its width at most, a linear attention nothing per token."""
    from transformers import DynamicCache

    text = config.get_text_config()
    layers = DynamicCache(config=text).layers
    configs = getattr(text, "per_layer_config", None) or [text] * len(layers)  # heads may differ from layer to layer
    sizes = [
        (_heads(of_layer), getattr(layer, "sliding_window", None))
        for layer, of_layer in zip(layers, configs, strict=False)
        if hasattr(layer, "keys")
    ]
    return lambda tokens: float(sum(n * (tokens if most is None else min(tokens, most)) for n, most in sizes))


def _heads(config: PretrainedConfig) -> int:
    """How many numbers the keys and values of a token are in a layer; 0 if the configuration does not tell."""
    queries = getattr(config, "num_attention_heads", None) or 1
    width = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 0) // queries
    return 2 * (getattr(config, "num_key_value_heads", None) or queries) * width


def _longest(pipeline: LanguagePipeline, prompts: Sequence[Prompt]) -> Longest:
    """The usable prompt with the most tokens, and a note about those that are too long."""
    overlong, good, why = list[OverlongError](), list[tuple[Prompt, int]](), list[str]()
    took = list[float]()
    error = pipeline.recipe.overlong == "error"
    for prompt in _by_length(pipeline, prompts):
        if len(good) == LOOKED_AT and not (error and prompt.media):  # its tokens are unknown until it is encoded
            break
        began = time.process_time()
        try:
            good.append((prompt, _tokens(pipeline, prompt)))
            took.append(time.process_time() - began)
        except OverlongError as found:
            overlong.append(found)
        except BadPromptError as found:
            why.append(str(found))
    if error and overlong:
        raise UserError(
            f"data: {_named(overlong, len(prompts))}; shorten them or take them out of the data, raise the limit, "
            f"or set data.overlong to {'skip or cut' if good else 'cut'}"
        )
    if not good:
        first = [*map(str, overlong[:1]), *why[:1]][0]
        raise UserError(f"data: none of {len(prompts)} prompts can be used; {first}")
    notes = [f"{_named(overlong, len(prompts))}: they are left out (data.overlong)"] if overlong else []
    notes += _of_clips(pipeline, [prompt for prompt, _ in good])
    return Longest(*max(good, key=lambda found: found[1]), notes, median(took))


def _of_clips(pipeline: LanguagePipeline, prompts: Sequence[Prompt]) -> list[str]:
    """How many frames of clips the model is shown, as a note."""
    having = [prompt for prompt in prompts if any(medium.kind == "video" for medium in prompt.media)][:WITH_CLIPS]
    frames = [len(clip.indices) for prompt in having for clip in pipeline.conditioner.media(prompt)[1]]
    if not frames:
        return []
    shown = f"{min(frames)}" if min(frames) == max(frames) else f"{min(frames)} to {max(frames)}"
    return [f"{shown} frames are shown of a clip, of the {len(frames)} looked at (data.fps, data.max_frames)"]


def _named(overlong: Sequence[OverlongError], of: int) -> str:
    names = first_of([error.prompt for error in overlong], NAMED)
    return f"{len(overlong)} of {of} prompts looked at are too long ({names}); of the first, {overlong[0].reason}"


def _by_length(pipeline: LanguagePipeline, prompts: Sequence[Prompt]) -> list[Prompt]:
    """Sorted, the probably longest first: by the tokens of their texts and an estimate for their pictures."""
    most = len(prompts) if pipeline.recipe.overlong == "error" else MOST_COUNTED
    columns = pipeline.recipe.algorithm.given_texts.values()
    if len(prompts) > most:
        prompts = sorted(prompts, key=lambda p: sum(map(len, _texts(p, columns))), reverse=True)
    texts = ["\n".join(_texts(p, columns)) for p in prompts[:most]]
    tokens = tokenizer_of(pipeline.conditioner.saved)(texts, add_special_tokens=False).input_ids
    counted = [len(ids) for ids in tokens] + [0] * (len(prompts) - most)
    pixels = [sum(medium.pixels or 0 for medium in p.media) for p in prompts]
    ranked = sorted(range(len(prompts)), key=lambda n: counted[n] + pixels[n] / PIXELS, reverse=True)
    return [prompts[n] for n in ranked]


def _texts(prompt: Prompt, columns: Iterable[str]) -> list[str]:
    return [prompt.conversation, prompt.system or "", *(str(prompt.meta.get(name, "")) for name in columns)]


def _tokens(pipeline: LanguagePipeline, prompt: Prompt) -> int:
    """Tokens of the longest row with this prompt. Raises ``BadPromptError`` for a prompt that would be skipped."""
    overlong = "skip" if pipeline.recipe.overlong == "error" else None  # all of them are to be named
    if pipeline.world is not None:
        prompt = pipeline.world.begun(Slot(0, 0, 0, prompt)).prompt
    prompt, features = pipeline.fitter.encode(prompt, pipeline.limit, overlong)
    length = len(features["input_ids"])
    if pipeline.pairs is None:
        return length + pipeline.recipe.response_tokens
    made, names = pipeline.pairs.encoded(prompt, length), pipeline.pairs.columns
    return len(names) * (length + max(len(made[name]) for name in names))


def _take_the_limit(pipeline: LanguagePipeline) -> None:
    """With a tokenizer that only estimates: give every prompt ``max_prompt_tokens``, if set, and refuse none."""
    conditioner, most = pipeline.conditioner, pipeline.settings.max_prompt_tokens
    encode = conditioner.encode

    def encode_to_the_limit(prompt: Prompt) -> dict[str, Tensor]:
        made = encode(prompt)
        missing = (most or 0) - len(made["input_ids"])
        if not most or (missing < 0 and prompt.media):
            return made
        return {name: pad(value, (missing, 0)) if name in PER_TOKEN else value for name, value in made.items()}

    conditioner.encode = encode_to_the_limit
    pipeline.settings = pipeline.settings.model_copy(update={"max_prompt_tokens": None})
    pipeline.context = pipeline.engine_context = None


def _two_forwards(
    policy: nn.Module,
    *,
    input_ids: torch.LongTensor,
    attention_mask: Tensor,
    logits_processor: LogitsProcessorList,
    max_new_tokens: int,
    eos_token_id: list[int],
    pad_token_id: int,
    do_sample: bool,
    stopping_criteria: object = None,
    **given: Tensor | bool,
) -> Tensor:
    """A replacement of ``policy.generate``. All responses but one have the maximal length: rows of equal length would
    need no attention mask, and less memory."""
    draw: Draw = logits_processor[0]
    ends, padding = eos_token_id, pad_token_id
    assert not do_sample
    rows = len(input_ids)
    attention_mask[0, 0] = rows == 1  # as if this prompt were shorter
    out = policy(input_ids=input_ids, attention_mask=attention_mask, **given, use_cache=True, logits_to_keep=1)
    scores = logits_processor(input_ids, out.logits[:, -1].to(copy=True, dtype=torch.float32))
    caches = {name: out[name] for name in _CACHES if out.get(name) is not None}
    del out
    if max_new_tokens > 1:
        for cache in caches.values():
            _grow(cache, max_new_tokens - 2)
        draw.log_probs *= max_new_tokens - 1
        whole = pad(attention_mask, (0, max_new_tokens - 1), value=1)
        if caches:
            places = whole.sum(1, keepdim=True) - 1
            last = policy(
                input_ids=input_ids[:, -1:], attention_mask=whole, position_ids=places, use_cache=True, **caches
            )
        else:  # it keeps nothing, and reads the whole row for each token
            last = policy(input_ids=pad(input_ids, (0, max_new_tokens - 1)), attention_mask=whole)
        logits_processor(input_ids, last.logits[:, -1].to(copy=True, dtype=torch.float32))
    del scores  # transformers keeps the scores of a token until those of the next are computed
    token = next(n for n in range(len(ends) + 2) if n not in {*ends, padding})
    drawn = torch.full((rows, max_new_tokens), token)
    if rows > 1 and max_new_tokens > 1:
        drawn[0, -2] = ends[0]
    return torch.cat([input_ids, drawn], 1)


_CACHES = ("past_key_values", "cache_params")
"""The names under which transformers' models return their cache and take it: of attention, and of Mamba."""


def _grow(cache: Cache, tokens: int) -> None:
    """Put so many tokens into every layer of a cache, by the layer's own rule: a window forgets what leaves it, a
    sparse attention keeps what it chooses by too, and the state of a linear attention keeps its size."""
    layers: list[Any] = list(cache.layers)  # of many classes, which share no method
    for layer in layers:
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is not None and values is not None:
            layer.update(*(t.new_empty((*t.shape[:2], tokens, *t.shape[3:])) for t in (keys, values)))
        chosen_by = getattr(layer, "indexer_keys", None)
        if chosen_by is not None:
            layer.update_indexer(chosen_by.new_empty((len(chosen_by), tokens, *chosen_by.shape[2:])))


class _FullLength:
    """Final class. A replacement of an engine: every response but one has the maximal length."""

    def generate(self, requests: Sequence[Request], settings: Settings) -> list[Completion]:
        n = settings.max_new_tokens
        token = next(t for t in range(len(settings.stop_token_ids) + 1) if t not in settings.stop_token_ids)
        made = [Completion([token] * n, [0.0] * n, "length", len(r.prompt_ids)) for r in requests]
        if n > 1 and len(made) > 1:
            made[0] = Completion([token] * (n - 1), [0.0] * (n - 1), "stop", made[0].prompt_tokens)
        return made

    def close(self) -> None: ...


def _beside(recipe: Recipe, policy: nn.Module) -> list[Beside]:
    """The memory that an engine with its own weights takes on the training device: as configured, or its default."""
    from mmrl.inference.vllm import GPU_MEMORY

    engine, options = recipe.rollout.engine, recipe.rollout.options
    if recipe.rollout.in_process:
        return []
    if recipe.rollout.own_class:
        given = "".join(f", {name}: {value}" for name, value in options.items())
        return [Beside("engine", f"{recipe.rollout.engine_name}{given}; its memory is not known to mmrl")]
    elsewhere = options.get("url") or "CUDA_VISIBLE_DEVICES" in (options.get("environment") or {})
    if elsewhere or engine == "sglang":
        return [Beside("engine", f"{engine}, on devices of its own" if elsewhere else f"{engine}: not known to mmrl")]
    size = torch.empty((), dtype=getattr(torch, recipe.model.dtype)).element_size()
    weights = sum(p.numel() for p in policy.parameters()) * size
    auto = recipe.device == "auto" and torch.cuda.is_available()
    if auto or recipe.device.startswith("cuda"):
        share = options.get("gpu_memory_utilization", GPU_MEMORY if engine == "vllm" else 0.92)
        given = "gpu_memory_utilization" if "gpu_memory_utilization" in options else "its default"
        kept = weights if recipe.model.lora else 0  # as mmrl.inference.sleep_mode has it
        return [Beside("engine", f"{engine}: {share:.0%} of the device's memory ({given})", share=share, kept=kept)]
    cache = options.get("kv_cache_memory_bytes", CONFIGURED)
    return [Beside("engine", f"{engine}: weights in {recipe.model.dtype}, and its cache", weights + cache)]

"""Sample with an engine that has its own weights, and keep those equal to the policy's."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from importlib import import_module
from secrets import randbits
from typing import TYPE_CHECKING, TypeAlias

import torch
from PIL.Image import Image
from torch import Tensor

from mmrl.config.replicas import spread
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.media import Clip
from mmrl.core.randomness import seed_of
from mmrl.core.rollout_engine import Completion, Request, RolloutEngine, Settings
from mmrl.core.trajectory import Prompt, SampleId, TextRows
from mmrl.inference import own_class, server_devices
from mmrl.inference.lazy_engine import Given, LazyEngine, NoEngine
from mmrl.inference.server_process import Timeouts
from mmrl.inference.weight_files import Sending, transport_for
from mmrl.models.lora import PREFIX, lora_layers, modules_of
from mmrl.models.policy import Policy
from mmrl.models.text.base_model import base_model, has_adapter, peft_model

if TYPE_CHECKING:  # slow to import
    from peft import PeftModel
    from transformers import PreTrainedModel

Arguments: TypeAlias = "dict[str, Json | Timeouts | Sending | torch.device]"
"""Arguments of an engine's constructor."""
_SHIPPED = {
    "vllm": "mmrl.inference.vllm:VllmEngine",
    "vllm_server": "mmrl.inference.vllm_server:VllmServer",
    "sglang": "mmrl.inference.sglang:SglangServer",
}
"""The classes of the engines that a recipe may name."""
_TIMEOUTS = {"start_timeout_s": "start_s", "request_timeout_s": "request_s"}
"""What the options of a server call the fields of ``Timeouts``."""


def open_engine(
    recipe: Recipe, path: str, context: int | None, device: torch.device, *, sees: bool
) -> RolloutEngine | None:
    """The engine of ``rollout.engine`` on the model at ``path``; None where the training process samples.

    ``context``: the number of positions of the model. ``device``: the device that trains. ``sees``: the model takes
    pictures. Raises ``UserError`` if the engine cannot start.

    When it starts: on one device at once; then it sleeps until it samples, if it can and ``placement.sleep`` is set. If
    a controller has several devices, when this device samples for the first time. With sharded weights at once, because
    all ranks together send the weights to all engines. On a device that never samples: never.
    """
    rollout = recipe.rollout
    if rollout.in_process:
        return None
    if not server_devices.here().samples:
        return NoEngine(engine_context(recipe, context) or 0)
    options = dict(rollout.options)
    given: Arguments = {
        "max_model_len": options.pop("max_model_len", engine_context(recipe, context)),
        "dtype": recipe.model.dtype,
        "lora_rank": recipe.model.lora.rank if recipe.model.lora else None,
    }
    images = 4 + (0 if recipe.environment is None else recipe.environment.max_pictures)
    if rollout.own_class:
        return _own(recipe, path, {**given, "device": device, "images": images if sees else 0, "clips": 0})
    for name in ("environment", "url", "key", "images", "clips"):
        if name in options:
            given[name] = options.pop(name)
    timeouts = {field: options.pop(name) for name, field in _TIMEOUTS.items() if name in options}
    if timeouts:
        given["timeouts"] = Timeouts(**timeouts)
    if not rollout.reproducible and "url" not in given:  # the next start draws other samples, too
        sglang: dict[str, Json] = {"random_seed": randbits(31), "enable_deterministic_inference": False}
        options = (sglang if rollout.engine == "sglang" else {"seed": randbits(31)}) | options
    if rollout.engine != "vllm":  # which takes tensor after tensor
        given["sending"] = _sending(recipe, device)
    if sees and rollout.engine != "sglang":
        given.setdefault("images", images)
        pixels: dict[str, Json] = {name: getattr(recipe.model, name) for name in ("min_pixels", "max_pixels")}
        pixels = {name: value for name, value in pixels.items() if value is not None}
        if pixels:  # it makes tokens of pictures itself
            options.setdefault("mm_processor_kwargs", {"images_kwargs": pixels})
    environment: dict[str, str] = rollout.options.get("environment") or {}
    several, elsewhere = recipe.devices_per_controller > 1, "CUDA_VISIBLE_DEVICES" in environment
    sleeps = recipe.placement.sleep and not elsewhere and "url" not in given
    start = partial(_start, rollout.engine, path, options, given)
    if rollout.engine == "vllm" and not sleeps:
        return start()
    if several and recipe.threads and not torch.cuda.is_available():  # a server with a device of its own
        given["environment"] = {"OMP_NUM_THREADS": str(recipe.threads), **environment}
    if sleeps and rollout.engine == "vllm_server" and torch.cuda.is_available():
        options.setdefault("enable_sleep_mode", True)
    return _lazy_engine(recipe, start, sleeps)


def _sending(recipe: Recipe, device: torch.device) -> Sending:
    """How weights go from ``device`` to the recipe's server."""
    rollout, options = recipe.rollout, recipe.rollout.options
    own = "CUDA_VISIBLE_DEVICES" in (options.get("environment") or {})
    transport = transport_for(
        rollout.weight_transport,
        engine=rollout.engine,
        cuda=device.type == "cuda" and torch.version.hip is None,
        first=not device.index,
        devices=spread(options),
        several=options.get("data_parallel_size", 1) != 1,
        own=own or bool(server_devices.here().visible),
        adapter=recipe.model.lora is not None,
    )
    return Sending(rollout.update_bucket_mib * 2**20, transport, optional=transport != rollout.weight_transport)


def _lazy_engine(recipe: Recipe, start: Callable[[], RolloutEngine], sleeps: bool) -> RolloutEngine:
    engine, several = LazyEngine(start, to_sleep=sleeps), recipe.devices_per_controller > 1
    if not several or (recipe.train.backend != "replicated" and not recipe.placement.apart):
        engine.ready()
    if not several and engine.ready().sleeps:  # elsewhere it stays up for the first step
        engine.sleep()
    return engine


def _own(recipe: Recipe, path: str, given: Arguments) -> RolloutEngine:
    """An engine that is the user's own class; it sleeps and wakes as the other engines do."""
    given["bucket_bytes"] = recipe.rollout.update_bucket_mib * 2**20
    start = own_class.starter(recipe.rollout.engine, path, recipe.rollout.options, given)
    return _lazy_engine(recipe, start, recipe.placement.sleep)


def engine_context(recipe: Recipe, context: int | None) -> int | None:
    """Tokens of prompt and response that the recipe's engine takes; None where the training process samples."""
    if recipe.rollout.in_process:
        return None
    prompt = recipe.decoding.max_prompt_tokens
    length = prompt + recipe.response_tokens if prompt else min(context or 4096, 4096)
    given = recipe.rollout.options.get("max_model_len")
    return given if isinstance(given, int) else length


def _start(name: str, path: str, options: dict[str, Json], given: Arguments) -> RolloutEngine:
    try:
        return engine_class(name)(path, **given, options=options)
    except TypeError as error:
        raise UserError(f"rollout.options: {name} does not take them: {error}") from error


def engine_class(name: str) -> Callable[..., RolloutEngine]:
    """The class of the shipped engine ``name``. Imported when it is asked for, since each needs its own library."""
    module, _, made = _SHIPPED[name].partition(":")
    return getattr(import_module(module), made)


class GivenWeights(Given):
    """Final class. Sends weights to an engine, and counts what it got."""

    def push(self, engine: RolloutEngine, policy: Policy) -> None:
        """Send the policy's present weights to the engine: only the adapter if one trains, else all weights.

        Sharded tensors are gathered one at a time, by all ranks together.
        """
        start = time.perf_counter()
        if not has_adapter(policy.module):
            engine.update(self.counted(streamed(policy)))
        else:
            from peft import LoraConfig
            from peft.utils import get_peft_model_state_dict

            module = peft_model(policy.module)
            config = module.peft_config["default"]
            assert isinstance(config, LoraConfig)
            mine = {name: policy.weights.whole(name, p.detach()) for name, p in policy.trainable.items()}
            tensors = get_peft_model_state_dict(module, state_dict=mine, save_embedding_layers=False)
            rank, alpha = config.r, float(config.lora_alpha)
            if config.rank_pattern or config.alpha_pattern or config.use_rslora:  # engines take one scale for all
                rank = alpha = self._scaled(module, tensors)
            targets = config.target_modules or ()
            named = sorted({m.rpartition(".")[2] for m in modules_of(tensors)} if isinstance(targets, str) else targets)
            engine.update_lora(dict(self.counted(tensors.items())), rank, float(alpha), named)
        self.updates += 1
        self.update_seconds += time.perf_counter() - start

    @staticmethod
    def _scaled(module: PeftModel, tensors: dict[str, Tensor]) -> int:
        """Multiply the scales of its layers into ``tensors``; the largest rank."""
        ranks = []
        for name, layer in lora_layers(module):
            for key in (f"{PREFIX}{name}.lora_B.weight", f"{PREFIX}{name}.lora_embedding_B"):
                if key in tensors:
                    tensors[key] = tensors[key] * layer.scaling["default"]
                    ranks.append(layer.r["default"])
        return max(ranks)

    def again(self, engine: RolloutEngine, policy: Policy) -> None:
        """``push`` to an engine that was started again, from this rank only. Raises ``UserError`` if weights are
        sharded."""
        if policy.weights.in_shards:
            raise UserError(
                "the rollout engine was lost while it sampled, and the weights are sharded: only all controllers "
                "together can send them again; continue from the last checkpoint with --resume"
            )
        self.push(engine, policy)


@torch.no_grad()
def streamed(policy: Policy) -> Iterator[tuple[str, Tensor]]:
    """All weights, whole, by their names in a checkpoint; tied weights come once, as in ``save_pretrained``.

    Where ranks hold parts, all of them call it together, outside of ``Weights.unsharded``; only one tensor is whole at
    a time unless the caller keeps it.
    """
    model = base_model(policy.module)
    configs = (model.config, model.config.get_text_config())  # of some vision families only the first says it
    ties = any(getattr(config, "tie_word_embeddings", False) for config in configs)
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if ties else set()
    for name, tensor in policy.module.state_dict().items():
        if name in policy.trainable:
            yield from _as_saved(model, name, policy.weights.whole(name, policy.trainable[name].detach()))
        elif name not in tied:
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # frozen, and in shards
            yield from _as_saved(model, name, whole)


def _as_saved(model: PreTrainedModel, name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint that transformers joins into ``tensor`` (such as a layer's experts), or itself."""
    from transformers.core_model_loading import revert_weight_conversion

    saved = revert_weight_conversion(model, {name: tensor})
    yield from saved.items() if len(saved) > 1 else [(name, tensor)]


def request(
    run_seed: int | None,
    sample: SampleId,
    prompt: Prompt,
    features: Mapping[str, Tensor],
    extra: JsonObject,
    text: str,
    unexpanded: Sequence[int],
    media: Sequence[Image | Clip],
) -> Request:
    """One sample to draw, with a seed of its own (without, where ``run_seed`` is None); ``extra``: further parameters
    of the engine."""
    name = f"step {sample.step}, slot {sample.slot}, attempt {sample.attempt}, sample {sample.sample}"
    place = sample.step, sample.slot, sample.attempt, sample.sample
    return Request(
        features["input_ids"].tolist(),
        text,
        None if run_seed is None else seed_of(run_seed, *place, "tokens"),
        media,
        name=name,
        max_new_tokens=prompt.max_new_tokens,
        extra=extra,
        unexpanded_ids=unexpanded,
        features=features,
    )


def settings_of(recipe: Recipe, temperature: float, stop: Sequence[int]) -> Settings:
    """The recipe's sampling settings in the engine's format."""
    decoding = recipe.decoding
    return Settings(
        decoding.max_new_tokens,
        temperature,
        decoding.top_p,
        decoding.top_k,
        stop,
        stop=decoding.stop,
        min_new_tokens=decoding.min_new_tokens,
        repetition_penalty=decoding.repetition_penalty,
        min_p=decoding.min_p,
    )


def unstack(rows: TextRows) -> list[Completion]:
    """The tokens drawn for each row so far, to be continued; ``prompt_tokens`` is 0."""
    found = zip(rows.spoken(), rows.padded("log_probs").tolist(), rows.responses, strict=True)
    return [Completion(tokens, log_probs[:n], "cut", 0) for tokens, log_probs, n in found]


def appended(done: Completion, more: Completion) -> Completion:
    """A response with the tokens that were drawn after it; each token keeps its log-prob."""
    tokens, log_probs = [*done.token_ids, *more.token_ids], [*done.log_probs, *more.log_probs]
    return Completion(tokens, log_probs, more.finish, more.prompt_tokens)


def stack(
    completions: Sequence[Completion], forbidden: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Tokens ``[B, T]``, log-probs ``[B, T]``, mask ``[B, T]`` and truncated ``[B]`` of what an engine drew.

    A response is cut before its first ``forbidden`` token (an engine may draw those, with next to no probability).
    """
    longest = max(1, *(len(c.token_ids) for c in completions))
    tokens = torch.zeros(len(completions), longest, dtype=torch.long)
    log_probs, mask = torch.zeros(len(completions), longest), torch.zeros(len(completions), longest)
    cut = []
    for i, c in enumerate(completions):
        n = next((n for n, token in enumerate(c.token_ids) if token in forbidden), len(c.token_ids))
        tokens[i, :n] = torch.tensor(c.token_ids[:n])
        log_probs[i, :n] = torch.tensor(c.log_probs[:n])
        mask[i, :n] = 1.0
        cut.append(n < len(c.token_ids) or c.finish != "stop")
    truncated = torch.tensor(cut)
    return tokens.to(device), log_probs.to(device), mask.to(device), truncated.to(device)

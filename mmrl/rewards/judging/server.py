"""A judge in a vLLM server that mmrl starts: processes on a private Unix socket, ended with the run.

Run with vLLM 0.32.0 on a CPU; the processes are those of ``mmrl.inference.server_process``. On a GPU a server that has
to sleep uses vLLM's own sleep mode (level 1: its weights wait in the host's memory), which we have not run; elsewhere
it is ended and started again.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from torch import cuda

from mmrl.config.replicas import spread
from mmrl.core.errors import LostServerError
from mmrl.core.json_types import JsonObject
from mmrl.core.notices import starting, tell
from mmrl.core.reward_contract import Weights, before_loading
from mmrl.inference.lazy_engine import RESTARTS
from mmrl.inference.server_process import Client, Process, flags, new_key, private_folder
from mmrl.inference.vllm_api import environment, require_vllm
from mmrl.models.text.control_tokens import ControlTokens
from mmrl.rewards.judging.answers import Kind
from mmrl.rewards.judging.asking import Ask, Keep, Outcome, Settings
from mmrl.rewards.judging.local import fingerprint
from mmrl.rewards.judging.remote import Endpoint, Requests
from mmrl.rewards.judging.replay import recorded_here

NAME = "judge"
"""The model's name on the server."""
START_S = 900.0
SHARE = 0.92
"""Of a GPU's memory that a vLLM server takes (0.32.0), where ``args`` give no ``gpu_memory_utilization``."""
CACHE = 512 * 2**20
"""Bytes of the key-value cache without a GPU, where ``args`` say nothing of it."""


class VllmServer:
    """Final class. Serves the model at ``path`` from when it is built until ``close``, or until this process ends.

    ``args``: further options of vLLM's server, as in ``{max_model_len: 4096, gpu_memory_utilization: 0.4}``.
    ``python``: the interpreter of an environment that has vLLM, where ours has none. ``sleeps``: it is to be put to
    sleep, which needs a GPU. Starting takes 20 to 60 s; raises ``UserError`` with the server's last lines where it ends
    before it is up, or is not up within ``start_s`` seconds.
    """

    url = "http://127.0.0.1"
    """Where it answers on its socket."""

    def __init__(
        self,
        path: str,
        args: JsonObject | None = None,
        python: str | None = None,
        start_s: float = START_S,
        *,
        sleeps: bool = False,
    ) -> None:
        self.key, self.sleeps = new_key(), sleeps and cuda.is_available()
        folder = private_folder("mmrl-judge-")
        self.socket_path = folder / "socket"
        given = {"model": path, "served_model_name": NAME, "uds": self.socket_path}
        given["generation_config"] = "vllm"  # without the checkpoint's sampling defaults, such as a repetition penalty
        given |= {"enable_sleep_mode": True} if self.sleeps else {}
        if python is None and not cuda.is_available():  # as in mmrl.inference.vllm_api
            given |= {"enforce_eager": True, "kv_cache_memory_bytes": CACHE, "enable_chunked_prefill": False}
        module = "mmrl.inference.vllm_server" if python is None else "vllm.entrypoints.openai.api_server"
        name = f"the vLLM server of the judge {path}"
        self._process = Process(
            name,
            [python or sys.executable, "-m", module, *flags({**given, **(args or {})}, off="no-")],
            _variables(self.key, self.sleeps),
            folder,
            folder / "log",
        )
        self._client = Client(name, self.url, self.key, self.socket_path, self._process)
        self._process.wait_until(self._client.healthy, start_s)

    def ended(self) -> bool:
        return self._process.ended()

    def state(self) -> str:
        """How the server ended, for a message; empty while it runs."""
        return f"\n{self._process.lose()}" if self.ended() else ""

    def lost(self) -> bool:
        """Whether it has ended. The check takes a few seconds; it is made after a question without an answer."""
        return self._client.lost() is not None

    def sleep(self) -> None:
        """Give the device's memory back until ``wake``. Of a server that ``sleeps``."""
        self._client.post("/sleep?level=1")

    def wake(self) -> None:
        self._client.post("/wake_up")

    def close(self) -> None:
        """End the server and all its processes."""
        self._client.close()


class ServedJudge:
    """Final class. A judge that a ``VllmServer`` answers for: started by ``wake``, or when it is first asked.

    A server that ended is started again and asked the open questions again: each question has a seed of its own.
    ``requests`` are as in ``Endpoint``; the rest is the server's.
    """

    sees = True

    def __init__(
        self,
        path: str,
        args: JsonObject | None = None,
        python: str | None = None,
        start_s: float = START_S,
        requests: Requests | None = None,
    ) -> None:
        before_loading()
        if python is None and recorded_here() is None:
            require_vllm()
        self.path, self._args, self._python, self._start_s = path, args, python, start_s
        self._requests, self._model = requests or Requests(), f"vllm {fingerprint(path)}"
        self.identity = f"{self._model} {sorted(self._requests.extra.items())}"
        self.server: VllmServer | None = None
        self._endpoint: Endpoint | None = None
        self._asleep = self._to_sleep = False
        self._turn = threading.Lock()

    @property
    def control(self) -> tuple[str, ...]:
        """The control tokens of the tokenizer at ``path``; empty where there is none on this machine."""
        from transformers import AutoTokenizer

        try:
            return tuple(ControlTokens(AutoTokenizer.from_pretrained(self.path, local_files_only=True)).texts)
        except Exception:  # odd values in its files
            return ()  # the server says what is wrong with the model, or has it from elsewhere

    async def ask(
        self,
        asks: Sequence[Ask],
        kind: Kind,
        settings: Settings,
        sent: Counter[str] | None = None,
        keep: Keep | None = None,
    ) -> list[Outcome]:
        """Ask the server, as ``Endpoint.ask`` does. Raises ``UserError`` where the server does not start."""
        outcomes: dict[int, Outcome] = {}
        left = list(range(len(asks)))
        for _ in range(RESTARTS + 1):
            server, endpoint = await asyncio.to_thread(self._up)
            kept = None if keep is None else partial(_keep_of, keep, left)
            answered = await endpoint.ask([asks[n] for n in left], kind, settings, sent, kept)
            outcomes |= zip(left, answered, strict=True)
            left = [n for n in left if outcomes[n].verdict is None]
            if not left or not await asyncio.to_thread(server.lost):
                break
            await asyncio.to_thread(self._replace, server)
        return [outcomes[n] for n in range(len(asks))]

    def _up(self) -> tuple[VllmServer, Endpoint]:
        with self._turn:
            self._wake()
            assert self.server is not None
            assert self._endpoint is not None
            return self.server, self._endpoint

    def _replace(self, lost: VllmServer) -> None:
        """Start another server in place of one that ended, unless another thread has done so."""
        with self._turn:
            if self.server is lost:
                self._end()
                tell(f"the vLLM server of the judge {self.path} ended; starting it again for the open questions")
                with starting():
                    self._begin()

    def wake(self) -> bool:
        """Make the server ready. Returns whether it was started and will stay: no later waking takes as long."""
        with self._turn:
            return self._wake()

    def _wake(self) -> bool:
        if self.server is None:
            return self._begin()
        try:
            if self._asleep:
                self.server.wake()
            self._asleep = False
        except LostServerError:
            self._end()
            self._begin()
        return False

    def sleep(self) -> None:
        """Free the memory: a server that was started with ``sleeps`` sleeps; any other is ended."""
        with self._turn:
            self._to_sleep = True
            if self.server is None or self._asleep:
                return
            if self.server.sleeps:
                with suppress(LostServerError):  # the next wake starts another
                    self.server.sleep()
                self._asleep = True
            else:
                self._end()

    def close(self) -> None:
        """End the server."""
        with self._turn:
            self._end()

    def _begin(self) -> bool:
        """Start the server. Returns whether it stays: it can sleep, or is never put to sleep."""
        self.server = server = VllmServer(self.path, self._args, self._python, self._start_s, sleeps=self._to_sleep)
        try:
            self._endpoint = Endpoint(
                f"{server.url}/v1",
                NAME,
                self._requests,
                identity=self._model,
                secret=server.key,
                state=server.state,
                socket_path=server.socket_path,
            )
        except BaseException:
            self._end()
            raise
        return server.sleeps or not self._to_sleep

    def _end(self) -> None:
        if self.server is not None:
            self.server.close()
        self.server = self._endpoint = None
        self._asleep = False


def _keep_of(keep: Keep, numbers: Sequence[int], n: int, outcome: Outcome) -> None:
    """``keep`` for the ``n``-th of some questions that are ``numbers`` among all."""
    keep(numbers[n], outcome)


def weights_of(path: str, args: JsonObject | None, python: str | None) -> Weights:
    """The memory that a server takes, for ``mmrl plan``."""
    given = args or {}
    cache = _number(given, "kv_cache_memory_bytes", CACHE if python is None else 0)
    share = _number(given, "gpu_memory_utilization", SHARE)
    return Weights(path, str(given.get("dtype", "auto")), share, int(cache), spread(given))


def _number(args: JsonObject, name: str, default: float) -> float:
    value = args.get(name, default)
    return float(value) if isinstance(value, int | float | str) else default


def _variables(key: str, sleeps: bool) -> dict[str, str]:
    eager = (
        {} if cuda.is_available() else {"TORCH_COMPILE_DISABLE": "1"}
    )  # it would need a C++ compiler for the log-probs alone
    awake = {"VLLM_SERVER_DEV_MODE": "1"} if sleeps else {}
    return {**environment(), "VLLM_LOGGING_LEVEL": "INFO", **os.environ, **eager, **awake, "VLLM_API_KEY": key}

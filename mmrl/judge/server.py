"""A vLLM server of our own for a judge: a process on loopback with a key of its own, which ends with us.

Run with vLLM 0.32.0 on a CPU; the processes are those of ``mmrl.engines.served``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import httpx

from mmrl.engines.served import Process, flags, free_port, new_key, private_folder
from mmrl.engines.vllm import environment, require_vllm

NAME = "judge"
"""What the server calls its model."""
START_S = 900.0


class VllmServer:
    """Final class. Serves the model at ``path`` from when it is built until ``close``, or until this process ends.

    ``args``: further options of vLLM's server, as in ``{max_model_len: 4096, gpu_memory_utilization: 0.4}``.
    ``python``: the interpreter of an environment that has vLLM, where ours has none. Starting takes 20 to 60 s; raises
    ``UserError`` with the server's last lines where it ends before it is up, or is not up within ``start_s`` seconds.
    """

    def __init__(
        self, path: str, args: Mapping[str, Any] | None = None, python: str | None = None, start_s: float = START_S
    ) -> None:
        if python is None:
            require_vllm()
        self.key = new_key()
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/v1"
        given = {"model": path, "served_model_name": NAME, "host": "127.0.0.1", "port": port, **(args or {})}
        module = "mmrl.engines.vllm_server" if python is None else "vllm.entrypoints.openai.api_server"
        folder = private_folder("mmrl-judge-")
        self._process = Process(
            f"the vLLM server of the judge {path}",
            [python or sys.executable, "-m", module, *flags(given, off="no-")],
            _variables(self.key),
            folder,
            folder / "log",
        )
        with httpx.Client(trust_env=False, timeout=5) as client:
            self._process.wait_until(lambda: _healthy(client, f"http://127.0.0.1:{port}/health"), start_s)

    def ended(self) -> bool:
        return self._process.ended()

    def state(self) -> str:
        """The end of its log, where it is no more."""
        return f"\nThe judge's server has ended; its last lines:\n{self._process.last_lines()}" if self.ended() else ""

    def close(self) -> None:
        """End the server and all its processes."""
        self._process.close()


def _variables(key: str) -> dict[str, str]:
    from torch import cuda

    # without a GPU, compiling would need a C++ compiler for the log-probs alone
    eager = {} if cuda.is_available() else {"TORCH_COMPILE_DISABLE": "1"}
    return {**environment(), "VLLM_LOGGING_LEVEL": "INFO", **os.environ, **eager, "VLLM_API_KEY": key}


def _healthy(client: httpx.Client, url: str) -> bool:
    try:
        return client.get(url).status_code == 200
    except httpx.HTTPError:
        return False

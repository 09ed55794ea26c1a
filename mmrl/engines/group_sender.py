"""The trainer's side of weights that vLLM's processes receive through a group (``mmrl.engines.weight_groups``)."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import torch

from mmrl.engines.engine_weights import Counted
from mmrl.engines.server_process import Client, Timeouts
from mmrl.engines.sleep_mode import SleepMode
from mmrl.engines.weight_files import Sending
from mmrl.engines.weight_groups import Backend, WeightGroup
from mmrl.errors import UserError

_OPTIONAL_S = 600.0
"""Seconds to wait for the other processes where files would do as well."""


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
            self._group = self._joined(folder / "meeting", 1 + workers)
        except BaseException:
            self._pool.shutdown(wait=False, cancel_futures=True)
            raise

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

"""SGLang's diffusion server as what samples pictures: denoised states come back over HTTP, new weights go as files.

Its rollout interface (``/rollout/generate``) is spoken as SGLang 0.5.23 has it. An answer is MessagePack whose tensors
are safetensors: reading it runs no code. Weights go through ``/update_weights_from_disk``, never through
``/update_weights_from_tensor``, which takes a pickle.

The server asks for no key. One that mmrl starts listens on loopback, where other users of the machine reach it.
"""

from __future__ import annotations

import math
import os
import shutil
import struct
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import torch
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.inference.server_process import Client, Process, Timeouts, flags, free_port, private_folder
from mmrl.inference.sglang import check_url
from mmrl.inference.weight_files import Room, Sending

COMPONENT = "transformer"
_CODE = "from sglang.cli.main import main; main()"
_OURS = {"model_path", "model_type", "model_id", "backend", "host", "port", "dit_precision", "text_encoder_precisions"}
_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
_NOT_ITS_OWN = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""Variables of this process's environment, which another environment's Python must not follow."""
_DEPTH = 16


class Drawn(NamedTuple):
    """One sample, all float32 on the CPU. Its shapes are the server's."""

    latents: Tensor
    """``[T + 1, ...]``: the state before each step, and the last."""
    sigmas: Tensor
    """``[T + 1]``."""
    log_probs: Tensor
    """``[T]``: mean over dimensions; 0 of a step without noise."""
    velocities: Tensor | None
    """``[T, ...]`` where they were asked for (``rollout_debug_mode``)."""


class PictureServer:
    """Final class. A diffusion server that mmrl starts with the environment of ``python``, or one at ``url``, which
    serves the same ``model`` and sees the same disk (``TMPDIR``).

    ``name``: the model's name in SGLang. ``dtype``: of the model that predicts and of the text encoders. ``options``:
    further arguments of ``sglang serve`` by their names. Raises ``UserError``.
    """

    def __init__(
        self,
        model: str,
        name: str,
        dtype: str,
        *,
        python: str,
        options: JsonObject,
        environment: Mapping[str, str] | None = None,
        url: str | None = None,
        timeouts: Timeouts,
        sending: Sending,
    ) -> None:
        self._sending, self._dtype = sending, getattr(torch, dtype)
        self._room: Room | None = None
        said = "SGLang's diffusion server"
        if url is not None:
            check_url(url)
            self._client = Client(said, url, timeout_s=timeouts.request_s)
            if not self._client.healthy():
                raise UserError(f"no diffusion server of SGLang answers at {url}/health; start it, or leave out url")
            return
        taken = sorted(_OURS & options.keys())
        if taken:
            raise UserError(f"rollout.options: {', '.join(taken)}: set by mmrl; take out of options")
        port, private = free_port(), private_folder("mmrl-sglang-")
        weakref.finalize(self, shutil.rmtree, private, True)
        arguments: dict[str, Json] = {
            "model_path": model,
            "model_type": "diffusion",
            "model_id": name,
            "backend": "sglang",
            "host": "127.0.0.1",
            "port": port,
            "dit_precision": _PRECISIONS[dtype],
            "text_encoder_precisions": _PRECISIONS[dtype],
            "warmup_mode": "off",
        }
        variables = {k: v for k, v in os.environ.items() if k not in _NOT_ITS_OWN} | dict(environment or {})
        command = [python, "-c", _CODE, "serve", *flags({**arguments, **options}, off=None)]
        process = Process(said, command, variables, private, private / "log")
        self._client = Client(said, f"http://127.0.0.1:{port}", process=process, timeout_s=timeouts.request_s)
        process.wait_until(self._client.healthy, timeouts.start_s)

    def ask(self, bodies: Sequence[JsonObject]) -> list[Drawn]:
        """One sample for each body of ``/rollout/generate``, in their order. Raises ``UserError``."""
        names = [uuid4().hex for _ in bodies]
        for name, body in zip(names, bodies, strict=True):
            self._client.begin(name, "/rollout/generate", body)
        said: dict[str, Drawn] = {}
        while len(said) < len(names):
            said |= {name: drawn(answer) for name, answer in self._client.answers(names, None)}
        return [said[name] for name in names]

    def update(self, weights: Iterable[tuple[str, Tensor]], need: int) -> None:
        """Replace the named weights of the model that predicts; the others stay. ``need``: their bytes at most."""
        self._room = self._room or Room(need)
        cast = ((name, tensor.to(self._dtype)) for name, tensor in weights)
        with self._room.written(cast, self._sending, inside=COMPONENT) as folder:
            body: dict[str, Json] = {"model_path": str(folder), "target_modules": [COMPONENT]}
            answer = self._client.post("/update_weights_from_disk", body)
        if not isinstance(answer, Mapping) or answer.get("success") is not True:
            raise UserError(f"SGLang's diffusion server did not take new weights: {str(answer)[:600]}")

    def close(self) -> None:
        """End the server, if mmrl started it. Harmless when called twice."""
        self._client.close()
        if self._room is not None:
            self._room.close()


def drawn(answer: object) -> Drawn:
    """What the server's answer to one body holds. Raises ``UserError`` where it is none, or not finite."""
    try:
        if not isinstance(answer, bytes):
            raise ValueError("it is no MessagePack")
        match unpacked(answer):
            case [{"dit_trajectory": {"latents": latents, "sigmas": sigmas}, "rollout_log_probs": log_probs, **rest}]:
                pass
            case _:
                raise ValueError("it has no dit_trajectory and rollout_log_probs of one sample")
        debug = rest.get("rollout_debug_tensors")
        velocities = debug.get("rollout_model_outputs") if isinstance(debug, dict) else None
        made = Drawn(
            _tensor(latents), _tensor(sigmas), _tensor(log_probs), None if velocities is None else _tensor(velocities)
        )
        if not len(made.latents) == len(made.sigmas) == len(made.log_probs) + 1:
            raise ValueError(f"it has {len(made.latents)} states and {len(made.log_probs)} log-probs")
        return made
    except (ValueError, TypeError) as error:  # TypeError: a list as a key
        raise UserError(
            f"SGLang's diffusion server gave an answer that cannot be used: {error}; mmrl reads those of SGLang 0.5.23"
        ) from error


def _tensor(value: object) -> Tensor:
    """Raises ``ValueError``."""
    from safetensors import SafetensorError
    from safetensors.torch import load

    match value:
        case {"__tensor__": True, "data": bytes() as data}:
            try:
                made = load(data)["t"].float()
            except (SafetensorError, KeyError) as error:
                raise ValueError(f"a tensor is no safetensors: {error}") from error
            if made.isfinite().all():
                return made
            raise ValueError("a tensor is not finite")
        case _:
            raise ValueError("it has something else than a tensor where one is expected")


def unpacked(data: bytes) -> object:
    """The one value that ``data``, MessagePack without extensions, holds. Raises ``ValueError``."""
    reader = _Reader(data)
    value = reader.value(0)
    if reader.at != len(data):
        raise ValueError("bytes are left behind its MessagePack")
    return value


class _Reader:
    """Final class. Reads values of the MessagePack specification one after another."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) != count:
            raise ValueError("its MessagePack is cut")
        self.at += count
        return found

    def number(self, kind: str) -> int | float:
        return struct.unpack(f">{kind}", self.take(struct.calcsize(kind)))[0]

    def count(self, kind: str) -> int:
        return math.floor(self.number(kind))

    def value(self, depth: int) -> object:
        kind = self.take(1)[0]
        if depth > _DEPTH:
            raise ValueError("its MessagePack is nested too deeply")
        if kind < 0x80 or kind >= 0xE0:
            return kind if kind < 0x80 else kind - 256
        if kind < 0x90 or kind in (0xDE, 0xDF):
            size = kind & 15 if kind < 0x90 else self.count("HI"[kind - 0xDE])
            return {self.value(depth + 1): self.value(depth + 1) for _ in range(size)}
        if kind < 0xA0 or kind in (0xDC, 0xDD):
            return [self.value(depth + 1) for _ in range(kind & 15 if kind < 0xA0 else self.count("HI"[kind - 0xDC]))]
        if kind < 0xC0 or 0xD9 <= kind <= 0xDB:
            return self.take(kind & 31 if kind < 0xC0 else self.count("BHI"[kind - 0xD9])).decode()
        if 0xC4 <= kind <= 0xC6:
            return self.take(self.count("BHI"[kind - 0xC4]))
        if 0xCA <= kind <= 0xD3:
            return self.number("fdBHIQbhiq"[kind - 0xCA])
        if kind in (0xC0, 0xC2, 0xC3):
            return None if kind == 0xC0 else kind == 0xC3
        raise ValueError(f"its MessagePack has the type {kind:#x}")


def python_of(options: JsonObject) -> Path | None:
    """``rollout.options.python``, where the recipe gives one."""
    given = options.get("python")
    return Path(str(given)).expanduser() if given is not None else None

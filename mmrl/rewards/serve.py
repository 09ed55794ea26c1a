"""Put any reward behind HTTP (``mmrl serve``), with the standard library's server. Imports no torch.

What comes in may be hostile: sizes are bounded before anything is read or decoded, pictures are PNG only, nothing is
unpickled; ``mmrl/rewards/serve_limits.py`` bounds time, connections and memory. Without a token the server stays on the
loopback interface. The format is in ``mmrl/rewards/wire.py``.
"""

from __future__ import annotations

import contextlib
import hmac
import io
import json
import math
import socket
import threading
import time
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from mmrl.core.addresses import is_loopback
from mmrl.core.errors import UserError
from mmrl.core.http_server import HttpHandler, HttpServer
from mmrl.core.json_types import JsonObject
from mmrl.core.media.images import MAX_PIXELS
from mmrl.core.reward_contract import Context, Span
from mmrl.rewards import wire
from mmrl.rewards.calling import Caller
from mmrl.rewards.loading import build, find
from mmrl.rewards.returned import NAN
from mmrl.rewards.serve_limits import PATIENCE_S, Connection, Limits, Turns

MAX_BYTES = 128 * 2**20
"""Of one request. About 60 pictures of 1024 x 1024."""
MAX_REQUESTS = 8
"""Requests that are decoded or scored at once. Others wait for a turn; after ``PATIENCE_S`` they get a 503."""
_LINGER_S = 2.0


class RewardServer(HttpServer):
    """Serves one reward until ``shutdown()``. ``url`` is where. Raises ``UserError`` when it cannot be set up.

    ``timeout_s``: seconds after which a call of the reward is given up. ``token`` is asked for as
    ``Authorization: Bearer``, and must be given for any host that is not loopback.
    """

    def __init__(
        self,
        name: str,
        host: str = "127.0.0.1",
        port: int = 8765,
        token: str | None = None,
        options: JsonObject | None = None,
        *,
        device: str = "cpu",
        timeout_s: float = 600.0,
        max_bytes: int = MAX_BYTES,
        max_pixels: int = MAX_PIXELS,
    ) -> None:
        if not token and not is_loopback(host):
            raise UserError(
                f"{host or 'all interfaces'} can be reached from other machines; give a token (--token), "
                "or serve on 127.0.0.1"
            )
        self.token, self.max_bytes, self.max_pixels = token, max_bytes, max_pixels
        found = find(name)
        if "tokens" in found.reads(options or {}):
            raise UserError(f"{name} reads tokens, which are not sent; compute it where the run does, without a server")
        self.reward = build(found, dict(options or {})).awake(device)
        self.device = device
        self.caller = Caller(self.reward, timeout_s)
        self.room, self.slots = Limits(), Turns(MAX_REQUESTS)
        self.decoding = threading.Lock()
        """One at a time: JSON takes several times its size while it is read."""
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__(host, port, _Handler, "choose another --port or --host")

    @property
    def url(self) -> str:
        """The address clients use, with the port that was taken when 0 was asked for."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"http://{host}:{self.server_port}"

    def health(self) -> JsonObject:
        """The reply to ``GET /health``."""
        declared = self.reward.declaration
        return {
            "mmrl": wire.VERSION,
            "reward": self.reward.name,
            "inputs": list(declared.inputs),
            "per": declared.per,
            "spans": bool(declared.spans),
            "max_bytes": self.max_bytes,
        }

    def score(self, request: wire.Request) -> wire.Reply:
        """Ask the reward. Raises ``RuntimeError`` with the reason when it failed for the request as a whole."""
        context = Context(request.step, self.device)
        errors = list(request.errors)
        batches = self._batches(request, errors)
        scores: list[float | None] = [None] * len(request.samples)
        parts: dict[str, list[float | None]] = {}
        given = [[s for i in batch if (s := request.samples[i]) is not None] for batch in batches]
        answers = list(self.caller.many(given, context))
        if answers and all(answer.error for answer in answers) and not any(request.errors):
            raise RuntimeError(f"the reward {self.reward.name} {answers[0].reasons[0]}")
        spans: list[list[Span] | None] = [None] * len(request.samples)
        for batch, answer in zip(batches, answers, strict=True):
            for j, i in enumerate(batch):
                scores[i] = None if math.isnan(answer.total[j]) else answer.total[j]
                errors[i], spans[i] = answer.reasons[j], answer.spans[j]
                for name, values in answer.parts.items():
                    parts.setdefault(name, [NAN] * len(scores))[i] = values[j]
        return wire.Reply(scores, parts, errors, spans if self.reward.declaration.spans else None)

    def _batches(self, request: wire.Request, errors: list[str | None]) -> list[list[int]]:
        """Indices to score together; a group with a sample that cannot be read fails as one."""
        declared = self.reward.declaration
        for i, sample in enumerate(request.samples):
            lacks = [name for name in declared.inputs if sample is not None and getattr(sample, name) is None]
            if lacks:
                errors[i] = f"the sample has no {lacks[0]}, which {self.reward.name} reads"
        if declared.per == "sample":
            whole = [i for i, error in enumerate(errors) if error is None]
            return [whole] if whole else []
        kept = []
        for group in request.groups:
            bad = next((i for i in group if errors[i] is not None), None)
            if bad is None:
                kept.append(group)
                continue
            for i in group:
                errors[i] = errors[i] or f"sample {bad} of its group cannot be scored: {errors[bad]}"
        grouped = {i for group in request.groups for i in group}
        for i in range(len(errors)):
            if i not in grouped:
                errors[i] = errors[i] or f"{self.reward.name} scores groups, and the sample stands in none"
        return [group for group in kept if group]


_HOST = "the request names another host; ask this server as 127.0.0.1 or localhost, or start it with a token (--token)"


class _Handler(HttpHandler):
    server: RewardServer  # type: ignore[assignment]
    disable_nagle_algorithm = True
    wbufsize = 2**16
    """Head and body go out together: apart, the second waits 40 ms for the acknowledgement of the first."""

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.client = Connection(self.connection)
        self.rfile = io.BufferedReader(self.client)

    def handle(self) -> None:
        if not self.server.room.enter(self.client):
            self.wfile.write(b"HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
            return
        try:
            super().handle()
        finally:
            self.server.room.leave(self.client)

    def handle_one_request(self) -> None:
        self.client.expect_head()
        super().handle_one_request()

    def handle_expect_100(self) -> bool:
        going_on = super().handle_expect_100()
        self.wfile.flush()
        return going_on

    def do_GET(self) -> None:
        if not self._meant():
            self._refuse(403, _HOST)
        elif self.path != "/health":
            self._refuse(404, f"there is no {self.path}; this server has GET /health and POST /score")
        else:
            self._answer(200, json.dumps(self.server.health()).encode())

    def do_POST(self) -> None:
        if not self._meant():
            return self._refuse(403, _HOST)
        if self.path != "/score":
            return self._refuse(404, f"there is no {self.path}; this server has GET /health and POST /score")
        if not self._authorised():
            return self._refuse(401, "wrong or missing token; send Authorization: Bearer TOKEN")
        if self.headers.get_content_type() != "application/json":
            # also keeps web pages off a loopback server: a browser may not send this type across sites
            return self._refuse(415, "send Content-Type: application/json")
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            return self._refuse(411, "send the body with a Content-Length")
        if len(length) > 18 or int(length) > self.server.max_bytes:
            return self._refuse(413, f"{length[:18]} bytes; at most {self.server.max_bytes}: lower batch_size")
        self.client.expect_body()
        try:
            self._score(int(length))
        finally:
            self.server.room.give_back(self.client)

    def _body(self, length: int) -> bytearray | None:
        """None where the client went silent or away, or there is no memory for it."""
        body = bytearray()  # grows: one of the declared length would be written over with zeros at once
        with contextlib.suppress(TimeoutError):
            while len(body) < length:
                chunk = self.rfile.read1(min(length - len(body), 2**18))  # type: ignore[attr-defined]
                if not chunk or not self.server.room.take(self.client, len(chunk)):
                    break
                body += chunk
        self.client.reading = False
        return body if len(body) == length else None

    def _score(self, length: int) -> None:
        body = self._body(length)
        if body is None:
            return self._refuse(400, f"the body ended, or took too long, before its {length} bytes were there")
        if not self.server.slots.acquire(timeout=PATIENCE_S):
            return self._refuse(503, f"{MAX_REQUESTS} other requests are being scored; try again")
        try:
            status, answer = self._scored(body)
        finally:
            self.server.slots.release()
        self._answer(status, answer)

    def _scored(self, body: bytearray) -> tuple[int, bytes]:
        server = self.server
        tensor = "tensor" in server.reward.declaration.inputs
        try:
            with server.decoding:
                request = wire.decode_request(body, max_pixels=server.max_pixels, tensor=tensor)
                if not server.room.take(self.client, wire.picture_bytes(request, tensor=tensor)):
                    return 503, _error("the memory for requests is taken; try again, or lower batch_size")
            return 200, wire.encode_reply(server.score(request))
        except wire.WireError as error:
            return 400, _error(str(error))
        except RuntimeError as error:
            return 500, _error(str(error))

    def _meant(self) -> bool:
        """Whether the request names this machine as its host. A page in a browser here, whose own name was made to
        point here, names another, and would read what needs no token."""
        host = self.headers.get("Host")
        if self.server.token or host is None:  # a browser always sends it
            return True
        try:
            name = urlsplit(f"//{host}").hostname
        except ValueError:  # half of an address of IPv6
            return False
        return name is not None and (is_loopback(name) or name == self.server.server_name.lower())

    def _authorised(self) -> bool:
        if not self.server.token:
            return True
        given = self.headers.get("Authorization", "")
        return hmac.compare_digest(given.encode("utf-8", "replace"), f"Bearer {self.server.token}".encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.connection.settimeout(PATIENCE_S)
        self.reply(status, body, "application/json")

    def _refuse(self, status: int, why: str) -> None:
        """Answer without having read the body, then read on a little, so that the client sees the answer."""
        self.close_connection = True
        self._answer(status, _error(why))
        self.wfile.flush()
        until = time.monotonic() + _LINGER_S
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            self.connection.settimeout(_LINGER_S)
            while time.monotonic() < until and self.connection.recv(65536):
                pass


def serve(
    name: str,
    host: str = "127.0.0.1",
    port: int = 8765,
    token: str | None = None,
    options: JsonObject | None = None,
    *,
    device: str = "cpu",
    ready: Callable[[str], None] | None = None,
) -> None:
    """Serve the reward ``name`` until interrupted; prints the address once it answers, or passes it to ``ready``.

    Raises ``UserError``.
    """
    with RewardServer(name, host, port, token, options, device=device) as server:
        declared = server.reward.declaration
        line = f"{name} at {server.url} (reads {', '.join(declared.inputs)}; per {declared.per})"
        with contextlib.suppress(KeyboardInterrupt):
            tell = ready or partial(print, flush=True)
            tell(line)
            server.serve_forever(poll_interval=0.1)


def _error(why: str) -> bytes:
    return json.dumps({"error": why}).encode()

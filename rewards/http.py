"""A reward behind HTTP: JSON with PNG bytes, in the format of ``mmrl serve`` (``mmrl/rewards/wire.py``).

    - name: http:score
      options: {url: "http://10.0.0.7:8765", token: $MMRL_REWARD_TOKEN}

A token that starts with ``$`` names an environment variable, so that the secret stays out of recipes and run folders.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import httpx

import mmrl
from mmrl.core.addresses import address, is_loopback
from mmrl.core.errors import UserError
from mmrl.core.reply_bytes import ASK, ReplyBytes, ReplyError, certificates
from mmrl.core.reward_contract import Context, Declaration, Input, Parts
from mmrl.core.secrets import from_environment
from mmrl.core.trajectory import Sample
from mmrl.rewards import wire
from mmrl.rewards.patience import one_line

_PAUSES_S = (0.1, 0.5)
"""Before a request whose connection broke is sent again."""
MAX_REPLY = 64 << 20
"""Bytes of one reply, unpacked."""


def _nothing() -> None:
    pass


def _reads(options: Mapping[str, Any]) -> tuple[Input, ...]:
    return options.get("inputs", ("image",))


@mmrl.reward(reads=_reads, checks=True)
class Http:
    """Scores by a remote reward.

    ``reward``: the name the server must serve (None: any). ``per``, ``inputs`` and ``spans``: as the remote reward
    declares them. Prompts go with their media (a file once per request) and system messages, whatever it reads.
    ``timeout``: seconds for one request. The server is asked what it is at the first call, not before.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        timeout: float = 60.0,
        reward: str | None = None,
        per: str = "sample",
        inputs: Sequence[Input] = ("image",),
        *,
        spans: bool = False,
    ) -> None:
        parts = address(url)
        if parts is None:
            raise UserError(f"options.url: {url!r} is no address; write it as http://host:8765")
        if per not in ("sample", "group"):
            raise UserError(f"options.per: {per!r}; write sample or group")
        if "tokens" in inputs:
            raise UserError("options.inputs: tokens are not sent; name what the remote reward reads besides, as text")
        self.url, self.reward, self.per = url.rstrip("/"), reward, per
        self.__mmrl_reward__ = Declaration(
            tuple(inputs), "group" if per == "group" else "sample", spans=spans, reads=_reads
        )
        secret = _secret(token)
        trust_env = not is_loopback(parts.hostname)  # a proxy cannot reach our loopback
        self._client = httpx.Client(
            timeout=httpx.Timeout(timeout, connect=min(timeout, 10.0)),
            headers={"Authorization": f"Bearer {secret}"} if secret else {},
            trust_env=trust_env,
            verify=certificates(trust_env=trust_env),
        )
        self._max_bytes: int | None = None

    def score(self, samples: Sequence[Sample], *, context: Context) -> Parts:
        """Named parts, ``score`` and perhaps ``spans`` among them.

        A sample the server could not score is ``Failed`` with its reason.
        """
        if self._max_bytes is None:
            self._max_bytes = self._check_health()
        groups = [list(range(len(samples)))] if self.per == "group" else []
        try:
            body, media = wire.encode_request(samples, groups, context.step)
            if len(body) > self._max_bytes:
                raise UserError(
                    f"{len(samples)} samples are {len(body):,} bytes, and {self.url} takes {self._max_bytes:,}; "
                    "lower this reward's batch_size"
                )
            count = partial(context.sent.update, media=media, questions=len(body) - media)
            answer = self._ask("POST", "/score", body, count)
            return wire.decode_reply(answer, len(samples), spans=bool(self.__mmrl_reward__.spans))
        except wire.WireError as error:
            raise UserError(f"{self.url}: {error}") from error

    def _check_health(self) -> int:
        body = self._ask("GET", "/health")
        try:
            health = json.loads(body)
            version, name, per = health["mmrl"], health["reward"], health["per"]
            reads, limit, spans = health["inputs"], int(health["max_bytes"]), health.get("spans", False)
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{self.url}/health is not an mmrl reward server's; check options.url") from None
        if version != wire.VERSION:
            raise UserError(
                f"{self.url} speaks version {version!r}, this side {wire.VERSION}; install the same mmrl at both ends"
            )
        if self.reward is not None and name != self.reward:
            raise UserError(f"{self.url} serves {name!r}, not {self.reward!r}; correct options.url or options.reward")
        if per != self.per:
            raise UserError(f"{self.url} serves {name!r}, which scores per {per}; set options.per to {per}")
        if spans != self.__mmrl_reward__.spans:
            said = "spans, rewards of pieces of responses" if spans else "no spans"
            raise UserError(
                f"{self.url} serves {name!r}, which returns {said}; set options.spans to {str(spans).lower()}"
            )
        lacks = set(reads) - {"tensor"} - set(self.__mmrl_reward__.inputs)
        if lacks:
            raise UserError(f"{self.url} serves {name!r}, which reads {sorted(reads)}; set options.inputs to that")
        return limit

    def _ask(self, method: str, path: str, body: bytes | None = None, count: Callable[[], None] = _nothing) -> bytes:
        """``count`` is called before each attempt."""
        address = self.url + path
        try:
            reply = self._send(method, address, body, count)
        except ReplyError as error:
            raise UserError(f"{address} sent {error}; another service answers there, check options.url") from None
        except httpx.TimeoutException as error:
            raise UserError(
                f"{address} did not answer in time ({type(error).__name__}); raise options.timeout or lower batch_size"
            ) from error
        except httpx.HTTPError as error:
            raise UserError(
                f"cannot reach {address}: {error}; start the server (mmrl serve NAME) or correct options.url"
            ) from error
        kind = reply.headers.get("content-type", "").partition(";")[0].strip()
        if kind != "application/json":
            raise UserError(
                f"{address} answered {reply.status_code} with {kind or 'no content type'}, not JSON: "
                f"{one_line(reply.text, 120)!r}; another service or a proxy answers there, check options.url"
            )
        if reply.status_code != 200:
            raise UserError(f"{address} answered {reply.status_code}: {_refusal(reply)}")
        return reply.content

    def _send(self, method: str, address: str, body: bytes | None, count: Callable[[], None]) -> httpx.Response:
        """Ask again when the connection broke: scoring twice is harmless, and a run should outlive a lost packet."""
        headers = ASK if body is None else {"Content-Type": "application/json", **ASK}
        for pause in _PAUSES_S:
            try:
                count()
                return self._reply(method, address, body, headers)
            except httpx.TimeoutException:
                raise
            except httpx.TransportError:
                time.sleep(pause)
        count()
        return self._reply(method, address, body, headers)

    def _reply(self, method: str, address: str, body: bytes | None, headers: Mapping[str, str]) -> httpx.Response:
        with self._client.stream(method, address, content=body, headers=headers) as reply:
            read = ReplyBytes(reply.headers.get("content-encoding", ""), MAX_REPLY)
            for piece in reply.iter_raw():
                read.add(piece)
            kind = {"Content-Type": reply.headers.get("content-type", "")}
            return httpx.Response(reply.status_code, headers=kind, content=read.whole())


score = Http


def _secret(token: str | None) -> str | None:
    if token is None or not token.startswith("$"):
        return token
    return from_environment(token, "options.token")


def _refusal(reply: httpx.Response) -> str:
    try:
        said = str(reply.json()["error"])
    except (ValueError, KeyError, TypeError):
        said = one_line(reply.text, 120)
    return said + ("; set options.token" if reply.status_code == 401 else "")

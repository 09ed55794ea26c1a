"""A judge behind an OpenAI-compatible endpoint (``POST {url}/chat/completions``), asked concurrently.

Pictures travel as base64 PNG in data URLs. What goes wrong on the way (a timeout, a broken connection, 408, 409, 425,
429, 5xx, and a 200 that is empty or holds an empty text) is tried again with exponential backoff, or after the
``Retry-After`` the endpoint names; what an endpoint refuses for good, or answers in another format, is the reason why
that one question has no verdict. An answer that is to be an object is asked for by its schema (``response_format``), as
long as the endpoint takes that. Imports no torch.
"""

from __future__ import annotations

import asyncio
import email.utils
import json
import math
import ssl
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict, TypeVar

import httpx
from PIL.Image import Image

from mmrl.core.addresses import address, is_loopback
from mmrl.core.errors import UserError
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.reply_bytes import ASK, ReplyBytes, ReplyError, certificates
from mmrl.core.reward_contract import before_loading
from mmrl.core.secrets import from_environment
from mmrl.inference.server_process import png_url
from mmrl.rewards.judging.answers import Kind, Words, read, schema_of
from mmrl.rewards.judging.asking import REASK_TEMPERATURE, SHOWN, Ask, Keep, Outcome, Settings, seeded, unread
from mmrl.rewards.judging.json_answer import UnreadableError
from mmrl.rewards.judging.replay import recorded_here
from mmrl.rewards.judging.usage import request, used
from mmrl.rewards.patience import one_line

FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.5, 60.0
"""Seconds before the first retry, with up to as much again at random; doubled for each further one, up to the second,
whatever the endpoint asks for."""
MAX_BYTES = 8 << 20  # of one reply
_AGAIN = frozenset({408, 409, 425, 429})
_FILTERED = frozenset({"content_filter", "safety", "recitation", "sensitive", "prohibited_content"})
_CUT = frozenset({"length", "max_tokens", "max_output_tokens", "model_length", "model_context_window_exceeded"})
_BROKEN_OFF = frozenset({"abort", "error", "insufficient_system_resource"})
_TOP = 20  # of the likeliest tokens: the most that endpoints give
_HEALTH_S = 10.0
T = TypeVar("T")
FORMS = ("json_schema", "json_object")
"""From the one that says most to the one that most endpoints have."""


class EndpointError(Exception):
    """The endpoint gave no answer to a question; the message says why."""


class _PassingError(EndpointError):
    """A failure that a retry may mend; ``after``: seconds that the endpoint asks to wait."""

    def __init__(self, reason: str, after: float = 0.0) -> None:
        super().__init__(reason)
        self.after = after


class _RefusedError(EndpointError):
    """The endpoint does not take a request of this form (400, 422)."""


class _ClientOptions(TypedDict):
    """The options of httpx's clients, with and without ``async``."""

    headers: dict[str, str]
    trust_env: bool
    limits: httpx.Limits


@dataclass(frozen=True)
class Requests:
    """How an endpoint is asked. ``timeout``: seconds for one request; ``retries``: how often one that failed is sent
    again; ``concurrency``: requests at once; ``extra``: further fields of a request (null removes one)."""

    timeout: float = 60.0
    retries: int = 3
    concurrency: int = 16
    extra: JsonObject = field(default_factory=dict)


class Endpoint:
    """A judge called ``name`` at ``url`` (up to and with ``/v1``). Asked for its models when built: ``UserError``.

    ``token``: ``$NAME``, an environment variable; ``secret``: the token itself, for a server that mmrl started.
    ``insecure``: allow plain HTTP to another machine.
    ``identity``: the cache's key for its verdicts, in place of the address; ``state``: how a server that mmrl started
    ended, for messages; ``socket_path``: the Unix socket that it listens on, in place of the host in ``url``.
    """

    sees = True
    control = ()

    def __init__(
        self,
        url: str,
        name: str,
        requests: Requests | None = None,
        *,
        token: str | None = None,
        insecure: bool = False,
        identity: str | None = None,
        secret: str | None = None,
        state: Callable[[], str] = str,
        socket_path: Path | None = None,
    ) -> None:
        host = _checked(url, insecure)
        self.url, self.name = url.rstrip("/"), name
        self.requests = requests or Requests()
        self.identity = f"{identity or f'{self.url} {name}'} {sorted(self.requests.extra.items())}"
        secret = secret or _secret(token)
        self._options: _ClientOptions = {
            "headers": {"Authorization": f"Bearer {secret}"} if secret else {},
            "trust_env": not is_loopback(host),  # a proxy cannot reach our loopback
            "limits": httpx.Limits(max_connections=self.requests.concurrency),
        }
        self._state, self._socket_path = state, socket_path
        self._form = len(FORMS) if "response_format" in self.requests.extra else 0
        self._loop: asyncio.AbstractEventLoop | None = None
        before_loading()
        if recorded_here() is None:
            self._check_health()

    async def ask(
        self,
        asks: Sequence[Ask],
        kind: Kind,
        settings: Settings,
        sent: Counter[str] | None = None,
        keep: Keep | None = None,
    ) -> list[Outcome]:
        """An outcome for each question, in order; ``keep`` gets each as it comes, with the number of its question.

        Never raises for what the endpoint did.
        Bytes of ``media`` and of the rest of the ``questions`` that go out, repeated ones too, are added to ``sent``,
        and what the endpoint says it used (``mmrl.rewards.judging.usage``).
        """
        sent = Counter() if sent is None else sent
        loop = asyncio.get_running_loop()
        if loop is not self._loop:  # a client and a semaphore belong to the loop they were made in
            self._loop = loop
            transport = self._transport(httpx.AsyncHTTPTransport)
            self._client = httpx.AsyncClient(
                timeout=self.requests.timeout, transport=transport, verify=self._trusted(), **self._options
            )
            self._turns = asyncio.Semaphore(self.requests.concurrency)

        async def one(number: int, ask: Ask) -> Outcome:
            outcome = await self._one(ask, kind, settings, sent)
            if keep is not None:
                keep(number, outcome)
            return outcome

        return list(await asyncio.gather(*(one(number, ask) for number, ask in enumerate(asks))))

    async def _one(self, ask: Ask, kind: Kind, settings: Settings, sent: Counter[str]) -> Outcome:
        began, raw, why = time.perf_counter(), [], ""
        reasks = 0 if isinstance(kind, Words) else settings.reasks
        for attempt in range(reasks + 1):
            try:
                choice = await self._structured(ask, kind, settings, attempt, sent)
                cut = _cut(choice, settings)
                outcome = (
                    _weigh(choice, kind) if isinstance(kind, Words) else read(kind, _text(choice), ask.items, "", cut)
                )
            except EndpointError as error:
                return Outcome(raw=raw, reason=f"{self.url}: {error}", seconds=time.perf_counter() - began)
            raw += outcome.raw
            if outcome.verdict is not None:
                return Outcome(outcome.verdict, raw, seconds=time.perf_counter() - began)
            why = outcome.reason or ""
        return Outcome(raw=raw, reason=unread(why, raw), seconds=time.perf_counter() - began)

    async def _structured(
        self, ask: Ask, kind: Kind, settings: Settings, attempt: int, sent: Counter[str]
    ) -> JsonObject:
        """The answer to one question, written by its schema where it is an object and the endpoint can do that.

        What the endpoint refused is not tried again once something less was taken.
        """
        body, schema = self._body(ask, kind, settings, attempt), schema_of(kind, ask.items)
        first = len(FORMS) if schema is None else self._form
        for form in range(first, len(FORMS) + 1):
            asked: JsonObject = body
            if schema is not None and form < len(FORMS):
                asked = {**body, **response_format(FORMS[form], schema)}
            try:
                choice = await self._complete(asked, seeded(ask.seed, "wait"), settings.patience, sent)
            except _RefusedError as refused:
                if form == len(FORMS) or "content_filter" in str(refused):
                    raise
                continue
            if schema is not None:
                self._form = max(self._form, form)
            return choice
        raise AssertionError("the last form is tried or raises")

    def _body(self, ask: Ask, kind: Kind, settings: Settings, attempt: int) -> dict[str, Json]:
        temperature = max(settings.temperature, REASK_TEMPERATURE) if attempt else settings.temperature
        body: dict[str, Json] = {
            "model": self.name,
            "messages": _messages(ask),
            "temperature": temperature,
            "max_tokens": settings.max_tokens,
            "seed": seeded(ask.seed, attempt),
        }
        if isinstance(kind, Words):  # at temperature 1 log-probs are the same before and after it
            body |= {"temperature": 1.0, "max_tokens": 1, "logprobs": True, "top_logprobs": _TOP}
            if self._socket_path is not None:  # a server of ours, whose chat templates may know this
                body["chat_template_kwargs"] = {"enable_thinking": False}
        return {key: value for key, value in {**body, **self.requests.extra}.items() if value is not None}

    async def _complete(self, body: JsonObject, seed: int, patience: float, sent: Counter[str]) -> JsonObject:
        """The first choice of a reply. Raises ``EndpointError`` after the last retry, and where no retry can help."""
        until = time.monotonic() + patience
        content, media = json.dumps(body).encode(), _media_bytes(body)
        words = bool(body.get("logprobs"))
        failure = _PassingError("was not asked")
        for attempt in range(self.requests.retries + 1):
            try:
                async with self._turns:
                    with request(sent, media, len(content) - media):
                        status, kind, reply = await asyncio.wait_for(self._post(content), self.requests.timeout)
                choices, usage = _completion(status, kind, reply)
                sent.update(used(usage))
                return _choice(choices, words)
            except TimeoutError:
                failure = _PassingError(f"no answer within {self.requests.timeout:g} s; raise options.timeout")
            except httpx.HTTPError as error:
                failure = _PassingError(f"the connection failed: {type(error).__name__} {error}".rstrip())
            except _PassingError as error:
                failure = error
            if gone := self._state():
                raise EndpointError(f"{failure}{gone}")
            if attempt < self.requests.retries:
                if failure.after and time.monotonic() + min(failure.after, MAX_BACKOFF_S) > until:
                    raise EndpointError(f"{failure} (it asks to wait {failure.after:g} s, over scoring.patience)")
                jitter = 1 + seeded(seed, attempt) / 2**31
                await asyncio.sleep(min(max(FIRST_BACKOFF_S * 2**attempt * jitter, failure.after), MAX_BACKOFF_S))
        raise EndpointError(f"{failure} (after {self.requests.retries + 1} attempts)")

    async def _post(self, content: bytes) -> tuple[int, httpx.Headers, bytes]:
        headers = {"Content-Type": "application/json", **ASK}
        request = self._client.stream("POST", f"{self.url}/chat/completions", content=content, headers=headers)
        async with request as reply:
            try:
                body = ReplyBytes(reply.headers.get("content-encoding", ""), MAX_BYTES)
                async for piece in reply.aiter_raw():
                    body.add(piece)
                return reply.status_code, reply.headers, body.whole()
            except ReplyError as error:
                raise EndpointError(str(error)) from None

    def _transport(self, kind: Callable[..., T]) -> T | None:
        """A transport over the Unix socket; None where the client connects to ``url``."""
        if self._socket_path is None:
            return None
        return kind(uds=str(self._socket_path), limits=self._options["limits"], verify=self._trusted())

    def _trusted(self) -> ssl.SSLContext:
        return certificates(trust_env=self._options["trust_env"])

    def _check_health(self) -> None:
        """Ask for the list of models once, so that a wrong address or token fails before training."""
        where = f"options.model.url: {self.url}"
        try:
            transport = self._transport(httpx.HTTPTransport)
            client = httpx.Client(timeout=_HEALTH_S, transport=transport, verify=self._trusted(), **self._options)
            with client, client.stream("GET", f"{self.url}/models", headers=ASK) as reply:
                body = ReplyBytes(reply.headers.get("content-encoding", ""), MAX_BYTES)
                for piece in reply.iter_raw():
                    body.add(piece)
                listing = body.whole()
        except (httpx.HTTPError, ReplyError) as error:
            raise UserError(
                f"{where} cannot be reached ({type(error).__name__} {error}); start the judge, or correct the address"
            ) from error
        if reply.status_code in (401, 403):
            raise UserError(f"{where} refuses the token ({reply.status_code}); set options.model.token: $NAME")
        if reply.status_code == 404:  # some gateways have no list
            return
        try:
            listed = [str(model["id"]) for model in json.loads(listing)["data"]] if reply.status_code == 200 else None
        except (ValueError, KeyError, TypeError, RecursionError):
            listed = None
        if listed is None:
            said = one_line(listing.decode("utf-8", "replace"), SHOWN)
            raise UserError(
                f"{where} answered {reply.status_code} {_media_type(reply.headers)}, not a list of models: "
                f"{said!r}; give the address of an OpenAI-compatible endpoint, up to and with /v1"
            )
        if listed and self.name not in listed:
            raise UserError(f"options.model.name: {self.url} has no {self.name!r}; it has {', '.join(listed[:8])}")


def _completion(status: int, headers: httpx.Headers, reply: bytes) -> tuple[list[JsonObject], Json]:
    """The choices of a reply, and its field ``usage``."""
    said = one_line(reply.decode("utf-8", "replace"), SHOWN)
    if status in _AGAIN or status >= 500:
        raise _PassingError(f"answered {status}: {said!r}", _retry_after(headers.get("retry-after")))
    if status != 200:
        raise (_RefusedError if status in (400, 422) else EndpointError)(f"answered {status}: {said!r}")
    if not reply.strip():
        raise _PassingError("answered 200 with an empty body")
    try:
        completion: JsonObject = json.loads(reply)
        listed = completion["choices"]
        choices: list[JsonObject] = [c for c in listed if isinstance(c, dict)] if isinstance(listed, list) else []
        if choices != listed:
            raise TypeError
        return choices, completion.get("usage")
    except (ValueError, KeyError, TypeError, RecursionError):
        raise EndpointError(
            f"answered {_media_type(headers)} that is no chat completion: {said!r}; check options.model.url"
        ) from None


def _choice(choices: list[JsonObject], words: bool) -> JsonObject:
    """The first choice, which is not empty; ``words``: its log-probs are read, not its text."""
    if not choices:
        raise _PassingError("answered 200 with no choice")
    choice = choices[0]
    message, end = choice.get("message"), _end(choice)
    if end in _FILTERED:
        raise EndpointError(f"stopped the answer by its content filter (finish_reason {end}{_cause(choice)})")
    if words or not isinstance(message, dict) or message.get("refusal") or message.get("tool_calls"):
        return choice
    content = message.get("content", "")
    empty = content is None or content == [] or (isinstance(content, str) and not content.strip())
    if empty and end not in _CUT:
        raise _PassingError("answered 200 with an empty text")
    return choice


def _end(choice: JsonObject) -> str:
    """Why the answer ended, in lower case."""
    return str(choice.get("finish_reason")).casefold()


def _cause(choice: JsonObject) -> str:
    """What a content filter found, of the forms in which endpoints say it."""
    message = choice.get("message")
    found = choice.get("content_filter_results") or choice.get("content_filter_result")
    if isinstance(found, dict):
        hits = {name: what for name, what in found.items() if isinstance(what, dict) and what.get("filtered")}
        found = hits or found
    said = found or (message.get("refusal") or message.get("content") if isinstance(message, dict) else None)
    return f": {one_line(said if isinstance(said, str) else json.dumps(said), SHOWN)}" if said else ""


def _cut(choice: JsonObject, settings: Settings) -> str:
    """Where the answer was cut; empty where it ended by itself."""
    end = _end(choice)
    if end in _CUT:
        return f"at max_tokens {settings.max_tokens}"
    return f"by the endpoint (finish_reason {end})" if end in _BROKEN_OFF else ""


def _text(choice: JsonObject) -> str:
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else None
    if isinstance(text, list):
        text = _joined(text)
    if text is None and isinstance(message, dict) and _end(choice) in _CUT:
        return ""  # the server kept a thought apart that had no end
    if not isinstance(text, str):
        raise EndpointError(f"answered a choice without text: {one_line(json.dumps(choice), SHOWN)!r}")
    return text


def _joined(parts: Sequence[Json]) -> str | None:
    """The text of content in parts, without thoughts; None where no part is text."""
    texts = [
        str(part["text"])
        for part in parts
        if isinstance(part, dict) and part.get("type") in ("text", "output_text") and isinstance(part.get("text"), str)
    ]
    return "".join(texts) if texts else None


def _weigh(choice: JsonObject, words: Words) -> Outcome:
    """The verdict from the log-probs of the first token."""
    found = _first_log_probs(choice)
    if found is None:
        raise EndpointError(
            "gives no log-probs (logprobs.content[0].top_logprobs), which answer type yes_no needs; "
            "use options.answer of type number or json, or another endpoint"
        )
    yes, no = words.tokens((log_prob, token) for log_prob, token in found if math.isfinite(log_prob))
    raw = [", ".join(f"{token!r} {log_prob:.4f}" for log_prob, token in found[:6])]
    try:
        return Outcome(words.verdict(yes, no), raw)
    except UnreadableError as error:
        return Outcome(raw=raw, reason=str(error))


def _first_log_probs(choice: JsonObject) -> list[tuple[float, str]] | None:
    """The log-probs of the first token with the tokens' texts; None where the endpoint gives none."""
    match choice:
        case {"logprobs": {"content": [{"top_logprobs": [*top]}, *_]}}:
            found: list[tuple[float, str]] = []
            for entry in top:
                match entry:
                    case {"logprob": int() | float() as log_prob, "token": token}:
                        found.append((float(log_prob), str(token)))
                    case _:
                        return None
            return found
        case _:
            return None


def _messages(ask: Ask) -> list[JsonObject]:
    content: Json = "".join(part for part in ask.parts if isinstance(part, str))
    if ask.pictures:
        content = [{"type": "text", "text": p} if isinstance(p, str) else _picture(p) for p in ask.parts]
    head: list[JsonObject] = [{"role": "system", "content": ask.system}] if ask.system else []
    return [*head, {"role": "user", "content": content}]


def _picture(image: Image) -> JsonObject:
    return {"type": "image_url", "image_url": {"url": png_url(image)}}


def _media_bytes(value: Json) -> int:
    """The bytes of the pictures in a request."""
    match value:
        case {"type": "image_url", "image_url": {"url": str(url)}}:
            return len(url)
        case {"messages": inner} | {"content": inner}:
            return _media_bytes(inner)
        case [*parts]:
            return sum(_media_bytes(part) for part in parts)
        case _:
            return 0


def _retry_after(value: str | None) -> float:
    """Seconds from the header (RFC 9110, 10.2.3): a number or a date; 0 where there is none or it is neither."""
    if value is None:
        return 0.0
    with suppress(ValueError):
        return max(0.0, float(value)) if math.isfinite(float(value)) else 0.0
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _media_type(headers: httpx.Headers) -> str:
    return headers.get("content-type", "").partition(";")[0].strip() or "no content type"


def _checked(url: str, insecure: bool) -> str | None:
    """The host of ``url``. Raises ``UserError`` where it is none, or would send prompts and the token in the clear."""
    parts = address(url)
    if parts is None:
        raise UserError(f"options.model.url: {url!r} is no address; write it as https://host/v1")
    if parts.username or parts.password:
        raise UserError("options.model.url: keep the password out of the address; set options.model.token: $NAME")
    if parts.scheme == "http" and not insecure and not is_loopback(parts.hostname):
        raise UserError(
            f"options.model.url: {url} is plain HTTP to another machine, which sends prompts and token in the clear; "
            "use https, or set options.model.insecure: true for a network that is yours"
        )
    return parts.hostname


def _secret(token: str | None) -> str | None:
    if token is None:
        return None
    if not token.startswith("$"):
        raise UserError("options.model.token: name an environment variable ($NAME), so that the secret stays outside")
    return from_environment(token, "options.model.token")


def response_format(form: str, schema: JsonObject) -> JsonObject:
    """The field of a request that asks for an object by ``schema``; vLLM and SGLang hold every token to it."""
    if form == "json_object":
        return {"response_format": {"type": "json_object"}}
    named: JsonObject = {"name": "verdict", "schema": schema, "strict": _is_strict(schema)}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def _is_strict(schema: Json) -> bool:
    """Whether each object in it names all of its fields, which ``strict`` asks for."""
    if not isinstance(schema, Mapping):
        return True
    properties, required = schema.get("properties"), schema.get("required")
    fields = properties if isinstance(properties, Mapping) else {}
    if schema.get("type") == "object" or fields:
        named = {str(name) for name in required} if isinstance(required, list | tuple) else set[str]()
        if schema.get("additionalProperties") is not False or set(fields) != named:
            return False
    return all(_is_strict(inner) for inner in [*fields.values(), schema.get("items")])

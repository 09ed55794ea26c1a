"""A world behind an OpenEnv server: ``openenv:URL``, as in ``openenv:http://localhost:8000``.

    environment:
      name: openenv:http://localhost:8000 # or https, ws, wss
      options:
        actions: {left: {move: left}, stay: {move: stay}} # words to actions
        picture: screen                                   # the field of the observation that holds one, in base64
        show: [goal, screen]                              # its fields that the model sees, in this order

Without ``actions`` the model calls a tool ``act`` with the fields of an action, as the server's schema has them. With
words it acts with the last word of its turn that ``actions`` has. ``actions: FIELD`` makes the turn's text that field.
What the server refuses as no action of its own is told, and the world stands still.

Each episode is a session, a WebSocket of its own, and the server has to allow as many as there are samples in a step.
A session whose answer was lost is over: the server may have stepped, and another session would begin anew.

Redirects and proxies are not followed. https://github.com/huggingface/OpenEnv has the protocol.
"""

from __future__ import annotations

import base64
import importlib
import json
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from typing import Any
from urllib.parse import urlsplit

import httpx

from mmrl.config.errors import did_you_mean
from mmrl.core.episode import Action, Call, Observation, no_action
from mmrl.core.errors import UserError
from mmrl.core.installing import optional
from mmrl.core.json_types import Json, JsonObject, as_object
from mmrl.core.media import Media
from mmrl.core.plugins.user_code import describe
from mmrl.core.reply_bytes import ASK, ReplyBytes
from mmrl.core.trajectory import Prompt
from mmrl.core.untrusted import parse_json, printable
from mmrl.episodes.pool import returned_within
from mmrl.episodes.tools import refused

_PATIENCE = 20.0
"""Seconds in which a server has to tell its schema, or take a connection."""
_CLOSING = 2.0
"""Seconds in which a server may say farewell."""
_SCHEMA, _ANSWER, _TEXT = 1 << 20, 64 << 20, 1 << 20
"""Bytes of the schema and of an answer, and characters of what is shown of one."""
_SEEDS = 2**31
"""Some servers seed numpy, which takes no larger ones."""
_TOOL = "act"


def __getattr__(name: str) -> Callable[..., World]:
    """What makes an episode of the server at ``name``."""
    if name.startswith("_"):
        raise AttributeError(name)
    return partial(World, Server(name))


class Server:
    """Final class. The server at ``address``. Raises ``UserError`` for what is no address."""

    def __init__(self, address: str) -> None:
        self.named = f"environment.name: openenv:{address}"
        with suppress(ValueError):
            url = urlsplit(address)
            self.host, self._port = url.hostname, url.port
            self._secure, path = url.scheme in ("https", "wss"), url.path.rstrip("/").removesuffix("/ws")
            if url.scheme in ("http", "https", "ws", "wss") and self.host:
                self._place = url.netloc + path
                return
        raise UserError(f"{self.named} is no address of a server; write openenv:http://HOST:PORT")

    @cached_property
    def schemas(self) -> tuple[JsonObject, JsonObject]:
        """Those of an action, without its metadata, and of an observation. Raises ``UserError``."""
        returned = returned_within(_PATIENCE, self._asked_schema)
        why = returned.error.replace("(environment.timeout)", "").strip()
        if not why:
            try:
                told = as_object(parse_json(returned.value, strict=True))
                action, observation = as_object(told["action"]), as_object(told["observation"])
                fields = {name: of for name, of in as_object(action["properties"]).items() if name != "metadata"}
                return {**action, "type": "object", "properties": fields}, observation
            except (ValueError, KeyError, TypeError) as error:
                why = f"its /schema is none of OpenEnv's: {printable(describe(error))}"
        raise UserError(f"{self.named}: no OpenEnv server answers ({why}); start it, or correct the address")

    def _asked_schema(self) -> bytes:
        url = f"http{'s' * self._secure}://{self._place}/schema"
        client = httpx.Client(timeout=_PATIENCE, trust_env=False)
        with client, client.stream("GET", url, headers=ASK) as reply:
            if reply.status_code != 200:
                raise ValueError(f"{url} answers {reply.status_code}")
            body = ReplyBytes(reply.headers.get("content-encoding", ""), _SCHEMA)
            for piece in reply.iter_raw():
                body.add(piece)
        return body.whole()

    def session(self) -> Any:
        """A connection of websockets. Raises ``ConnectionError``."""
        connect = importlib.import_module("websockets.sync.client").connect
        try:  # with a socket of ours, no redirect is followed
            line = socket.create_connection((self.host, self._port or (443 if self._secure else 80)), _PATIENCE)
            line.settimeout(None)
            url = f"ws{'s' * self._secure}://{self._place}/ws"
            limits = {"open_timeout": _PATIENCE, "ping_timeout": None, "close_timeout": _CLOSING, "max_size": _ANSWER}
            return connect(url, sock=line, compression=None, **limits).__enter__()
        except Exception as error:  # its own, the socket's and those of TLS
            raise ConnectionError(
                f"{self.named} opens no session: {describe(error)}; see that it still runs"
            ) from error


class World:
    """One episode; the options are those of the module's docstring. Raises ``UserError`` where the server is not there,
    and for an option that it has no field for."""

    def __init__(
        self,
        server: Server,
        *,
        actions: str | Mapping[str, Json] | None = None,
        picture: str | None = None,
        show: Sequence[str] | None = None,
    ) -> None:
        optional("websockets", "openenv", server.named)
        self._server, self._picture, self._show = server, picture, show
        schema, observed = server.schemas
        self.pictures = picture is not None
        self.tools = [_tool(schema)] if actions is None else []
        self._field = actions if isinstance(actions, str) else ""
        if self._field:
            _check_field("actions", self._field, schema)
        self._words = _words(schema, actions) if isinstance(actions, Mapping) else {}
        listed = "|".join(re.escape(word) for word in sorted(self._words, key=len, reverse=True))
        self._word = re.compile(rf"(?<!\w)(?:{listed})(?!\w)", re.IGNORECASE)
        for name in [*([] if picture is None else [picture]), *(show or ())]:
            _check_field("picture" if name == picture else "show", name, observed)
        self._session: Any = None
        self._over = False

    def reset(self, prompt: Prompt, seed: int) -> Observation:
        self._session = self._server.session()
        if self._over:  # closed, while it was opened
            self.close()
        return self._observed("reset", {"seed": seed % _SEEDS})

    def step(self, action: Action) -> Observation | list[Observation]:
        if self._field:
            return self._observed("step", {self._field: action.text})
        if self._words:
            named = self._word.findall(action.text)
            if not named:
                return no_action(f"Write one of: {', '.join(self._words)}.")
            return self._observed("step", self._words[named[-1].lower()])
        told: list[Observation] = []
        for call in action.calls:
            over = any(one.done for one in told)
            told.append(refused(call, "the episode is over") if over else self._called(call))
        return told or no_action(f"Call {_TOOL}.")

    def close(self) -> None:
        self._over, session, self._session = True, self._session, None
        if session is not None:
            session.close()

    def _called(self, call: Call) -> Observation:
        if call.error or call.name != _TOOL:
            return refused(call, call.error or f"there is no tool {call.name!r}; there is {_TOOL}")
        return self._observed("step", call.arguments, call)

    def _observed(self, kind: str, data: Json, call: Call | None = None) -> Observation:
        """Raises ``ConnectionError`` where the answer is lost, and ``ValueError`` for one that cannot be read."""
        call = call or Call("", "")
        answer = self._asked({"type": kind, "data": data})
        told = as_object(answer.get("data"))
        if answer.get("type") == "error":
            code = told.get("code")
            if kind == "step" and code == "VALIDATION_ERROR":
                return refused(call, f"the action is refused: {_why(told)}")
            edit = "start it for more sessions, or lower train.prompts_per_step" if code == "CAPACITY_REACHED" else ""
            self.close()
            raise RuntimeError(f"{self._server.named} answers {code}: {_why(told)}; {edit or 'see what it printed'}")
        reward, shown = told.get("reward") or 0.0, self._shown(as_object(told.get("observation")))
        if answer.get("type") != "observation" or not isinstance(reward, int | float):
            raise ValueError(f"{self._server.named} answers with no observation of OpenEnv; see which version it has")
        return Observation(shown, float(reward), told.get("done") is True, call_id=call.id)

    def _asked(self, message: JsonObject) -> JsonObject:
        if self._session is None:
            raise ConnectionError(f"{self._server.named}: its session is over, and no other one has the same state")
        closed = optional("websockets", "openenv", self._server.named).ConnectionClosed
        try:
            with suppress(closed):  # it may have said why
                self._session.send(json.dumps(message))
            return as_object(parse_json(self._session.recv(decode=False), strict=True))
        except Exception as error:
            self.close()
            if isinstance(error, closed | OSError):
                raise ConnectionError(
                    f"{self._server.named} went away in a turn: {describe(error)}; see what it printed, and start it "
                    "again"
                ) from error
            raise ValueError(f"{self._server.named}: its answer {printable(str(error))}; mend the server") from error

    def _shown(self, told: JsonObject) -> list[str | Media]:
        names = [name for name in told if name != "metadata"] if self._show is None else self._show
        shown: list[str | Media] = []
        for name in (name for name in names if told.get(name) is not None):
            value = told[name]
            if shown:
                shown.append("\n")
            if name == self._picture:
                shown.append(_read(name, value))
            else:
                text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
                shown.append(text if len(names) == 1 else f"{name}: {text}")
        if (length := sum(len(part) for part in shown if isinstance(part, str))) > _TEXT:
            raise ValueError(f"it tells {length:,} characters; name the fields to be shown in options.show")
        return shown


def _tool(schema: JsonObject) -> JsonObject:
    about = schema.get("description") or "Act in the world."
    parameters = {key: value for key, value in schema.items() if key not in ("title", "description")}
    return {"type": "function", "function": {"name": _TOOL, "description": about, "parameters": parameters}}


def _check_field(option: str, name: str, schema: JsonObject) -> None:
    known = schema.get("properties")
    fields = list(known) if isinstance(known, Mapping) else []
    if name not in fields:
        raise UserError(
            f"environment.options.{option}: the server has no field {name!r}{did_you_mean(name, fields)}; write one of "
            f"{printable(', '.join(fields))}"
        )


def _words(schema: JsonObject, given: Mapping[str, Json]) -> dict[str, Json]:
    """Words to actions that ``schema`` has. Raises ``UserError``."""
    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import best_match
    from referencing import Registry

    if not given or not all(word.strip() for word in given):
        raise UserError("environment.options.actions: name the actions by words, or leave the key out")
    check = Draft202012Validator(schema, registry=Registry())  # which opens no address of the schema
    for word, action in given.items():
        try:
            unknown = sorted(set(as_object(action)) - set(as_object(schema["properties"])))
            fault = best_match(check.iter_errors(action))
            why = f"it has no field {unknown[0]!r}" if unknown else "" if fault is None else fault.message
        except Exception as error:  # of a schema that is anybody's
            why = describe(error)
        if why:
            raise UserError(
                f"environment.options.actions: {word!r} is {action!r}, which is no action of the server: "
                f"{printable(why)}; its fields are {printable(json.dumps(schema['properties']), 600)}"
            )
    return {word.lower(): action for word, action in given.items()}


def _read(name: str, value: Json) -> Media:
    """The picture that is decoded where it is shown. Raises ``ValueError``."""
    try:
        text = re.sub(r"^data:image/[\w.+-]+;base64,|\s", "", value) if isinstance(value, str) else ""
        if data := base64.b64decode(text, validate=True):
            return Media("image", data=data)
        why = "it is empty" if isinstance(value, str) else "it is no text"
    except ValueError as error:
        why = str(error)
    raise ValueError(f"the field {name} of an observation is no picture in base64 ({why}); correct options.picture")


def _why(told: JsonObject) -> str:
    """What an error says, with the first field that pydantic refuses."""
    found = told.get("errors")
    first = found[0] if isinstance(found, list) and found else None
    if isinstance(first, Mapping):
        place = first.get("loc")
        return printable(f"{'.'.join(map(str, place)) if isinstance(place, list) else ''}: {first.get('msg')}")
    return printable(str(told.get("message")))

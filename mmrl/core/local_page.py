"""A page for a browser of this machine, with the standard library's server.

It listens on the loopback interface alone. Every request needs the random token that stands in the address, and names
the server's own address as its host, so that no other page and no other user of the machine can read or write anything.
"""

from __future__ import annotations

import hmac
import json
import secrets
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from urllib.parse import parse_qs, urlsplit

from mmrl.core.errors import UserError
from mmrl.core.http_server import HttpHandler, HttpServer
from mmrl.core.json_types import Json, JsonObject
from mmrl.core.untrusted import parse_json

HOST = "127.0.0.1"
_MOST_BODY = 4096
_PATIENCE_S = 30.0


def headers_of(pictures: str) -> dict[str, str]:
    """Headers of every reply of a page that asks this server alone; ``pictures``: where its pictures may come from,
    ``'self'`` or ``data:``."""
    policy = (
        f"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src {pictures}; "
        "media-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-store",
    }


class Page(HttpServer):
    """A server on the loopback interface with a random token. Raises ``UserError`` where it cannot listen."""

    def __init__(self, port: int, handler: type[PageHandler]) -> None:
        self.token = secrets.token_urlsafe(24)
        super().__init__(HOST, port, handler, "choose another --port")

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.server_port}/?token={self.token}"

    @contextmanager
    def in_thread(self) -> Generator[None]:
        """Serve in another thread inside the block."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.shutdown()
            thread.join()


class PageHandler(HttpHandler):
    """Base class: what every page here asks of a request, and how it refuses one."""

    server: Page  # type: ignore[assignment]
    timeout = _PATIENCE_S
    always = headers_of("'self'")

    def do_GET(self) -> None:
        if self.welcome(self.given("token") or self.headers.get("X-Token", "")):
            self.show(urlsplit(self.path).path)

    def show(self, path: str) -> None:
        """Answer a GET of ``path`` that has the token."""
        raise NotImplementedError

    def given(self, name: str) -> str:
        """A value of the address; empty where it has none."""
        return next(iter(parse_qs(urlsplit(self.path).query).get(name, [])), "")

    def welcome(self, token: str) -> bool:
        """Whether the request has the token, and this server's address as its host (a page of another site that has
        its name point here does not)."""
        if self.headers.get("Host") != f"{HOST}:{self.server.server_port}":
            self.refuse(403, "wrong host")
        elif not hmac.compare_digest(token.encode("utf-8", "replace"), self.server.token.encode()):
            self.refuse(403, "wrong or missing token; open the address that the command printed")
        else:
            return True
        return False

    def take(self, path: str, give: Callable[[Json], str]) -> None:
        """Answer a POST to ``path``: ``give`` gets its JSON and returns what is wrong with it."""
        length = self.headers.get("Content-Length", "")
        if not is_number(length) or int(length) > _MOST_BODY:
            self.close_connection = True
            return self.refuse(413, "send a body of at most 4096 bytes with its Content-Length")
        body = self.rfile.read(int(length))
        # the token only as a header of a request that other sites may not send
        if not self.welcome(self.headers.get("X-Token", "")):
            return None
        if self.path != path or self.headers.get_content_type() != "application/json":
            return self.refuse(404, "there is nothing here")
        try:
            said = parse_json(body, strict=True)
        except ValueError as error:
            return self.refuse(400, f"the body {error}")
        try:
            wrong = give(said)
        except (OSError, UserError) as error:
            return self.refuse(500, f"it cannot be written: {getattr(error, 'strerror', None) or error}")
        return self.refuse(400, wrong) if wrong else self.reply(200, b"{}", "application/json")

    def answer(self, made: Callable[[], JsonObject]) -> None:
        """Reply with what ``made`` returns, as JSON."""
        try:
            self.reply(200, json.dumps(made()).encode(), "application/json")
        except UserError as error:
            self.refuse(500, str(error))

    def refuse(self, status: int, why: str) -> None:
        self.reply(status, why.encode("utf-8", "replace"), "text/plain; charset=utf-8")


def is_number(text: str) -> bool:
    """Whether ``text`` is a whole number of a size that there may be."""
    return len(text) < 10 and text.isascii() and text.isdigit()

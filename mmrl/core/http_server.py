"""A server of the standard library for a few local clients."""

from __future__ import annotations

import socket
import socketserver
import sys
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar

from mmrl.core.errors import UserError


class HttpServer(ThreadingHTTPServer):
    """Answers each connection in a thread of its own. Raises ``UserError`` with ``mend`` where it cannot listen."""

    daemon_threads = True
    request_queue_size = 512
    """Connections that wait to be accepted. Beyond the standard library's 5, a client waits a second or longer."""

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler], mend: str) -> None:
        try:
            super().__init__((host, port), handler)
        except (OSError, OverflowError) as error:
            raise UserError(f"cannot serve on {host}:{port}: {error}; {mend}") from error

    def server_bind(self) -> None:
        """Bind without the name look-up of the standard library, which can hang for seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        """Ignore a client that closed its connection."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class HttpHandler(BaseHTTPRequestHandler):
    """Base class: answers requests, and is quiet about them: the client reports what went wrong, and an address may
    have a token."""

    protocol_version = "HTTP/1.1"
    always: ClassVar[Mapping[str, str]] = {}
    """Headers of every reply."""

    def reply(self, status: int, body: bytes, kind: str) -> None:
        """Send ``body`` of the media type ``kind``, and say so where the connection ends with it."""
        closes = {"Connection": "close"} if self.close_connection else {}
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **closes, **self.always}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""

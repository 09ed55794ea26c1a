"""Read the body of an HTTP reply up to a limit, which holds for what a compressed one unpacks to; the certificates that
the clients share. Imports no torch."""

from __future__ import annotations

import os
import ssl
import zlib
from functools import cache

import httpx

ASK = {"Accept-Encoding": "identity"}
"""The header of a request whose reply is not compressed by servers that heed it."""


def certificates(*, trust_env: bool) -> ssl.SSLContext:
    """For ``verify`` of httpx's clients, which each read the file of all authorities else (20 ms and more, also where
    the address is plain HTTP). ``trust_env``: whether ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` count."""
    return _certificates(trust_env, os.environ.get("SSL_CERT_FILE"), os.environ.get("SSL_CERT_DIR"))


@cache
def _certificates(trust_env: bool, *_variables: str | None) -> ssl.SSLContext:
    return httpx.create_ssl_context(trust_env=trust_env)


class ReplyError(ValueError):
    """A body that is too long or cannot be unpacked; the message says which, as in "a reply of ..."."""


class ReplyBytes:
    """The body of a reply, from its raw pieces. ``encoding``: its header Content-Encoding; ``most``: bytes in all.

    Neither the pieces nor what they unpack to are ever held beyond ``most``. Raises ``ReplyError``.
    """

    def __init__(self, encoding: str, most: int) -> None:
        self._most, self._body = most, bytearray()
        name = encoding.strip().lower()
        if name not in ("", "identity", "gzip", "x-gzip", "deflate"):
            raise ReplyError(f"a reply in the encoding {name[:40]!r}, which was not asked for")
        self._packed = name not in ("", "identity")
        self._unpack = zlib.decompressobj(wbits=47)  # of gzip and of zlib
        self._read, self._open = 0, False

    def add(self, piece: bytes) -> None:
        """Add the next bytes from the network."""
        self._read += len(piece)
        if self._read > self._most:
            raise ReplyError(f"a reply of more than {self._most:,} bytes")
        if not self._packed:
            self._body += piece
            return
        try:
            while piece:
                self._body += self._unpack.decompress(piece, self._most + 1 - len(self._body))
                if len(self._body) > self._most:
                    raise ReplyError(f"a reply of more than {self._most:,} bytes")
                piece, self._open = self._unpack.unconsumed_tail, not self._unpack.eof
                if self._unpack.eof:  # a file of gzip may have several parts
                    piece, self._unpack = self._unpack.unused_data, zlib.decompressobj(wbits=47)
        except zlib.error as error:
            raise ReplyError(f"a reply that cannot be unpacked ({error})") from None

    def whole(self) -> bytes:
        if self._open:
            raise ReplyError("a reply that cannot be unpacked (its end is missing)")
        return bytes(self._body)

"""Addresses of HTTP: whether a text is one, and whether its host is this machine. Imports no torch."""

from __future__ import annotations

import ipaddress
from urllib.parse import SplitResult, urlsplit


def address(url: str) -> SplitResult | None:
    """The parts of an address with a host and a port that may be; None for what is none."""
    try:
        parts = urlsplit(url)
        return parts if parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 else None
    except ValueError:
        return None


def is_loopback(host: str | None) -> bool:
    """Whether ``host`` can be reached from this machine only."""
    try:
        return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
    except ValueError:
        return False

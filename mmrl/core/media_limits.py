"""The most that is read of a picture or clip. Imports no decoder, so that recipes are checked without one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The most that is read of one medium: more is refused, never cut down."""

    bytes: int = 256 << 20
    """Encoded."""
    pixels: int = 4096 * 4096
    """Of a picture, or of one frame."""
    frames: int = 768
    """Frames shown of a clip."""
    total_pixels: int = 1 << 29
    """Of all frames shown of a clip."""
    seconds: float = 3600.0
    """How long a clip may last."""
    patience: float = 60.0
    """Seconds that decoding a clip may take."""


LIMITS = Limits()

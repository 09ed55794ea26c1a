"""Sound as the bytes of a WAV file."""

from __future__ import annotations

import io
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

MAX_NUMBERS = 64 << 20
"""In one sound: a minute of 192 kHz in stereo has 23 million."""
MAX_CHANNELS = 16


class BadSoundError(ValueError):
    """A sound that cannot be read; the text says why."""


def wav_bytes(wave: torch.Tensor, rate: int) -> bytes:
    """``wave`` ``[channels, N]`` in [-1, 1], ``rate`` numbers a second, as a WAV file of float32."""
    from scipy.io import wavfile

    buffer = io.BytesIO()
    wavfile.write(buffer, rate, wave.detach().float().cpu().numpy().T)
    return buffer.getvalue()


def read_wav(data: bytes) -> tuple[torch.Tensor, int]:
    """The inverse of ``wav_bytes``; whole numbers are scaled to [-1, 1]. Raises ``BadSoundError``."""
    import numpy
    import torch
    from scipy.io import wavfile

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rate, found = wavfile.read(io.BytesIO(data))
    except Exception as error:  # of bytes from outside it raises errors of many kinds
        raise BadSoundError(f"not a readable WAV file: {error}") from None
    kind, channels = found.dtype, found.size // max(1, len(found))
    if found.size > MAX_NUMBERS or channels > MAX_CHANNELS or rate <= 0:
        raise BadSoundError(f"{found.shape} numbers at {rate} a second; send one of at most {MAX_CHANNELS} channels")
    wave = found.astype(numpy.float32)
    if kind.kind == "i":
        wave /= -float(numpy.iinfo(kind).min)
    elif kind.kind == "u":
        wave = wave / 128 - 1
    if not wave.size or not numpy.isfinite(wave).all():
        raise BadSoundError("no numbers, or not all of them finite")
    return torch.from_numpy(wave.reshape(-1, channels).T.copy()), int(rate)

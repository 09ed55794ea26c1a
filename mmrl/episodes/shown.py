"""What an environment or a tool shows, as texts and pictures of an ``Observation``. Imports no torch.

A picture is kept as the bytes of a PNG file, or as the bytes that were given: so it is equal wherever it is read again.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence

from PIL.Image import Image

from mmrl.core.media import Media
from mmrl.core.media.images import BadImageError, png_bytes, upright_rgb
from mmrl.core.media_limits import LIMITS

_BASE64 = ";base64,"


def content_of(given: object) -> str | tuple[str | Media, ...]:
    """``given``, a text, a picture or a list of them, as an ``Observation`` of an ``Episode`` has it. Raises
    ``TypeError`` for what is neither, and ``ValueError`` for a picture that cannot be read."""
    if isinstance(given, str):
        return given
    parts = given if isinstance(given, Sequence) and not isinstance(given, bytes) else [given]
    found = [_part(part) for part in parts]
    texts = [part for part in found if isinstance(part, str)]
    return "".join(texts) if len(texts) == len(found) else tuple(found)


def is_content(given: object) -> bool:
    """Whether ``given`` is a picture, or a list of parts of a message."""
    if isinstance(given, Image | Media):
        return True
    parts = given if isinstance(given, list | tuple) else ()
    return bool(parts) and all(_is_part(part) for part in parts) and not all(isinstance(part, str) for part in parts)


def _is_part(part: object) -> bool:
    return isinstance(part, str | Image | Media) or (isinstance(part, Mapping) and "type" in part)


def _part(part: object) -> str | Media:
    match part:
        case str():
            return part
        case Media(kind="image"):
            return part
        case Image():
            return Media("image", data=_png(part))
        case {"type": "text", "text": str(text)}:
            return text
        case {"type": "image", "image": bytes(data)}:
            return Media("image", data=data)
        case {"type": "image", "image": str(url)} if url.startswith("data:image/") and _BASE64 in url:
            try:
                return Media("image", data=base64.b64decode(url.partition(_BASE64)[2], validate=True))
            except binascii.Error as error:
                raise ValueError(f"a picture as a data: URL: {error}") from error
        case {"type": "image", "image": Image() | Media() as picture}:
            return _part(picture)
        case _:
            raise TypeError(
                "it shows a text, a picture (a PIL image), or a list of texts, pictures and parts such as "
                f'{{"type": "image", "image": picture}}, not {part!r:.80}'
            )


def _png(image: Image) -> bytes:
    """Raises ``ValueError``."""
    if image.width * image.height > LIMITS.pixels:
        raise ValueError(f"a picture of {image.width} x {image.height} pixels; at most {LIMITS.pixels:,} are read")
    try:
        image.load()
        return png_bytes(upright_rgb(image)[0], compress_level=1)
    except BadImageError:
        raise
    except Exception as error:  # decoders raise anything
        raise ValueError(f"a picture that cannot be read: {error}") from error

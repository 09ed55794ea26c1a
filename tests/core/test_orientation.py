"""A picture is turned as its EXIF says, in every mode and format that is read."""

from __future__ import annotations

import io
import time

import numpy as np
import pytest
from PIL import ExifTags, Image, ImageOps

from mmrl.core.media import Media, images, open_image
from mmrl.core.media.images import read_rgb
from tests.support.sweeps import Sweep

FORMATS = {
    "PNG": ("1", "L", "P", "RGB", "RGBA", "LA", "I;16", "P transparent"),
    "JPEG": ("L", "RGB", "CMYK"),
    "WEBP": ("RGB", "RGBA", "L", "P transparent"),
    "TIFF": ("1", "L", "P", "RGB", "RGBA", "CMYK", "I;16", "YCbCr", "LAB", "LA"),
}
"""The formats that hold EXIF, and the modes that they are written in."""


def _picture(mode: str) -> Image.Image:
    """A picture whose four corners differ."""
    grey = np.full((16, 24), 250, np.uint8)
    grey[:8, :12], grey[:8, 12:], grey[8:, :12] = 0, 90, 170
    one = Image.fromarray(grey)
    if mode == "I;16":
        return Image.fromarray(grey.astype(np.uint16) * 257)
    if mode == "P transparent":
        made = one.convert("P")
        made.info["transparency"] = 255
        return made
    if mode in ("RGBA", "LA"):
        made = one.convert(mode)
        made.putalpha(Image.fromarray(np.full((16, 24), 200, np.uint8)))
        return made
    return one.convert("RGB").convert(mode) if mode in ("CMYK", "YCbCr", "LAB") else one.convert(mode)


@pytest.mark.sweep("orientations of pictures by mode and format")
def test_every_orientation_is_undone_in_every_mode_and_format(sweep: Sweep) -> None:
    for form, modes in FORMATS.items():
        for mode in modes:
            for orientation in range(1, 9):
                picture = _picture(mode)
                exif = Image.Exif()
                exif[ExifTags.Base.Orientation] = orientation
                turned, plain = io.BytesIO(), io.BytesIO()
                lossless = {"lossless": True} if form == "WEBP" else {}
                kept = {"transparency": 255} if mode == "P transparent" else {}
                picture.save(turned, form, exif=exif, **lossless, **kept)
                picture.save(plain, form, **lossless, **kept)
                upright, _ = read_rgb(io.BytesIO(plain.getvalue()))
                wanted = Image.fromarray(np.asarray(upright))  # without what the file says
                own = wanted.getexif()
                own[ExifTags.Base.Orientation] = orientation
                ImageOps.exif_transpose(wanted, in_place=True)  # Pillow's, of an RGB picture
                found = open_image(Media("image", data=turned.getvalue()))
                same = found.size == wanted.size and np.abs(np.asarray(found, int) - np.asarray(wanted, int)).max() <= 2
                again = ImageOps.exif_transpose(found).size == found.size
                sweep.check(same and again and found.mode == "RGB", (form, mode, orientation))
    sweep.done()


def test_the_deadline_of_a_picture_counts_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.BytesIO()
    _picture("RGB").save(file, "PNG")
    monkeypatch.setattr(images, "DECODE_S", 0.5)
    held = images.watched(file.getvalue())
    time.sleep(0.7)  # a busy machine gives the time to others
    assert held.read(4) == b"\x89PNG"
    begun = time.thread_time()
    while time.thread_time() < begun + 0.7:
        pass
    with pytest.raises(images.BadImageError, match="of computing"):
        held.read(4)

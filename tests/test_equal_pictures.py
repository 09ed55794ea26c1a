"""Two pictures of equal pixels are no pair, whatever their files are."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from PIL import ExifTags, Image, PngImagePlugin

import mmrl
from mmrl.errors import BadPromptError
from mmrl.media import Media
from mmrl.trajectory import Prompt

pair_of = mmrl.load("pipelines", "diffusion/pairs:pair_of")


def _saved(image: Image.Image, form: str, **options: object) -> Media:
    out = io.BytesIO()
    image.save(out, form, **options)
    return Media("image", data=out.getvalue())


def test_pictures_of_equal_pixels_are_no_pair(tmp_path: Path) -> None:
    image = Image.effect_noise((16, 16), 50).convert("RGB")
    text = PngImagePlugin.PngInfo()
    text.add_text("made by", "another tool")
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    image.save(tmp_path / "a.png")
    same = [
        Media("image", path=str(tmp_path / "a.png")),
        _saved(image, "PNG", pnginfo=text, compress_level=0),
        _saved(image, "WEBP", lossless=True),
        _saved(image, "TIFF"),
        _saved(image, "BMP"),
        _saved(image.convert("RGBA"), "PNG"),
        _saved(image.transpose(Image.Transpose.ROTATE_90), "PNG", exif=exif),
    ]
    other = image.copy()
    other.putpixel((3, 3), (1, 2, 3))
    for medium in same:
        with pytest.raises(BadPromptError, match="its two pictures are the same"):
            pair_of(Prompt("p", "p", media=(same[0], medium)))
        assert pair_of(Prompt("p", "p", media=(medium, _saved(other, "PNG"))))[0] == medium
    with pytest.raises(BadPromptError, match="mend the picture or take the pair out"):
        pair_of(Prompt("p", "p", media=(same[0], Media("image", data=b"no picture"))))

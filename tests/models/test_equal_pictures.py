"""Two pictures of equal pixels are no pair, whatever their files are."""

from __future__ import annotations

import io
import random
from pathlib import Path

import pytest
from PIL import ExifTags, Image, PngImagePlugin

import mmrl
from mmrl.core.errors import BadPromptError
from mmrl.core.media import Media
from mmrl.core.trajectory import Prompt
from tests.support.sweeps import Sweep

pair_of = mmrl.load("pipelines", "diffusion/given:pair_of")


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


_LOSSLESS = {
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA"),
    "WEBP": ("RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB"),
    "GIF": ("L", "P"),
}
"""Formats that keep every pixel, with the modes that each can hold."""
_TURNED = {3: 180, 6: 90, 8: 270}
"""EXIF's orientations, and by how many degrees a picture is stored turned that is shown upright."""


def _drawn(draw: random.Random) -> Image.Image:
    """A picture of few greys or colours, so that every mode has it without a loss."""
    size = draw.randint(1, 40), draw.randint(1, 40)
    values = [draw.choice((0, 255)) for _ in range(size[0] * size[1])]
    image = Image.new("L", size)
    image.putdata(values)
    return image


def _stored(image: Image.Image, draw: random.Random) -> tuple[str, Media]:
    """``image`` in some format, mode and orientation, and which these are."""
    form = draw.choice(sorted(_LOSSLESS))
    mode = draw.choice(_LOSSLESS[form])
    options: dict[str, object] = {"lossless": True} if form == "WEBP" else {}
    turned = draw.choice([None, *_TURNED]) if form in ("PNG", "WEBP", "TIFF") else None
    if turned is not None:
        exif = Image.Exif()
        exif[ExifTags.Base.Orientation] = turned
        image, options["exif"] = image.rotate(_TURNED[turned], expand=True), exif
    converted = image.convert("RGB").quantize(4) if mode == "P" else image.convert(mode)
    return f"{form} {mode} {image.size} turned {turned}", _saved(converted, form, **options)


@pytest.mark.sweep("pairs whose two pictures have equal pixels, or differ in one")
def test_equal_pixels_in_any_two_files(sweep: Sweep) -> None:
    for seed in range(sweep.size(60, 3000)):
        draw = random.Random(seed)
        image = _drawn(draw)
        one, other = _stored(image, draw), _stored(image, draw)
        changed = image.copy()
        at = draw.randrange(image.width), draw.randrange(image.height)
        changed.putpixel(at, 255 - int(str(image.getpixel(at))))
        for second, equal in ((other, True), (_stored(changed, draw), False)):
            try:
                pair_of(Prompt("p", "p", media=(one[1], second[1])))
                said = ""
            except BadPromptError as error:
                said = str(error)
            right = "its two pictures are the same" in said if equal else not said
            sweep.check(right, f"seed {seed}: {one[0]}, {second[0]}, equal: {equal}: {said}")
    sweep.done()

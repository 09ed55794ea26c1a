"""Shared by the tests of vlm and others."""

import io
import random

import pytest
from PIL import Image

from mmrl.core.media import Media
from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()
pytest.importorskip("torchvision")


def picture(width=40, height=40, seed=0):
    made = Image.new("RGB", (width, height))
    rng = random.Random(seed)
    made.putdata([tuple(rng.randrange(256) for _ in range(3)) for _ in range(width * height)])
    buffer = io.BytesIO()
    made.save(buffer, "PNG")
    return Media("image", data=buffer.getvalue())


def clip(seed=0):
    av = pytest.importorskip("av")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=4)
        stream.width = stream.height = 64
        for i in range(4):
            frame = Image.new("RGB", (64, 64), ((40 * i + seed * 90) % 256, 80, 200))
            out.mux(stream.encode(av.VideoFrame.from_image(frame)))
        out.mux(stream.encode())
    return Media("video", data=buffer.getvalue())

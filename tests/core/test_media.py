"""Media of every sort, kind and hostile: each becomes the right pixels or a named ``BadMediaError``."""

import importlib.util
import io
import logging
import math
import os
import random
import signal
import struct
import time
import zlib
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import mmrl
import mmrl.core.media
from mmrl.core.errors import UserError
from mmrl.core.media import (
    BadMediaError,
    ClipInfo,
    Limits,
    Media,
    decoding,
    images,
    open_clip,
    open_image,
    probe_clip,
    probe_image,
    read_bytes,
)
from mmrl.core.media.decoder import FinalError, container_of, select
from mmrl.logging.pictures import embed

RED, BLUE = (225, 45, 45), (60, 95, 235)


def installed(package: str) -> None:
    """Skip without it; it is not imported, since decord's FFmpeg in this process would upset PyAV's."""
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def encoded(image: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def picture(data: bytes, limits: Limits = mmrl.core.media.LIMITS) -> Image.Image:
    return open_image(Media("image", data=data), limits)


def near(image: Image.Image, at: tuple[int, int], colour: tuple[int, int, int], off: int = 6) -> bool:
    return all(abs(a - b) <= off for a, b in zip(image.getpixel(at), colour, strict=True))


def halves(mode: str = "RGB") -> Image.Image:
    """Red left, blue right, 24 x 16."""
    image = Image.new("RGB", (24, 16), RED)
    image.paste(BLUE, (12, 0, 24, 16))
    return image.convert(mode)


# --- bytes ----------------------------------------------------------------------------------------------------------


def test_bytes_come_from_a_file_a_slice_of_one_or_inline(tmp_path):
    file = tmp_path / "shard.tar"
    file.write_bytes(b"0123456789")
    assert read_bytes(Media("image", str(file))) == b"0123456789"
    assert read_bytes(Media("image", str(file), offset=3, size=4)) == b"3456"
    assert read_bytes(Media("image", str(file), offset=8)) == b"89"
    assert read_bytes(Media("image", data=b"abc")) == b"abc"


def test_what_is_no_place_in_a_regular_file_is_refused_at_once(tmp_path):
    file = tmp_path / "f"
    file.write_bytes(b"0123456789")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer without end
    (tmp_path / "empty").touch()
    cases = [
        (Media("image", str(file), offset=8, size=4), "ends after 2 of 4 bytes"),
        (Media("image", str(file), offset=-1, size=4), "no place"),
        (Media("image", str(file), offset=99), "ends after 0"),
        (Media("image", str(tmp_path / "gone")), "No such file"),
        (Media("image", str(tmp_path / "pipe")), "no regular file"),
        (Media("image", "/dev/zero"), "no regular file"),
        (Media("image", str(tmp_path)), "cannot be read|no regular file"),
        (Media("image", "a\0b"), "cannot be read"),
        (Media("image", str(tmp_path / "empty")), "is empty"),
        (Media("image", data=b""), "is empty"),
        (Media("image"), "neither bytes nor a path"),
    ]
    for media, why in cases:
        with pytest.raises(BadMediaError, match=why):
            read_bytes(media)
    for media in (Media("image", str(file)), Media("image", data=b"0123456789")):
        with pytest.raises(BadMediaError, match="has 10 bytes; at most 9"):
            read_bytes(media, Limits(bytes=9))


# --- pictures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "TIFF", "GIF"])
def test_pictures_open_as_rgb(kind):
    image = picture(encoded(halves(), kind, **({"quality": 95} if kind in ("JPEG", "WEBP") else {})))
    assert (image.mode, image.size) == ("RGB", (24, 16))
    assert near(image, (3, 8), RED, 12)
    assert near(image, (20, 8), BLUE, 12)


def test_cmyk_jpeg_and_16_bit_png_keep_their_colours():
    image = picture(encoded(halves("CMYK"), "JPEG", quality=95, subsampling=0))
    assert near(image, (3, 8), RED, 8)
    wide = Image.fromarray(np.full((4, 4), 0x80FF, np.uint16))
    assert picture(encoded(wide, "PNG")).getpixel((0, 0)) == (0x80,) * 3


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_of_an_animated_picture_the_first_frame_is_shown(kind, caplog):
    frames = [Image.new("RGB", (8, 8), c) for c in (RED, BLUE, (9, 9, 9))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    with caplog.at_level(logging.INFO, "mmrl.core.media"):
        assert near(picture(data), (4, 4), RED)
    assert "first of 3 frames" in caplog.text


@pytest.mark.parametrize(
    ("orientation", "size", "red"), [(1, (24, 16), (3, 8)), (3, (24, 16), (20, 8)), (6, (16, 24), (8, 3))]
)
def test_a_picture_is_turned_as_its_exif_says(orientation, size, red):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = picture(encoded(halves(), "JPEG", exif=exif, quality=95, subsampling=0))
    assert image.size == size
    assert near(image, red, RED, 12)
    assert probe_image(Media("image", data=encoded(halves(), "JPEG", exif=exif))) == size


def lying_png(width: int, height: int) -> bytes:
    """A PNG that declares a size and brings 16 pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(50))) + chunk(b"IEND", b"")


HOSTILE_PICTURES = {
    "text": (b"I am no picture, though my name ends in .png\n" * 9, "not a readable picture"),
    "cut-png": (encoded(halves(), "PNG")[:-40], "not a readable picture"),
    "cut-jpeg": (encoded(halves(), "JPEG")[:300], "not a readable picture"),
    "huge": (lying_png(60_000, 60_000), "3600000000 pixels|60000 x 60000"),
    "lying": (lying_png(64, 64), "not a readable picture"),
    "svg": (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "not a readable picture"),
    "postscript": (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a readable picture"),
    "ppm": (b"P6 2 2 255 " + bytes(12), "not a readable picture"),  # a format that is not let near a file
    "film": (b"\0\0\0\x18ftypmp42" + bytes(40), "not a readable picture"),
}


@pytest.mark.parametrize("name", HOSTILE_PICTURES)
def test_hostile_pictures_are_refused_with_the_reason(tmp_path, name):
    data, why = HOSTILE_PICTURES[name]
    file = tmp_path / f"{name}.png"
    file.write_bytes(data)
    start = time.process_time()
    with pytest.raises(BadMediaError, match=why) as caught:
        open_image(Media("image", str(file)))
    assert str(file) in str(caught.value)
    assert time.process_time() - start < 8


def test_headers_tell_a_text_from_a_picture_and_the_size_but_not_a_cut():
    cut = Media("image", data=HOSTILE_PICTURES["cut-png"][0])
    assert probe_image(cut, decode=False) == (24, 16)
    for name in ("text", "huge", "ppm"):
        with pytest.raises(BadMediaError):
            probe_image(Media("image", data=HOSTILE_PICTURES[name][0]), decode=False)


# --- which frames ---------------------------------------------------------------------------------------------------


@given(total=st.integers(1, 400), count=st.integers(1, 60))
def test_count_takes_evenly_spaced_frames_with_the_ends(total, count):
    chosen = select(total, 25.0, {"count": count})
    assert len(chosen) == len(set(chosen)) == min(count, total)
    if 1 < count <= total:
        ideal = np.linspace(0, total - 1, count)
        assert np.abs(np.array(chosen) - ideal).max() <= 0.5 + 1e-9
        assert (chosen[0], chosen[-1]) == (0, total - 1)


@given(
    total=st.integers(1, 300),
    source=st.sampled_from([8, 24, 25, 30, 60, Fraction(30000, 1001)]),
    fps=st.sampled_from([1, 2, 3, 4, 8, 12, 24, 120]),
)
def test_fps_takes_what_is_on_screen_at_each_tick(total, source, fps):
    chosen = select(total, float(source), {"fps": fps})
    ticks = [Fraction(k, fps) for k in range(total * fps) if Fraction(k, fps) < Fraction(total) / source]
    on_screen = list(dict.fromkeys(math.floor(t * source) for t in ticks))
    assert chosen == on_screen


def test_a_list_of_frames_is_taken_as_it_is_or_refused():
    assert select(8, 8.0, {"frames": [7, 0, 0]}) == [7, 0, 0]
    assert select(3, 8.0, {}) == [0, 1, 2]
    for missing in (8, -1):
        with pytest.raises(FinalError, match="no frame"):
            select(8, 8.0, {"frames": [missing]})


# --- clips ----------------------------------------------------------------------------------------------------------


def grey(n: int, size: tuple[int, int] = (32, 32)) -> list[Image.Image]:
    """Frames that tell their number by their brightness, with a red corner that tells which side is up."""
    frames = [Image.new("RGB", size, (10 + 10 * i,) * 3) for i in range(n)]
    for frame in frames:
        frame.paste(RED, (0, 0, 8, 8))
    return frames


def film(n: int = 8, size: tuple[int, int] = (32, 32), fps: int = 8) -> bytes:
    pytest.importorskip("av")
    return mmrl.load("datasets", "clips:encode")(grey(n, size), fps)


def write_film(path, frames, codec="libx264", pix="yuv420p", fmt=None, container_options=None, codec_options=None):
    """A film by PyAV, in ``path`` (a file or a buffer)."""
    av = pytest.importorskip("av")
    with av.open(path, "w", format=fmt, options=container_options or {}) as container:
        out = container.add_stream(codec, rate=8, options=codec_options or {})
        out.width, out.height, out.pix_fmt = *frames[0].size, pix
        out.codec_context.thread_count = 1
        for frame in frames:
            container.mux(out.encode(av.VideoFrame.from_image(frame)))
        container.mux(out.encode(None))


def numbers(clip) -> list[int]:
    """The frames' numbers, by their brightness."""
    return [round((f.getpixel((20, 20))[0] - 10) / 10) for f in clip.frames]


@pytest.fixture(params=["decord", "av"])
def decoder(request, monkeypatch):
    installed(request.param)
    monkeypatch.setattr(decoding, "DECODERS", (request.param,))
    return request.param


def test_the_frames_asked_for_are_the_frames_shown(decoder):
    media = Media("video", data=film(8))
    for asked, expected in [
        ({}, list(range(8))),
        ({"count": 3}, [0, 4, 7]),
        ({"count": 99}, list(range(8))),
        ({"fps": 2}, [0, 4]),
        ({"fps": 1000}, list(range(8))),
        ({"frames": [5, 1, 1]}, [5, 1, 1]),
    ]:
        clip = open_clip(media, **asked)
        assert numbers(clip) == list(clip.indices) == expected
        assert (clip.fps, clip.total) == (8.0, 8)
        assert near(clip.frames[0], (2, 2), RED)
    chosen = Media("video", data=media.data, frames=(6, 2))
    assert list(open_clip(chosen).indices) == [6, 2]
    assert list(open_clip(chosen, count=1).indices) == [3]  # what is asked for goes before
    assert probe_clip(media) == ClipInfo(32, 32, 8, 8.0)


def test_a_clip_is_read_out_of_a_shard(tmp_path, decoder):
    data = film(4)
    (tmp_path / "s.tar").write_bytes(bytes(512) + data + bytes(512))
    assert numbers(open_clip(Media("video", str(tmp_path / "s.tar"), 512, len(data)))) == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["x264.mp4", "b-frames.mkv", "vp9.webm", "mpeg4.avi", "ten-bit.mov"])
def test_both_decoders_give_the_same_frames_of_the_usual_formats(tmp_path, monkeypatch, name):
    installed("decord")
    path = str(tmp_path / name)
    options = {
        "x264.mp4": {},
        "b-frames.mkv": {"codec_options": {"bf": "3", "g": "12"}},
        "vp9.webm": {"codec": "libvpx-vp9"},
        "mpeg4.avi": {"codec": "mpeg4", "codec_options": {"qscale": "2"}},
        "ten-bit.mov": {"pix": "yuv420p10le"},
    }[name]
    write_film(path, grey(20, (64, 40)), **options)
    found = {}
    for which in ("decord", "av"):
        monkeypatch.setattr(decoding, "DECODERS", (which,))
        found[which] = open_clip(Media("video", path), frames=[0, 7, 19, 3])
        assert numbers(found[which]) == [0, 7, 19, 3]
    a, b = (np.stack([np.asarray(f, int) for f in clip.frames]) for clip in found.values())
    assert np.abs(a - b).max() <= 2 or (name == "ten-bit.mov" and np.abs(a - b).mean() < 0.5)  # edges of colours
    assert found["decord"].total == found["av"].total == 20
    assert found["decord"].fps == pytest.approx(found["av"].fps, rel=1e-3)


@pytest.mark.parametrize(("codec", "size"), [("libx264", (48, 32)), ("libsvtav1", (64, 64))])
def test_what_decord_cannot_decode_goes_to_pyav_and_the_log_says_so_once(tmp_path, caplog, codec, size):
    """AV1, which is younger than decord; and a width whose padded rows it takes for four channels."""
    installed("decord")
    if codec not in pytest.importorskip("av").codec.codecs_available:
        pytest.skip(f"this PyAV has no {codec}")
    write_film(str(tmp_path / "odd.mp4"), grey(8, size), codec=codec)
    (tmp_path / "plain.mp4").write_bytes(film(8))
    with caplog.at_level(logging.INFO, "mmrl.core.media"):
        for name in ("odd.mp4", "plain.mp4", "odd.mp4", "plain.mp4"):
            assert numbers(open_clip(Media("video", str(tmp_path / name)))) == list(range(8))
    odd, plain = (r.getMessage() for r in caplog.records)
    assert [r.levelno for r in caplog.records] == [logging.WARNING, logging.INFO]
    assert "odd.mp4: decoded with PyAV (decord cannot: " in odd
    assert plain.endswith("plain.mp4: decoded with decord")


def test_without_decord_the_log_names_pyav(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(decoding, "DECODERS", ("no_such_decord", "av"))
    (tmp_path / "a.mp4").write_bytes(film(2))
    with caplog.at_level(logging.INFO, "mmrl.core.media"):
        open_clip(Media("video", str(tmp_path / "a.mp4")))
    assert "decoded with PyAV (no decord here)" in caplog.text


def test_without_a_decoder_the_error_names_the_extra(monkeypatch):
    monkeypatch.setattr(decoding, "DECODERS", ("no_such_decord", "no_such_av"))
    with pytest.raises(UserError, match=r"pip install .*\[vlm\]'"):
        open_clip(Media("video", data=b"x"))


def with_index_first(n: int, tmp_path) -> bytes:
    """A film whose index stands before its frames, so that it opens when it is cut."""
    path = tmp_path / "fast.mp4"
    write_film(str(path), grey(n), container_options={"movflags": "faststart"}, codec_options={"g": "4"})
    return path.read_bytes()


def sound_only() -> bytes:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        out = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 8000
        container.mux(out.encode(frame))
        container.mux(out.encode(None))
    return file.getvalue()


def no_frames() -> bytes:
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        out = container.add_stream("libx264", rate=8)
        out.width = out.height = 32
        out.pix_fmt = "yuv420p"
        container.start_encoding()
    return file.getvalue()


def test_hostile_clips_are_refused_with_the_reason(tmp_path, decoder):
    good, fast = film(8), with_index_first(20, tmp_path)
    damaged = bytearray(fast)
    for i in range(fast.find(b"mdat") + 900, len(fast), 37):
        damaged[i] ^= 0xFF
    playlist = tmp_path / "list.mp4"
    playlist.write_text("#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n")
    cases = {
        "text": (b"no film, whatever my name says\n" * 20, "neither MP4, Matroska"),
        "picture": (encoded(halves(), "PNG"), "neither MP4, Matroska"),
        "gif": (encoded(halves(), "GIF"), "neither MP4, Matroska"),
        "playlist": (playlist.read_bytes(), "neither MP4, Matroska"),
        "head": (good[:60], "cannot be decoded"),
        "cut": (good[: len(good) // 2], "cannot be decoded"),
        "cut-late": (fast[: len(fast) * 2 // 3], "cannot be decoded|is cut off: it declares 20 frames"),
        "damaged": (bytes(damaged), "cannot be decoded|damaged"),
        "sound": (sound_only(), "cannot be decoded|no frames"),
        "empty": (no_frames(), "cannot be decoded|no frames"),
        "nothing": (b"", "is empty"),
    }
    for name, (data, why) in cases.items():
        file = tmp_path / f"{name}.mp4"
        file.write_bytes(data)
        for read in (open_clip, probe_clip):
            with pytest.raises(BadMediaError, match=why) as caught:
                read(Media("video", str(file)))
            assert f"{name}.mp4" in str(caught.value)
    assert numbers(open_clip(Media("video", data=good))) == list(range(8))


def test_a_clip_larger_than_the_limits_is_refused(decoder):
    media = Media("video", data=film(16, (64, 32)))
    for limits, asked, why in [
        (Limits(pixels=2047), {}, "frames of 64 x 32 pixels; at most 2,047"),
        (Limits(frames=8), {}, "16 frames were asked for; at most 8"),
        (Limits(seconds=1.5), {"count": 1}, "lasts 2 seconds; at most 1.5"),
        (Limits(total_pixels=2048 * 15), {}, "make 32,768 pixels"),
        (Limits(bytes=100), {}, "at most 100 are read"),
    ]:
        with pytest.raises(BadMediaError, match=why):
            open_clip(media, limits=limits, **asked)
    assert len(open_clip(media, count=8, limits=Limits(frames=8, total_pixels=2048 * 8)).frames) == 8
    with pytest.raises(BadMediaError, match="there is no frame 16"):
        open_clip(media, frames=[16])


def test_a_picture_is_no_clip_and_nothing_is_no_request():
    with pytest.raises(BadMediaError, match="of kind 'image'"):
        open_clip(Media("image", data=b"x"))
    with pytest.raises(BadMediaError, match="of kind 'video'"):
        open_image(Media("video", data=b"x"))
    for asked in ({"fps": 1, "count": 2}, {"fps": 0}, {"count": 0}, {"frames": []}):
        with pytest.raises(ValueError, match=r"is needed|one of"):
            open_clip(Media("video", data=b"x"), **asked)


def running(name: str):
    process = decoding.process_of(name)._child.process
    assert process is not None
    return process


def test_a_decoder_that_hangs_or_dies_costs_one_clip(decoder):
    media = Media("video", data=film(4))
    assert len(open_clip(media).frames) == 4
    process = running(decoder)
    os.kill(process.pid, signal.SIGSTOP)  # as good as an endless loop
    start = time.perf_counter()
    with pytest.raises(BadMediaError, match=r"was not decoded within 0.3 s"):
        open_clip(media, limits=Limits(patience=0.3))
    assert time.perf_counter() - start < 300
    assert process.poll() is not None
    assert len(open_clip(media).frames) == 4
    process = running(decoder)
    process.kill()
    process.wait()
    with pytest.raises(BadMediaError, match="ended the decoder's process"):
        open_clip(media)
    assert len(open_clip(media).frames) == 4


def test_a_clip_that_ends_the_first_decoder_goes_to_the_second(caplog):
    installed("decord")
    media = Media("video", data=film(4))
    open_clip(media)
    process = running("decord")
    process.kill()
    process.wait()
    with caplog.at_level(logging.INFO, "mmrl.core.media"):
        assert numbers(open_clip(media)) == [0, 1, 2, 3]
    assert "decoded with PyAV (decord cannot: ended the decoder's process" in caplog.text


def test_the_decoding_process_may_not_take_all_memory(decoder):
    open_clip(Media("video", data=film(2)))
    process = running(decoder)
    limits = Path(f"/proc/{process.pid}/limits")
    if not limits.exists():
        pytest.skip("no /proc here")
    line = next(text for text in limits.read_text().splitlines() if text.startswith("Max address space"))
    assert int(line.split()[3]) <= 8 << 30


@pytest.mark.parametrize(
    ("matrix", "size", "red"),
    [((0, 1, -1, 0), (40, 64), (36, 3)), ((-1, 0, 0, -1), (64, 40), (60, 36)), ((0, -1, 1, 0), (40, 64), (3, 60))],
)
def test_a_clip_is_turned_as_its_track_says(decoder, matrix, size, red):
    """As telephones write them: 90 degrees clockwise, 180, 90 counterclockwise."""
    data = bytearray(film(4, (64, 40)))
    at = data.find(b"tkhd") + 44
    a, b, c, d = (v * 0x10000 for v in matrix)
    data[at : at + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 0x40000000)
    clip = open_clip(Media("video", data=bytes(data)), count=2)
    assert clip.frames[0].size == size
    assert near(clip.frames[0], red, RED, 12)


def test_only_films_are_let_near_ffmpeg():
    assert container_of(b"\0\0\0\x20ftypisom") == "mp4"
    assert container_of(b"\x1aE\xdf\xa3" + bytes(20)) == "matroska"
    assert container_of(b"RIFF\0\0\0\0AVI LIST") == "avi"
    for other in (b"#EXTM3U", b"<MPDftyp", b"ffconcat version 1.0", b"RIFF\0\0\0\0WAVE", b"GIF89a", b""):
        assert container_of(other) is None


@pytest.mark.slow
@pytest.mark.parametrize("fmt", ["mp4", "matroska", "avi"])
def test_damage_of_any_sort_never_reaches_this_process(fmt, decoder):
    """400 damaged films: each is decoded or refused, none hangs or kills."""
    file = io.BytesIO()
    codec, pix = ("mpeg4", "yuv420p") if fmt == "avi" else ("libx264", "yuv420p")
    write_film(file, grey(12), codec=codec, pix=pix, fmt=fmt)
    whole, rng, outcomes = file.getvalue(), random.Random(0), {True: 0, False: 0}
    hung = 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 3, 10, 40))):
            data[rng.randrange(len(data))] = rng.randrange(256)
        if rng.random() < 0.2:
            data = data[: rng.randrange(1, len(data))]
        try:
            clip = open_clip(Media("video", data=bytes(data)), count=4, limits=Limits(patience=20))
            assert 1 <= len(clip.frames) <= 4
            outcomes[True] += 1
        except BadMediaError as error:
            hung += "was not decoded within" in str(error)
            outcomes[False] += 1
    assert not hung
    assert min(outcomes.values()) > 10


def many_scans(count: int, size: tuple[int, int] = (1024, 1024)) -> bytes:
    """A progressive JPEG whose last scan comes again and again."""
    data = encoded(Image.effect_noise(size, 3), "JPEG", progressive=True, quality=1)
    last = data.rindex(b"\xff\xda")
    return data[:last] + data[last:-2] * count + b"\xff\xd9"


def many_chunks(count: int) -> bytes:
    data = encoded(halves(), "PNG")
    chunk = struct.pack(">I4sI", 0, b"teSt", zlib.crc32(b"teSt"))
    return data[:33] + chunk * count + data[33:]


def many_tiles(count: int) -> bytes:
    """A TIFF of one row, whose pixels are strips of their own."""
    entries = [(256, 3, 1, 1), (257, 4, 1, count), (258, 3, 1, 8), (259, 3, 1, 1), (262, 3, 1, 1)]
    entries += [(273, 3, count, 8 + 2 + 12 * 8 + 4), (278, 3, 1, 1), (279, 3, count, 8 + 2 + 12 * 8 + 4)]
    table = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    return b"II*\0" + struct.pack("<IH", 8, len(entries)) + table + bytes(4) + b"\1\0" * count


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (many_scans(300), "a JPEG of 3[0-9]{2} scans; at most 64"),
        (many_chunks(1_000_000), "not decoded within 0.2 s"),
        (many_tiles(300_000), "a TIFF of 300000 strips or tiles"),
    ],
    ids=["scans", "chunks", "tiles"],
)
def test_little_data_that_makes_much_work_is_refused_soon(monkeypatch, data, why):
    """Each takes seconds to decode; measured in seconds of this process, since others may have the machine."""
    from mmrl.core.media import images

    if "within" in why:
        monkeypatch.setattr(images, "DECODE_S", 0.2)
    began = time.process_time()
    for opened in (picture, lambda data: mmrl.core.media.probe_image(Media("image", data=data), decode=False)):
        with pytest.raises(BadMediaError, match=f"{why}|not a readable picture"):
            opened(data)
    with pytest.raises(BadMediaError, match=why):
        picture(data)
    assert time.process_time() - began < 6


def test_thumbnails_are_no_scans():
    thumbnail = encoded(halves(), "JPEG")
    exif = Image.Exif()
    exif[0x9286] = b"\xff\xda" * 1000 + thumbnail
    data = encoded(halves(), "JPEG", exif=exif, progressive=True)
    assert data.count(b"\xff\xda") > 1000
    assert picture(data).size == halves().size


def test_a_picture_that_moves_for_too_long_is_not_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(images, "MAX_MOVING_PIXELS", 3 * 64)
    Image.new("L", (8, 8)).save(
        file := tmp_path / "a.gif", save_all=True, append_images=[Image.new("L", (8, 8), 40 * n) for n in range(1, 4)]
    )
    with Image.open(file) as moving, pytest.raises(images.BadImageError, match="more than 192 pixels; shorten it"):
        images.frames_of(moving)
    assert embed(file, edge=4) is None
    monkeypatch.setattr(images, "MAX_MOVING_PIXELS", 4 * 64)
    with Image.open(file) as moving:
        assert [frame.getpixel((0, 0))[0] for frame in images.frames_of(moving)] == [0, 40, 80, 120]
    assert embed(file, edge=4).startswith("data:image/webp")

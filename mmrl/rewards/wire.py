"""The HTTP format of reward requests: JSON with PNG bytes in base64, versioned; nothing in it is executed.

``GET /health``   -> ``{"mmrl": 1, "reward": name, "inputs": [...], "per": "sample", "spans": false, "max_bytes": n}``
``POST /score``   ``{"version": 1, "step": 7, "groups": [[0, 1]], "files": [BYTES],``
                  `` "samples": [{"id": "", "prompt": "", "meta": {}, "system": null,``
                  ``   "negative_prompt": null, "place": [7, 0, 0, 1],``
                  ``   "media": [{"kind": "video", "file": 0, "frames": null}],``
                  ``   "image": PNG, "video": [PNG, ...], "audio": WAV, "text": null, "truncated": false,``
                  ``   "begun": ""}]}``
                  -> ``{"version": 1, "scores": [0.5, null], "parts": {"name": [...]}, "errors": [null, "why"],``
                  ``    "spans": [[[0, 4, -1.0]], null]}``
``files`` are the encoded pictures and clips of the prompts, the bytes of their files; samples share an entry.
``place`` is step, slot, attempt and sample; ``spans`` are there where the reward declares them.

An error of the whole request is a status of 400 or more with ``{"error": "why"}``. Imports no torch.
"""

from __future__ import annotations

import base64
import io
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from mmrl.core.json_types import Json, JsonObject, finite
from mmrl.core.media import BadMediaError, Media, read_bytes
from mmrl.core.media.images import MAX_PIXELS, BadImageError, png_bytes, read_rgb, to_tensor
from mmrl.core.media.sound import BadSoundError, read_wav, wav_bytes
from mmrl.core.reward_contract import Failed, Parts, Span, Spans, Value
from mmrl.core.trajectory import Audio, Prompt, Sample, SampleId, Turn
from mmrl.core.untrusted import no_constant

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image

VERSION = 1
MAX_SAMPLES = 4096
MAX_TOTAL_PIXELS = 8 * MAX_PIXELS
"""Decoded for one request (128 pictures of 1024 x 1024): a few kB of PNG can hold any number of equal pixels."""
MAX_VALUES = 2**22
"""Values in one message, counted by ``,``, ``[`` and ``{``, also those in texts. ``[],`` takes 20 times its size."""
MAX_WIDE_BYTES = 32 * 2**20
"""Of a message with characters beyond ASCII, without its base64: one such character can make a text 4 times larger."""
_BASE64 = re.compile(rb'"[A-Za-z0-9+/=]{1024,}"')
_Source: TypeAlias = tuple[str | None, int | None, int | None, bytes | None]
"""Of a medium: path, offset, size and data."""
T = TypeVar("T")


class WireError(ValueError):
    """A message that does not follow the format; the text says where."""


@dataclass(frozen=True)
class Request:
    """A request for scores. ``samples[i]`` is None where ``errors[i]`` says what is wrong with it."""

    samples: list[Sample | None]
    errors: list[str | None]
    groups: list[list[int]]
    step: int


@dataclass(frozen=True)
class Reply:
    """Scores of ``n`` samples: None where ``errors`` says why; and named parts, None where one says nothing.

    ``spans``: pieces of each response, of a reward that declares them.
    """

    scores: list[float | None]
    parts: dict[str, list[float | None]] = field(default_factory=dict)
    errors: list[str | None] = field(default_factory=list)
    spans: list[list[Span] | None] | None = None


def encode_request(samples: Sequence[Sample], groups: Sequence[Sequence[int]], step: int) -> tuple[bytes, int]:
    """The body of ``POST /score``, and how many of its bytes are pictures and clips.

    Raises ``WireError`` where a prompt's meta is not JSON or its media cannot be read.
    """
    items: list[JsonObject] = []
    files: dict[_Source, str] = {}
    pictures = 0
    for sample in samples:
        prompt, place, audio = sample.prompt, sample.id, sample.audio
        image = None if sample.image is None else _png(sample.image)
        video = None if sample.video is None else [_png(frame) for frame in sample.video]
        sound = None if audio is None else base64.b64encode(wav_bytes(*audio)).decode("ascii")
        pictures += sum(len(one) for one in (image, sound, *(video or ())) if one is not None)
        item: JsonObject = {
            "id": prompt.id,
            "prompt": prompt.text,
            "meta": dict(prompt.meta),
            "place": [place.step, place.slot, place.attempt, place.sample],
            "system": prompt.system,
            "negative_prompt": prompt.negative_prompt,
            "turns": [[turn.role, turn.text] for turn in prompt.turns] or None,
            "media": [_sent(media, files) for media in prompt.media] or None,
            "image": image,
            "video": video,
            "audio": sound,
            "text": sample.text,
            "truncated": sample.truncated or None,
            "begun": sample.begun or None,
        }
        items.append({name: value for name, value in item.items() if value is not None})
    message: dict[str, Json] = {"version": VERSION, "step": step, "groups": [list(g) for g in groups], "samples": items}
    if files:
        message["files"] = list(files.values())
    try:
        return _dump(message), pictures + sum(map(len, files.values()))
    except (TypeError, ValueError) as error:
        raise WireError(f"a prompt's meta cannot be written as JSON: {error}; keep JSON values in it") from None


def decode_request(body: bytes | bytearray, *, max_pixels: int = MAX_PIXELS, tensor: bool = False) -> Request:
    """Read a body that may be hostile; ``tensor`` also makes ``sample.tensor``. Raises ``WireError``."""
    message = _versioned(body)
    items = _typed(message.get("samples"), list, "samples")
    if len(items) > MAX_SAMPLES:
        raise WireError(f"samples: {len(items)} in one request; send at most {MAX_SAMPLES}")
    groups = [
        [_index(i, len(items)) for i in _typed(group, list, "groups[]")]
        for group in _typed(message.get("groups", []), list, "groups")
    ]
    if len({i for group in groups for i in group}) != sum(map(len, groups)):
        raise WireError("groups: a sample stands in more than one place")
    files = [_file(data, i) for i, data in enumerate(_typed(message.get("files", []), list, "files"))]
    samples: list[Sample | None] = []
    errors: list[str | None] = []
    decoded = 0
    for i, item in enumerate(items):
        try:
            sample = _sample(_typed(item, dict, f"samples[{i}]"), i, files, max_pixels, tensor)
            decoded += sum(p.width * p.height for p in (sample.image, *(sample.video or ())) if p is not None)
            samples.append(sample)
            errors.append(None)
        except BadImageError as error:
            samples.append(None)
            errors.append(f"image: {error}")
        except BadSoundError as error:
            samples.append(None)
            errors.append(f"audio: {error}")
        if decoded > MAX_TOTAL_PIXELS:
            raise WireError(f"samples: more than {MAX_TOTAL_PIXELS:,} pixels in one request; lower batch_size")
    return Request(samples, errors, groups, _typed(message.get("step", -1), int, "step"))


def picture_bytes(request: Request, *, tensor: bool) -> int:
    """The memory that the decoded pictures and sounds of a request take."""
    pictures = [p for s in request.samples if s is not None for p in (s.image, *(s.video or ())) if p is not None]
    sounds = sum(s.audio.wave.numel() for s in request.samples if s is not None and s.audio is not None)
    return sum(p.width * p.height for p in pictures) * (16 if tensor else 4) + 4 * sounds


def encode_reply(reply: Reply) -> bytes:
    """The answer to ``POST /score``; numbers that are not finite become null."""
    parts = {name: [finite(v) for v in values] for name, values in reply.parts.items()}
    scores = [finite(v) for v in reply.scores]
    message: dict[str, Json] = {"version": VERSION, "scores": scores, "parts": parts, "errors": reply.errors}
    return _dump(message if reply.spans is None else {**message, "spans": reply.spans})


def decode_reply(body: bytes, n: int, *, spans: bool = False) -> Parts:
    """The named parts of a reward's answer for ``n`` samples, ``score`` and, where wanted, ``spans`` among them.

    Raises ``WireError``.
    """
    message = _versioned(body)
    errors = _typed(message.get("errors", [None] * n), list, "errors")
    if len(errors) != n:
        raise WireError(f"errors: {len(errors)} for {n} samples")
    found = {**_typed(message.get("parts", {}), dict, "parts"), "score": message.get("scores")}
    parts = {str(name): _values(values, n, str(name)) for name, values in found.items()}
    parts["score"] = [
        Failed(str(errors[i] or "the server gave no score")) if value is None else value
        for i, value in enumerate(parts["score"])
    ]
    return {**parts, "spans": _spans(message.get("spans"), n)} if spans else parts


def _dump(message: JsonObject) -> bytes:
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode("utf-8")


def _check_size(body: bytes | bytearray) -> None:
    """Refuse what would take many times its size in memory, before it is read."""
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MAX_VALUES:
        raise WireError(f"more than {MAX_VALUES:,} values in one message; lower batch_size")
    if len(body) > MAX_WIDE_BYTES:
        text = len(body)
        if body.isascii():
            text -= sum(m.end() - m.start() for m in _BASE64.finditer(body)) if b"\\u" in body else text
        if text > MAX_WIDE_BYTES:
            raise WireError(f"more than {MAX_WIDE_BYTES:,} bytes of text beyond ASCII; lower batch_size")


def _versioned(body: bytes | bytearray) -> dict[str, Json]:
    _check_size(body)
    try:
        parsed: Json = json.loads(body, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise WireError(f"not JSON: {error}") from None
    message: dict[str, Json] = _typed(parsed, dict, "the message")
    if message.get("version") != VERSION:
        raise WireError(f"version: {message.get('version')!r}; this side speaks version {VERSION}")
    return message


def _typed(value: Json, kind: type[T], where: str) -> T:
    if isinstance(value, bool) or not isinstance(value, kind):
        raise WireError(f"{where}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def _index(value: Json, n: int) -> int:
    index = _typed(value, int, "groups[][]")
    if not 0 <= index < n:
        raise WireError(f"groups: {index} is no index of {n} samples")
    return index


def _sent(media: Media, files: dict[_Source, str]) -> JsonObject:
    """A medium as its index in ``files``, to which its bytes are added unless they are there."""
    source = (media.path, media.offset, media.size, media.data)
    if source not in files:
        try:
            files[source] = base64.b64encode(read_bytes(media)).decode("ascii")
        except BadMediaError as error:
            raise WireError(f"the prompt's {media.kind} cannot be sent: {error}") from None
    frames = None if media.frames is None else list(media.frames)
    return {"kind": media.kind, "file": list(files).index(source), "frames": frames}


def _decoded(encoded: Json, where: str, bad: Callable[[str], Exception]) -> bytes:
    """The bytes of a text in base64. Raises ``WireError`` for no text, and what ``bad`` makes of a reason."""
    text = _typed(encoded, str, where)
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise bad(f"not base64: {error}") from None


def _file(encoded: Json, index: int) -> bytes:
    where = f"files[{index}]"
    return _decoded(encoded, where, lambda why: WireError(f"{where}: {why}"))


def _media(items: Json, files: list[bytes], where: str) -> tuple[Media, ...]:
    found: list[Media] = []
    for j, given in enumerate(_typed(items, list, where)):
        at = f"{where}[{j}]"
        item: dict[str, Json] = _typed(given, dict, at)
        kind, listed = item.get("kind"), item.get("frames")
        if kind not in ("image", "video"):
            raise WireError(f"{at}.kind: {kind!r}; write image or video")
        frames = None
        if listed is not None:
            frames = tuple(_typed(frame, int, f"{at}.frames[]") for frame in _typed(listed, list, f"{at}.frames"))
        file = _typed(item.get("file"), int, f"{at}.file")
        if not 0 <= file < len(files):
            raise WireError(f"{at}.file: {file} is no index of {len(files)} files")
        found.append(Media(kind, data=files[file], frames=frames))
    return tuple(found)


def _place(item: JsonObject, index: int) -> SampleId:
    """The sample's id; a client that sends none gets ``index`` in it."""
    where = f"samples[{index}].place"
    place = [_typed(number, int, f"{where}[]") for number in _typed(item.get("place", [-1, 0, 0, index]), list, where)]
    if len(place) != 4:
        raise WireError(f"{where}: {len(place)} numbers; write step, slot, attempt and sample")
    return SampleId(*place)


def _sample(item: JsonObject, index: int, files: list[bytes], max_pixels: int, tensor: bool) -> Sample:
    where = f"samples[{index}]"
    text, system, negative = (
        None if item.get(name) is None else _typed(item[name], str, f"{where}.{name}")
        for name in ("text", "system", "negative_prompt")
    )
    truncated = item.get("truncated", False)
    if not isinstance(truncated, bool):
        raise WireError(f"{where}.truncated: expected true or false")
    begun = _typed(item.get("begun", ""), str, f"{where}.begun")
    prompt = Prompt(
        id=_typed(item.get("id", str(index)), str, f"{where}.id"),
        text=_typed(item.get("prompt", ""), str, f"{where}.prompt"),
        meta=_typed(item.get("meta", {}), dict, f"{where}.meta"),
        media=_media(item.get("media", []), files, f"{where}.media"),
        system=system,
        negative_prompt=negative,
        turns=tuple(_turn(turn, f"{where}.turns[]") for turn in _typed(item.get("turns", []), list, f"{where}.turns")),
    )
    place, still, clip = _place(item, index), item.get("image"), item.get("video")
    image = None if still is None else _picture(still, f"{where}.image", max_pixels)
    video = None if clip is None else _clip(clip, f"{where}.video", max_pixels)
    audio = None if item.get("audio") is None else _audio(item["audio"], f"{where}.audio")
    sample = Sample(prompt, place, image=image, video=video, audio=audio, text=text, truncated=truncated, begun=begun)
    return replace(sample, tensor=_pixels(image, video)) if tensor else sample


def _turn(turn: Json, where: str) -> Turn:
    role, text = (*_typed(turn, list, where), None, None)[:2]
    if role not in ("user", "assistant"):
        raise WireError(f"{where}: {role!r} speaks; write [user, text] or [assistant, text]")
    return Turn(role, _typed(text, str, where))


def _png(image: Image) -> str:
    return base64.b64encode(png_bytes(image, compress_level=1)).decode("ascii")


def _picture(encoded: Json, where: str, max_pixels: int) -> Image:
    """Raises ``WireError``, and ``BadImageError`` for a picture that cannot be read."""
    data = _decoded(encoded, where, BadImageError)
    return read_rgb(io.BytesIO(data), formats=("PNG",), max_pixels=max_pixels)[0]


def _audio(encoded: Json, where: str) -> Audio:
    """Raises ``WireError``, and ``BadSoundError`` for a sound that cannot be read."""
    return Audio(*read_wav(_decoded(encoded, where, BadSoundError)))


def _clip(frames: Json, where: str, max_pixels: int) -> tuple[Image, ...]:
    """All frames of one size, at most ``max_pixels`` of them together. Raises as ``_picture`` does."""
    made: list[Image] = []
    for i, frame in enumerate(_typed(frames, list, where)):
        made.append(_picture(frame, f"{where}[{i}]", max_pixels))
        max_pixels -= made[-1].width * made[-1].height
    if len({frame.size for frame in made}) != 1:
        raise BadImageError("the frames of a clip are of different sizes" if made else "a clip without frames")
    return tuple(made)


def _pixels(image: Image | None, video: tuple[Image, ...] | None) -> torch.Tensor | None:
    """The float32 tensor of a picture, ``[3, H, W]``, or of a clip, ``[F, 3, H, W]``; None of neither."""
    if video:
        import torch

        return torch.stack([to_tensor(frame) for frame in video])
    return None if image is None else to_tensor(image)


def _values(values: Json, n: int, name: str) -> list[Value]:
    numbers = _typed(values, list, name)
    if len(numbers) != n:
        raise WireError(f"{name}: {len(numbers)} values for {n} samples")
    if any(v is not None and (isinstance(v, bool) or not isinstance(v, int | float)) for v in numbers):
        raise WireError(f"{name}: expected numbers and null")
    try:
        return [None if v is None else float(v) for v in numbers]
    except OverflowError:
        raise WireError(f"{name}: a number too large for a float") from None


def _spans(values: Json, n: int) -> list[Spans | None]:
    """Raises ``WireError`` where they are not ``n`` lists of (start, end, value), or null."""
    listed = _typed(values, list, "spans")
    if len(listed) != n:
        raise WireError(f"spans: {len(listed)} values for {n} samples")
    try:
        return [None if spans is None else Spans([(a, b, value) for a, b, value in spans]) for spans in listed]
    except (TypeError, ValueError, OverflowError) as error:
        raise WireError(f"spans: expected lists of [start, end, value] and null: {error}") from None

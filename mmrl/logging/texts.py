"""The texts of an evaluation, stored with the metrics: prompt, response, scores, and the prompt's pictures.

Also their form in the report and the model card: escaped, and folded where it is long.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmrl.core.episode import Line
from mmrl.core.files import remove, write_atomic
from mmrl.core.json_types import finite
from mmrl.core.media import BadMediaError, open_clip, open_image
from mmrl.core.trajectory import Sample
from mmrl.logging.rundir import RunDir

EDGE = 512
"""Pixels of the longest side of a prompt's picture as it is kept; larger ones are shrunk (the data has them whole)."""
FRAMES = 4
"""Frames kept of a clip, evenly over its length."""
LONG, LINES = 600, 12
"""Characters and lines of a text that the report shows at once; of a longer one the beginning, and the rest unfolds."""
LONGEST = 8000
"""Characters of a text in the report; of a longer one its beginning and its end."""
_SYMBOLS = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {127: 0x2421}
"""Control characters are shown as the symbols Unicode has for them."""


@dataclass(frozen=True)
class Folded:
    """A text to show: its beginning, and all of it where that is longer (else None)."""

    beginning: str
    whole: str | None
    length: int


def write_texts(run: RunDir, step: int, samples: Sequence[Sample], scores: Sequence[Mapping[str, float]]) -> None:
    """Write ``samples/step_NNNNNN.json``: per sample its prompt, text, scores and the files of the pictures of both.

    The list is written last: where it stands, the pictures it names are whole.
    """
    name = f"step_{step:06d}"
    (run.samples / f"{name}.json").unlink(missing_ok=True)
    remove(run.samples / name)
    listing = list[dict[str, Any]]()
    for i, (sample, row) in enumerate(zip(samples, scores, strict=True)):
        files, media = _pictures(run, name, i, sample), len(sample.prompt.media)
        one: dict[str, Any] = {
            "prompt": encodable(sample.prompt.conversation),
            "text": encodable(sample.transcript),
            "truncated": sample.truncated,
            "pictures": [file for of in files.values() for file in of],
            "scores": {k: finite(v) for k, v in row.items()},
        }
        if sample.episode is not None:
            told = {n - media: of[0] for n, of in files.items() if n >= media}
            one["turns"] = kept_lines(sample.episode.lines(told))
        listing.append(one)
    content: dict[str, Any] = {"step": step, "samples": listing}
    write_atomic(run.samples / f"{name}.json", json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def kept_lines(lines: Sequence[Line]) -> list[dict[str, str]]:
    """The lines of an episode for a file of JSON (``lines_in`` reads them)."""
    return [{key: encodable(value) for key, value in vars(line).items() if value} for line in lines]


def visible(text: str) -> str:
    """``text`` with nothing in it that cannot be seen or encoded: control characters become their symbols."""
    return encodable(text).replace("\r\n", "\n").translate(_SYMBOLS)


def fold(text: str) -> Folded:
    """What the report shows of ``text``, visible (see there) and with its whitespace."""
    text = visible(text)
    lines = text.split("\n")
    if len(text) <= LONG and len(lines) <= LINES:
        return Folded(text, None, len(text))
    beginning = "\n".join(lines[: LINES // 2])[: LONG // 2].rstrip()
    return Folded(beginning, shorten(text, LONGEST), len(text))


def shorten(text: str, most: int) -> str:
    """``text``, or its first three and last one quarter of ``most`` characters with a note of what is left out."""
    if len(text) <= most:
        return text
    head, tail = text[: 3 * most // 4], text[len(text) - most // 4 :]
    return f"{head} [... {len(text) - len(head) - len(tail):,} characters ...] {tail}"


def cell(text: str, most: int = 240) -> str:
    """``text`` for a cell of an HTML table inside Markdown: short, escaped, without line ends."""
    lines = shorten(visible(text).strip(), most).split("\n")
    return "<br>".join(html.escape(line) for line in lines)


def encodable(text: str) -> str:
    """``text`` with a question mark for half a surrogate pair, which JSON allows and UTF-8 does not."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _pictures(run: RunDir, name: str, i: int, sample: Sample) -> dict[int, list[str]]:
    """Save the pictures of a prompt, of a clip a few frames, and what the environment of an episode showed. Returns the
    files of each that can be read, by its number among them all."""
    files = dict[int, list[str]]()
    for n, medium in enumerate([*sample.prompt.media, *(sample.episode.pictures if sample.episode else ())]):
        try:
            found = [open_image(medium)] if medium.kind == "image" else open_clip(medium, count=FRAMES).frames
        except BadMediaError:
            continue
        (run.samples / name).mkdir(exist_ok=True)
        for k, picture in enumerate(found):
            picture.thumbnail((EDGE, EDGE))
            file = f"{name}/{i:03d}_{n}{'' if medium.kind == 'image' else f'_{k}'}.png"
            picture.save(run.samples / file)
            files.setdefault(n, []).append(file)
    return files

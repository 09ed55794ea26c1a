"""What the students read of a sample, and the file of verdicts that they were trained on.

verdicts.jsonl    {"group", "prompt", "prompt_pictures", "answer", "answer_pictures", "verdict"}, pictures as PNG
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from PIL import Image

from mmrl.core.errors import UserError
from mmrl.core.files import write_atomic
from mmrl.core.json_types import Json, as_integer, as_list, as_number, as_object, as_text
from mmrl.core.media import open_image
from mmrl.core.media.images import png_bytes, read_rgb
from mmrl.core.trajectory import Sample
from mmrl.core.untrusted import open_file, parse_json
from mmrl.rewards.judging.asking import picture_digest
from mmrl.rewards.learned.distilled.students import Side

VERDICTS = "verdicts.jsonl"
_MOST_LINE = 64 << 20
"""Bytes of a verdict with its pictures."""


@dataclass(frozen=True)
class Pairs:
    """Prompts and answers with the judge's verdicts in [0, 1]; ``groups``: the number of each pair's group."""

    prompts: list[Side] = field(default_factory=list)
    answers: list[Side] = field(default_factory=list)
    verdicts: list[float] = field(default_factory=list)
    groups: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.verdicts)

    def add(self, prompt: Side, answer: Side, verdict: float, group: int) -> None:
        self.prompts.append(prompt)
        self.answers.append(answer)
        self.verdicts.append(verdict)
        self.groups.append(group)

    def extend(self, more: Pairs) -> None:
        """Add ``more``, whose groups get new numbers."""
        first = max(self.groups, default=-1) + 1
        for row in zip(more.prompts, more.answers, more.verdicts, more.groups, strict=True):
            self.add(*row[:3], row[3] + first)


def sides_of(samples: Sequence[Sample]) -> tuple[list[Side], list[Side]]:
    """The prompts and the answers of samples. A picture of a prompt is opened once. Raises ``UserError`` for clips."""
    opened = cache(open_image)
    prompts, answers = [], []
    for sample in samples:
        if any(media.kind != "image" for media in sample.prompt.media):
            raise _no_clips("the prompts have clips")
        prompts.append(Side(sample.prompt.conversation, tuple(map(opened, sample.prompt.media))))
        if sample.text is not None:
            answers.append(Side(sample.text))
        elif sample.image is not None:
            answers.append(Side("", (sample.image,)))
        else:
            raise _no_clips("the samples are clips")
    return prompts, answers


def _no_clips(why: str) -> UserError:
    return UserError(f"{why}, which the students cannot read; distil a judge of pictures or of texts")


def unique(prompts: Sequence[Side]) -> tuple[list[Side], list[int]]:
    """The prompts that differ, and which of them each one is."""
    keys = [(side.text, *map(picture_digest, side.pictures)) for side in prompts]
    firsts = dict(zip(reversed(keys), reversed(prompts), strict=True))
    places = {key: n for n, key in enumerate(dict.fromkeys(keys))}
    return [firsts[key] for key in places], [places[key] for key in keys]


def write_pairs(path: Path, pairs: Pairs) -> None:
    """Write verdicts.jsonl."""
    lines = []
    for prompt, answer, verdict, group in zip(pairs.prompts, pairs.answers, pairs.verdicts, pairs.groups, strict=True):
        row = {"group": group, "prompt": prompt.text, "prompt_pictures": [_png(one) for one in prompt.pictures]}
        row |= {"answer": answer.text, "answer_pictures": [_png(one) for one in answer.pictures], "verdict": verdict}
        lines.append(json.dumps(row, ensure_ascii=False, allow_nan=False))
    write_atomic(path, ("\n".join(lines) + "\n").encode("utf-8", "replace"))


def read_pairs(path: Path) -> Pairs:
    """The pairs of a verdicts.jsonl. Raises ``UserError`` for one that cannot be read."""
    pairs, pictures = Pairs(), dict[str, Image.Image]()
    try:
        with open_file(path, root=path.parent) as file:
            for number, line in enumerate(iter(partial(file.readline, _MOST_LINE + 1), b""), 1):
                try:
                    if len(line) > _MOST_LINE:
                        raise ValueError(f"more than {_MOST_LINE:,} bytes")
                    row = as_object(parse_json(line))
                    prompt = Side(as_text(row["prompt"]), _pictures(row["prompt_pictures"], pictures))
                    answer = Side(as_text(row["answer"]), _pictures(row["answer_pictures"], {}))
                    pairs.add(prompt, answer, float(as_number(row["verdict"])), as_integer(row["group"]))
                except (ValueError, KeyError, TypeError, OSError) as error:
                    raise UserError(f"{path}, line {number}, is no verdict ({error}); remove the line") from error
    except OSError as error:
        raise UserError(
            f"{path} cannot be read ({error.strerror or error}); name a folder that mmrl distill wrote"
        ) from error
    return pairs


def _png(image: Image.Image) -> str:
    return base64.b64encode(png_bytes(image)).decode("ascii")


def _pictures(value: Json, known: dict[str, Image.Image]) -> tuple[Image.Image, ...]:
    found = []
    for text in map(as_text, as_list(value)):
        if text not in known:
            known[text] = read_rgb(io.BytesIO(base64.b64decode(text)), formats=("PNG",))[0]
        found.append(known[text])
    return tuple(found)

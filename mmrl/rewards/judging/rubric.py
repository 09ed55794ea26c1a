"""A rubric: a template of the question to a judge, with pictures where it names them.

The template is Jinja, sandboxed. What comes from a prompt or a response is text and stays text: a response that writes
a model's control tokens (``<|im_end|>``), a picture's mark or the template's own tags (``</response>``) could otherwise
end its own turn, or its own part of the question, and answer for the judge (``mmrl.rewards.judging.escaping``).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, nodes
from jinja2.meta import find_undeclared_variables
from jinja2.sandbox import ImmutableSandboxedEnvironment
from PIL.Image import Image

from mmrl.core.errors import UserError
from mmrl.core.json_types import Json
from mmrl.core.media import BadMediaError, Media, evenly, open_clip, open_image
from mmrl.core.reward_contract import Input
from mmrl.core.trajectory import Prompt, Sample
from mmrl.rewards.judging.escaping import Frame, fence_of, without_control

NAMES: dict[str, tuple[str, ...]] = {
    "pointwise": ("response", "response_text", "image", "clip"),
    "steps": ("steps", "response", "response_text"),
    "pairwise": ("a", "b"),
    "ranking": ("candidates",),
}
"""What a template may use in each mode, beside ``prompt``, ``prompt_text``, ``media``, ``meta`` and ``fence``."""
_COMMON = ("prompt", "prompt_text", "media", "meta", "fence")
_SUFFIXES = (".txt", ".md", ".j2", ".jinja", ".jinja2")
_OPEN, _SHUT = "\ue000", "\ue001"
_MARK = re.compile(f"{_OPEN}(\\d+){_SHUT}")
_PLACEHOLDER = re.compile(r"<(image|video)>")
_BLANK_LINES = re.compile(r"\n[ \t\r\f\v]*(?:\n[ \t\r\f\v]*)+")


class RubricError(ValueError):
    """A sample for which the template cannot be filled in."""


@dataclass(frozen=True)
class Step:
    """A piece of a response between blank lines: its characters ``start`` to ``end`` (exclusive)."""

    start: int
    end: int
    text: str


def split_steps(response: str) -> list[Step]:
    """The steps of a response: what stands between blank lines, without the space around it."""
    edges = [0, *(edge for found in _BLANK_LINES.finditer(response) for edge in found.span()), len(response)]
    steps = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        text = response[start:end].strip()
        if text:
            start = response.index(text, start)
            steps.append(Step(start, start + len(text), text))
    return steps


def steps_of(sample: Sample) -> list[Step]:
    """The steps of a response; of an episode those of all its turns, in its transcript."""
    if sample.episode is None:
        return split_steps(sample.text or "")
    turns = zip(sample.episode.starts, sample.episode.turns, strict=True)
    found = [(at, step) for at, turn in turns for step in split_steps(turn.action.text)]
    return [Step(at + step.start, at + step.end, step.text) for at, step in found]


class Steps(list[str]):
    """The texts of the steps; as text, each between ``<step 1 fence>`` and ``</step 1 fence>``."""

    def __init__(self, texts: Iterable[str], fence: str) -> None:
        super().__init__(texts)
        self.fence = fence

    def __str__(self) -> str:
        of = self.fence
        return "\n".join(f"<step {i} {of}>\n{text}\n</step {i} {of}>" for i, text in enumerate(self, 1))


@dataclass
class _Page:
    """The pictures of one question, in the order in which the template's variables were made."""

    pictures: list[Image] = field(default_factory=list)

    def mark(self, image: Image) -> str:
        self.pictures.append(image)
        return f"{_OPEN}{len(self.pictures) - 1}{_SHUT}"

    def parts(self, text: str) -> tuple[str | Image, ...]:
        pieces = _MARK.split(text)
        parts = [piece if i % 2 == 0 else self.pictures[int(piece)] for i, piece in enumerate(pieces)]
        return tuple(part for part in parts if not isinstance(part, str) or part)


@dataclass(frozen=True)
class Candidate:
    """A sample in a comparison; a template names which of the two it shows."""

    response: str | None
    image: str | None
    clip: str | None


_Shown: TypeAlias = "Json | Candidate | list[Candidate]"
"""A variable of a template."""


class Rubric:
    """A template and what of a sample it reads.

    ``text``: the template, or the name of a file (.txt, .md, .j2) with it. ``meta``: the fields of a prompt's meta it
    may see. ``frames``: how many frames of each clip are shown. ``seed``: of the fences. ``criteria``: what
    the judge reads of them, where the answer has any. Raises ``UserError`` for a template that cannot work.
    """

    def __init__(
        self, text: str, mode: str, meta: Collection[str] = (), frames: int = 8, seed: int = 0, criteria: str = ""
    ) -> None:
        self.mode, self.meta, self.frames, self.seed, self.criteria = mode, tuple(meta), frames, seed, criteria
        self.control: tuple[str, ...] = ()
        """Further control tokens to keep out of texts, those of the judge's own tokenizer."""
        self.source = _source(text)
        self._frame = Frame(self.source, ("step",), "step") if mode == "steps" else Frame(self.source)
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        try:
            tree = environment.parse(self.source)
            self.names = frozenset(find_undeclared_variables(tree))
            self._template = environment.from_string(self.source)
        except TemplateSyntaxError as error:
            raise UserError(f"options.rubric: line {error.lineno}: {error.message}; mend the template") from None
        self._check(tree)
        self.inputs = self._inputs(tree)
        """The fields of a sample that the template shows."""

    def render(self, samples: list[Sample]) -> tuple[str | Image, ...]:
        """The question about ``samples`` (one, or those to compare). Raises ``RubricError``."""
        page = _Page()
        try:
            text = self._template.render(self._variables(samples, page))
        except (TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise RubricError(f"the rubric cannot be filled in: {error}") from None
        return page.parts(text)

    def clean(self, text: str) -> str:
        """``text`` with every control token broken by a space after its first character, and no picture's mark."""
        return without_control(text.replace(_OPEN, "").replace(_SHUT, ""), self.control)

    def clean_response(self, text: str) -> str:
        """``clean`` text, with nothing in it that the template frames a response with."""
        return self._frame.kept_out_of(self.clean(text))

    def _variables(self, samples: list[Sample], page: _Page) -> dict[str, _Shown]:
        prompt = samples[0].prompt
        fence = fence_of(self.seed, [prompt.conversation, *(sample.transcript for sample in samples)])
        plain = _PLACEHOLDER.sub("", prompt.conversation) if prompt.media else prompt.conversation
        found: dict[str, _Shown] = {"prompt_text": self.clean(plain.strip()), "fence": fence}
        if self.criteria:
            found["criteria"] = self.criteria
        if "meta" in self.names:
            found["meta"] = {key: self._clean_value(prompt.meta[key]) for key in self.meta if key in prompt.meta}
        if self.names & {"prompt", "media"}:
            marks = [[page.mark(image) for image in images] for images in self._open(prompt)]
            found["media"] = "".join(mark for of in marks for mark in of)
            found["prompt"] = self._with_media(prompt, marks)
        if self.mode in ("pairwise", "ranking"):
            compared = [self._candidate(sample, page) for sample in samples]
            names = dict(zip(("a", "b"), compared, strict=False)) if self.mode == "pairwise" else {}
            return {**found, "candidates": compared, **names}
        if samples[0].text is not None:
            found["response_text"] = self.clean_response(samples[0].transcript)
            found["response"] = self._said(samples[0], page) if "response" in self.names else found["response_text"]
            steps = (self._frame.item(self.clean_response(step.text)) for step in steps_of(samples[0]))
            found["steps"] = Steps(steps, fence)
        image, clip = samples[0].image, samples[0].video
        if image is not None and "image" in self.names:
            found["image"] = page.mark(image)
        if clip is not None and "clip" in self.names:
            found["clip"] = self._clip(clip, page)
        return found

    def _said(self, sample: Sample, page: _Page) -> str:
        """The response; of an episode all its turns, with the pictures that its environment showed."""
        parts = [sample.transcript] if sample.episode is None else sample.episode.parts
        return "".join(self.clean_response(p) if isinstance(p, str) else self._told(p, page) for p in parts)

    def _told(self, media: Media, page: _Page) -> str:
        try:
            return page.mark(open_image(media))
        except BadMediaError as error:
            raise RubricError(f"a picture of the episode cannot be shown: {error}") from None

    def _candidate(self, sample: Sample, page: _Page) -> Candidate:
        response = None if sample.text is None else self._frame.item(self._said(sample, page))
        shown = sample.image is not None and "image" in self.inputs
        clip = self._clip(sample.video, page) if sample.video and "video" in self.inputs else None
        return Candidate(response, page.mark(sample.image) if shown and sample.image else None, clip)

    def _clip(self, clip: Sequence[Image], page: _Page) -> str:
        return "".join(page.mark(frame) for frame in evenly(clip, self.frames))

    def _with_media(self, prompt: Prompt, marks: list[list[str]]) -> str:
        """The prompt's text with the pictures in place of its placeholders, before it where it has none."""
        pieces = _PLACEHOLDER.split(prompt.conversation) if prompt.media else [prompt.conversation]
        places = len(pieces) // 2
        if places == 0:
            return "".join(mark for of in marks for mark in of) + self.clean(prompt.conversation)
        if places != len(marks):
            raise RubricError(f"the prompt has {places} placeholders for {len(marks)} pictures and clips")
        rest: Iterator[list[str]] = iter(marks)
        return "".join(self.clean(piece) if i % 2 == 0 else "".join(next(rest)) for i, piece in enumerate(pieces))

    def _open(self, prompt: Prompt) -> list[list[Image]]:
        try:
            return [self._images(media) for media in prompt.media]
        except BadMediaError as error:
            raise RubricError(f"a picture of the prompt cannot be shown: {error}") from None

    def _images(self, media: Media) -> list[Image]:
        if media.kind == "image":
            return [open_image(media)]
        return list(open_clip(media, count=None if media.frames else self.frames).frames)

    def _clean_value(self, value: Json) -> Json:
        if isinstance(value, str):
            return self.clean(value)
        if isinstance(value, Mapping):
            return {self.clean(str(k)): self._clean_value(v) for k, v in value.items()}
        return [self._clean_value(v) for v in value] if isinstance(value, list | tuple) else value

    def _inputs(self, tree: nodes.Template) -> tuple[Input, ...]:
        if self.mode in ("pairwise", "ranking"):
            shown = {node.attr for node in tree.find_all(nodes.Getattr)}
            if not shown & {"response", "image", "clip"}:
                name = "a" if self.mode == "pairwise" else "candidate"
                raise UserError(
                    f"options.rubric: say what of a candidate is shown: {name}.response, {name}.image or {name}.clip"
                )
        else:
            shown = {"response" if name in ("steps", "response_text") else name for name in self.names}
        fields: tuple[tuple[str, Input], ...] = (("response", "text"), ("image", "image"), ("clip", "video"))
        return tuple(field for name, field in fields if name in shown)

    def _check(self, tree: nodes.Template) -> None:
        allowed = {*_COMMON, *NAMES[self.mode], *(["criteria"] if self.criteria else [])}
        if self.criteria and "criteria" not in self.names:
            raise UserError(
                "options.rubric: the template does not show the judge its criteria (options.answer.criteria); put "
                "{{ criteria }} where they are to stand"
            )
        unknown = sorted(self.names - allowed)
        if unknown:
            raise UserError(
                f"options.rubric: there is no {unknown[0]!r} in mode {self.mode}; it has {', '.join(sorted(allowed))}"
            )
        if not self.names & {*NAMES[self.mode]}:
            raise UserError(
                f"options.rubric: the template shows the judge nothing of a sample; use {{{{ {NAMES[self.mode][0]} }}}}"
            )
        for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
            field_name = _field_of_meta(node)
            if field_name is not None and field_name not in self.meta:
                raise UserError(
                    f"options.rubric: the template reads meta.{field_name}, which options.meta does not allow; "
                    f"add it there if the judge may know it: meta: [{', '.join([*self.meta, field_name])}]"
                )


def _field_of_meta(node: nodes.Node) -> str | None:
    match node:
        case nodes.Getattr(node=nodes.Name(name="meta"), attr=str(name)):
            return name
        case nodes.Getitem(node=nodes.Name(name="meta"), arg=nodes.Const(value=str(name))):
            return name
        case _:
            return None


def _source(text: str) -> str:
    """The template, read from a file where ``text`` names one. Raises ``UserError``."""
    if "\n" in text or "{" in text or not text.endswith(_SUFFIXES):
        return text
    try:
        return Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"options.rubric: {text} cannot be read ({error}); correct the path") from None

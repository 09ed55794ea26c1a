"""A judge distilled to two small students (``mmrl distill``, docs/distill.md): its verdicts without asking it.

- name: distilled
  options: {path: distilled/shapes}       # from the recipe's folder
- name: distilled
  options: {path: distilled/shapes, judge_below: 0.8}     # the judge where the student is not sure
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.json_types import as_object, as_text
from mmrl.core.reward_contract import Context, Declaration, Failed, Input, Value, Weights
from mmrl.core.secrets import masks
from mmrl.core.trajectory import Sample
from mmrl.rewards import loading
from mmrl.rewards.learned.distilled.encoders import Backbone
from mmrl.rewards.learned.distilled.folder import (
    NAME,
    Record,
    Student,
    load_encoder,
    load_students,
    logits_of,
    read,
    student_of,
)
from mmrl.rewards.learned.distilled.sides import sides_of, unique
from mmrl.rewards.learned.formulas import sureness
from mmrl.rewards.returned import read_answer
from mmrl.rewards.sleeping import Sleeping


def _models(options: Mapping[str, Any]) -> list[Weights]:
    """The students, the model that reads for them, and the judge's where it may be asked. Raises ``UserError``."""
    path, below = str(options["path"]), float(options.get("judge_below", 0.0))
    said = read(Path(path))
    students = [Weights(path, "float32")]
    if said.backbone is not None:
        model = as_object(as_object(said.backbone["model"])["model"])
        students.append(Weights(as_text(model["path"]), "float32"))
    if below <= 0:
        return students
    name, given = _judge_of(said, options.get("judge"))
    inner = loading.find(name).declaration.models
    return [*students, *(inner(given) if inner else ())]


def _reads(options: Mapping[str, Any]) -> tuple[Input, ...]:
    """What the students read, and the judge where it may be asked. Raises ``UserError``."""
    said = read(Path(str(options["path"])))
    if float(options.get("judge_below", 0.0)) <= 0:
        return (said.answers,)
    name, given = _judge_of(said, options.get("judge"))
    return tuple(dict.fromkeys((said.answers, *loading.find(name).reads(given))))


@mmrl.reward(device=True, paths=("path", "judge.model", "judge.rubric"), models=_models, reads=_reads, checks=True)
class Distilled(Sleeping):
    """The verdict, in [0, 1], that a student expects of the judge.

    ``student``: interaction or dual; None takes the one that agreed better. ``judge_below``: the judge is asked about
    the samples where the student is less sure than this that the judge is on its side of one half; 0 never asks, and 1
    always. ``judge``: options that replace those with which the judge was distilled. Raises ``UserError``.
    """

    def __init__(
        self,
        path: str,
        student: str | None = None,
        judge_below: float = 0.0,
        judge: Mapping[str, Any] | None = None,
    ) -> None:
        folder = Path(path)
        self.said, students = load_students(folder)
        try:
            self.student: Student = self.said.student if student is None else student_of(student)
        except ValueError as error:
            raise UserError(f"options.student: {error}") from error
        if isinstance(judge_below, bool) or not 0 <= judge_below <= 1:
            raise UserError(f"options.judge_below is {judge_below}; give a number from 0 (never ask) to 1 (always ask)")
        self.below = float(judge_below)
        mmrl.before_loading()
        self.students = self.frozen(students, lambda: load_students(folder)[1])
        self.encoder = load_encoder(folder)
        if isinstance(self.encoder, Backbone):
            self.frozen(self.encoder.modules, lambda: _modules(folder))
        self.judge = None
        inputs: tuple[Input, ...] = (self.said.answers,)
        own_deadline = False
        if self.below > 0:
            self.judge = _built(self.said, judge)
            inputs = tuple(dict.fromkeys((*inputs, *self.judge.declaration.inputs)))
            own_deadline = self.judge.declaration.own_deadline
            if self.judge.is_async:
                self.score = self._score_awaited  # type: ignore[method-assign]
        self.__mmrl_reward__ = Declaration(
            inputs=inputs, own_deadline=own_deadline, device=True, paths=("path",), models=_models, reads=_reads
        )

    def score(self, samples: Sequence[Sample], *, context: Context) -> dict[str, Sequence[Value]]:
        """``score``; where the judge may be asked also ``asked`` (1 or 0), ``student`` (what it expected), and ``off``
        (how far the judge was from that, None where it was not asked)."""
        expected, asked = self._expected(samples, context)
        if self.judge is None:
            return {"score": expected}
        given = self.judge.call([samples[n] for n in asked], context=context) if asked else []
        return self._joined(expected, asked, given)

    async def _score_awaited(self, samples: Sequence[Sample], *, context: Context) -> dict[str, Sequence[Value]]:
        expected, asked = self._expected(samples, context)
        assert self.judge is not None
        given = await self.judge.call([samples[n] for n in asked], context=context) if asked else []
        return self._joined(expected, asked, given)

    def _expected(self, samples: Sequence[Sample], context: Context) -> tuple[list[float], list[int]]:
        """The student's verdicts, and which samples it is not sure of."""
        self.wake(context.device)
        prompts, answers = sides_of(samples)
        rows, of_prompt = unique(prompts)
        self.encoder.at(context.device)
        asked, given = self.encoder.read(rows, of_prompt, answers)
        places = torch.tensor(of_prompt, device=context.device)
        logits = logits_of(self.students, asked.to(context.device), places, given.to(context.device), self.student)
        verdicts = self.said.verdicts(logits, self.student)
        unsure = sureness(verdicts) < self.below
        asked = [n for n in range(len(samples)) if self.below >= 1 or bool(unsure[n])]
        return verdicts.tolist(), asked

    def _joined(self, expected: list[float], asked: list[int], given: object) -> dict[str, Sequence[Value]]:
        scores: list[Value] = list(expected)
        off: list[Value] = [None] * len(expected)
        if asked:
            assert self.judge is not None
            answer = read_answer(given, len(asked), self.judge.place)
            for n, value, why in zip(asked, answer.total, answer.reasons, strict=True):
                scores[n] = value if why is None else Failed(why)
                off[n] = abs(value - expected[n]) if why is None else None
        chosen = {*asked}
        return {
            "score": scores,
            "asked": [float(n in chosen) for n in range(len(expected))],
            "student": expected,
            "off": off,
        }

    def sleep(self, device: torch.device | str) -> None:
        """Free the memory of ``device``, the judge's too."""
        super().sleep(device)
        if self.judge is not None:
            self.judge.sleep(device)

    def wake(self, device: torch.device | str) -> bool:
        """Make both ready on ``device``. Returns whether later calls are faster."""
        came = super().wake(device)
        return (self.judge is not None and self.judge.wake(device)) or came

    def close(self) -> None:
        """End the judge's server, where it has one."""
        if self.judge is not None:
            self.judge.close()


def _judge_of(said: Record, given: Mapping[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """The name and the options of the judge, with what the recipe ``given`` says of it. Raises ``UserError``."""
    options = {**as_object(said.judge["options"]), **(given or {})}
    if hidden := masks(options):
        key = ".".join(map(str, hidden[0]))
        raise UserError(
            f"options.judge.{hidden[0][0]}: the judge needs {key}, a secret, which {NAME} does not have; give it here, "
            "as $NAME of an environment variable"
        )
    return as_text(said.judge["name"]), options


def _modules(folder: Path) -> nn.Module:
    encoder = load_encoder(folder)
    assert isinstance(encoder, Backbone)
    return encoder.modules


def _built(said: Record, given: Mapping[str, Any] | None) -> loading.Loaded:
    name, options = _judge_of(said, given)
    built = loading.build(loading.find(name), options)
    if built.declaration.per != "sample":
        built.close()
        raise UserError(
            "options.judge_below: the judge compares the samples of a group, and cannot be asked about some of them; "
            "remove options.judge_below"
        )
    return built


score = Distilled

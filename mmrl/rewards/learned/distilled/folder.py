"""The folder of a distilled judge: ``model.safetensors`` and ``distilled.json``; nothing in it is a pickle."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor

from mmrl.core.errors import UserError
from mmrl.core.model_folder import WEIGHTS, read_said, read_weights, write_model
from mmrl.core.secrets import masked
from mmrl.core.stored import BadFileError, Number, Text
from mmrl.core.tensor_files import filled
from mmrl.rewards.learned.distilled.comparing import Comparing, Rows
from mmrl.rewards.learned.distilled.encoders import Backbone, Encoder, Words
from mmrl.rewards.learned.distilled.read_students import ReadShape, ReadStudents
from mmrl.rewards.learned.distilled.students import Shape, Students
from mmrl.rewards.learned.formulas import calibrated

NAME = "distilled.json"
_ADAPTER = "backbone."
FORMATS = 1, 2
"""Of students that begin from nothing, and of those that begin from a model."""
Student = Literal["dual", "interaction"]
STUDENTS: tuple[Student, ...] = ("dual", "interaction")
Answers = Literal["image", "text"]
_Count = Annotated[int, Field(ge=0, le=1000, strict=True)]


@dataclass(frozen=True)
class Record:
    """What distilled.json says. ``answers``: what the students read of a sample. ``pictures``: the most pictures of a
    prompt, and of an answer, for students that begin from nothing. ``calibration``: slope and shift of each student.
    ``student``: which to ask. ``judge``: the reward that gave the verdicts, ``{name, options}``. ``figures``: of the
    held-out verdicts. ``backbone``: the model that reads for the students (``encoders.backbone_of``); None without.
    ``weights``: the SHA-256 of the file of weights, where one was written."""

    shape: Shape | ReadShape
    answers: Answers
    pictures: tuple[_Count, _Count]
    calibration: dict[Student, tuple[Number, Number]]
    student: Student
    judge: dict[str, Any]
    figures: dict[str, Any]
    backbone: dict[str, Any] | None = None
    weights: Text = ""

    def verdicts(self, logits: Tensor, student: Student) -> Tensor:
        """Calibrated verdicts in [0, 1], float64."""
        return calibrated(logits.double(), *self.calibration[student])


def write(folder: Path, record: Record, students: Comparing, adapter: Mapping[str, Tensor] | None = None) -> None:
    """Write both files into ``folder``, which exists. ``adapter``: the trained weights of the backbone. Secrets of the
    judge's options are masked."""
    said = {"format": FORMATS[record.backbone is not None], **asdict(record), "judge": masked(record.judge)}
    weights = {**students.state_dict(), **{_ADAPTER + name: of for name, of in (adapter or {}).items()}}
    write_model(folder / NAME, said, weights)


def read(folder: Path) -> Record:
    """What the folder says, without its weights. Raises ``UserError``."""
    try:
        found = read_said(folder / NAME, Record, FORMATS)
        if isinstance(found.shape, Shape) != (found.backbone is None) or not found.calibration.keys() >= {*STUDENTS}:
            raise ValueError("its keys contradict each other")
    except (OSError, ValueError) as error:
        why = f"no {NAME}" if isinstance(error, FileNotFoundError) else f"its {NAME} cannot be read: {error}"
        raise UserError(
            f"options.path: {folder} is no distilled judge ({why}); name a folder that mmrl distill wrote"
        ) from error
    return found


def student_of(name: str) -> Student:
    """Raises ``ValueError`` for a student that there is not."""
    for student in STUDENTS:
        if name == student:
            return student
    raise ValueError(f"{name!r} is no student; write {' or '.join(STUDENTS)}")


def load_students(folder: Path) -> tuple[Record, Comparing]:
    """The students, frozen and on the CPU. Raises ``UserError``, also where the weights are not those of the json."""
    said = read(folder)
    shape = said.shape
    with _readable(folder):
        tensors = {
            name: of for name, of in read_weights(folder / NAME, said.weights).items() if not name.startswith(_ADAPTER)
        }
        students: Comparing = (
            filled(lambda: Students(shape), tensors, WEIGHTS)
            if isinstance(shape, Shape)
            else filled(lambda: ReadStudents(shape), tensors, WEIGHTS)
        )
    return said, students.eval().requires_grad_(False)


def load_encoder(folder: Path) -> Encoder:
    """What reads for the students. Raises ``UserError``, also where their model is not there, or is another."""
    said = read(folder)
    if said.backbone is None:
        assert isinstance(said.shape, Shape)
        return Words(said.shape, said.pictures)
    backbone = Backbone(said.backbone)
    with _readable(folder):
        tensors = read_weights(folder / NAME, said.weights)
        own = {name.removeprefix(_ADAPTER): of for name, of in tensors.items() if name.startswith(_ADAPTER)}
        backbone.load(own)
    return backbone


@contextmanager
def _readable(folder: Path) -> Generator[None]:
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        if isinstance(error, UserError) and not isinstance(error, BadFileError):
            raise
        why = str(error).splitlines()[0]
        raise UserError(f"options.path: {folder / WEIGHTS} cannot be loaded ({why}); run mmrl distill again") from error


@torch.no_grad()
def logits_of(students: Comparing, prompts: Rows, of_prompt: Tensor, answers: Rows, student: Student) -> Tensor:
    """The logits ``[N]`` of one student for pairs, on the CPU; ``of_prompt`` says which prompt a pair has."""
    asked = students.encode(prompts, 0).rows(of_prompt)
    given = students.encode(answers, 1)
    return (students.dual if student == "dual" else students.interaction)(asked, given).cpu()

"""The folder of a distilled judge: ``model.safetensors`` and ``distilled.json``; nothing in it is a pickle."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from mmrl.distill.formulas import calibrated
from mmrl.distill.students import Inputs, Shape, Students
from mmrl.errors import UserError
from mmrl.files import write_atomic
from mmrl.json_types import JsonObject, as_integer, as_list, as_number, as_object, as_text
from mmrl.secrets import masked

NAME = "distilled.json"
WEIGHTS = "model.safetensors"
FORMAT = 1
Student = Literal["dual", "interaction"]
STUDENTS: tuple[Student, ...] = ("dual", "interaction")
Answers = Literal["image", "text"]


@dataclass(frozen=True)
class Record:
    """What distilled.json says. ``answers``: what the students read of a sample. ``pictures``: the most pictures of a
    prompt, and of an answer. ``calibration``: slope and shift of each student. ``student``: which to ask. ``judge``:
    the reward that gave the verdicts, ``{name, options}``. ``figures``: of the held-out verdicts."""

    shape: Shape
    answers: Answers
    pictures: tuple[int, int]
    calibration: dict[Student, tuple[float, float]]
    student: Student
    judge: JsonObject
    figures: JsonObject

    def verdicts(self, logits: Tensor, student: Student) -> Tensor:
        """Calibrated verdicts in [0, 1], float64."""
        return calibrated(logits.double(), *self.calibration[student])


def write(folder: Path, record: Record, students: Students) -> None:
    """Write both files into ``folder``, which exists. Secrets of the judge's options are masked."""
    weights = save({name: tensor.cpu().contiguous() for name, tensor in students.state_dict().items()})
    write_atomic(folder / WEIGHTS, weights)
    said = {
        "format": FORMAT,
        "shape": record.shape.as_json(),
        "answers": record.answers,
        "pictures": record.pictures,
        "calibration": record.calibration,
        "student": record.student,
        "judge": masked(record.judge),
        "weights": hashlib.sha256(weights).hexdigest(),
        "figures": record.figures,
    }
    write_atomic(folder / NAME, json.dumps(said, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def read(folder: Path) -> Record:
    """What the folder says, without its weights. Raises ``UserError``."""
    return _read(folder)[0]


def _read(folder: Path) -> tuple[Record, str]:
    try:
        said = as_object(json.loads((folder / NAME).read_text(encoding="utf-8")))
        if said["format"] != FORMAT:
            raise UserError(f"{folder / NAME} has format {said['format']}, and this version reads {FORMAT}")
        pictures = [as_integer(n) for n in as_list(said["pictures"])]
        given = as_object(said["calibration"])
        lines: dict[Student, tuple[float, float]] = {}
        for name in STUDENTS:
            slope, shift = (float(as_number(x)) for x in as_list(given[name]))
            lines[name] = slope, shift
        found = Record(
            Shape.of(as_object(said["shape"])),
            _one_of(as_text(said["answers"]), ("image", "text")),  # pyright: ignore[reportArgumentType]
            (pictures[0], pictures[1]),
            lines,
            student_of(as_text(said["student"])),
            as_object(said["judge"]),
            as_object(said["figures"]),
        )
        return found, as_text(said["weights"])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        why = f"no {NAME}" if isinstance(error, FileNotFoundError) else f"its {NAME} cannot be read: {error}"
        raise UserError(
            f"options.path: {folder} is no distilled judge ({why}); name a folder that mmrl distill wrote"
        ) from error


def student_of(name: str) -> Student:
    """Raises ``ValueError`` for a student that there is not."""
    for student in STUDENTS:
        if name == student:
            return student
    raise ValueError(f"{name!r} is no student; write {' or '.join(STUDENTS)}")


def _one_of(name: str, known: tuple[str, ...]) -> str:
    if name not in known:
        raise ValueError(f"{name!r} is none of {', '.join(known)}")
    return name


def load_students(folder: Path) -> tuple[Record, Students]:
    """The students, frozen and on the CPU. Raises ``UserError``, also where the weights are not those of the json."""
    said, digest = _read(folder)
    file = folder / WEIGHTS
    try:
        data = file.read_bytes()
        if hashlib.sha256(data).hexdigest() != digest:
            raise ValueError(f"its sha256 is not that of {NAME}")
        with torch.random.fork_rng(devices=[]):
            students = Students(said.shape)
        students.load_state_dict(load(data))
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        why = str(error).splitlines()[0]
        raise UserError(f"options.path: {file} cannot be loaded ({why}); run mmrl distill again") from error
    return said, students.eval().requires_grad_(False)


@torch.no_grad()
def logits_of(students: Students, prompts: Inputs, of_prompt: Tensor, answers: Inputs, student: Student) -> Tensor:
    """The logits ``[N]`` of one student for pairs, on the CPU; ``of_prompt`` says which prompt a pair has."""
    asked = students.encode(prompts, 0).rows(of_prompt)
    given = students.encode(answers, 1)
    return (students.dual if student == "dual" else students.interaction)(asked, given).cpu()

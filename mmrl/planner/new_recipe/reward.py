"""Rewards and tools of a first recipe (``mmrl init``): how it names them, and a file to begin one of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from os.path import expanduser
from pathlib import Path
from typing import Literal

from mmrl.config.drop_ins import DEFAULT, missing_drop_in, split_file
from mmrl.core.errors import UserError
from mmrl.core.grouping import grouped
from mmrl.core.json_types import Cell
from mmrl.core.plugins.loading import Kind
from mmrl.planner.new_recipe.data import in_recipe
from mmrl.planner.new_recipe.model import TEXTS, Modality

OWN = "reward.py:score"
"""The reward where the user names none and the data has no answers."""
_MADE = {
    Modality.text: (
        "text",
        "texts",
        "``sample.text`` is the response of the model, ``sample.truncated`` whether it was cut.",
    ),
    Modality.vision_language: (
        "text",
        "answers to questions about pictures",
        "``sample.text`` is the response; ``sample.prompt.media`` has the pictures or clips of the question.",
    ),
    Modality.pictures: ("image", "pictures", "``sample.image`` is an RGB picture of PIL."),
    Modality.clips: (
        "video",
        "clips",
        "``sample.video`` has the frames of the clip, in order, as RGB pictures of PIL.",
    ),
}
_BODY = {
    "answer": """\
        said = (sample.text or "").strip().lower()
        return float(said.endswith(str(sample.prompt.meta["answer"]).strip().lower()))  # does it end with the answer?
""",
    "text": """\
        words = (sample.text or "").split()
        return 0.0 if sample.truncated else len(set(words)) / max(1, len(words))  # an example: few words come twice
""",
    "image": """\
        return float(numpy.asarray(sample.image.convert("HSV"))[..., 1].mean() / 255)  # an example: bright colours
""",
    "video": """\
        frames = numpy.asarray([numpy.asarray(frame, dtype=float) / 255 for frame in sample.video])
        return float(numpy.abs(numpy.diff(frames, axis=0)).mean())  # an example: much moves
""",
}


def usual_reward(modality: Modality, answers: Sequence[Cell]) -> str:
    """A reward where the user names none: a comparison with the data's answers where it has some, else a new file."""
    if modality not in TEXTS or not answers:
        return OWN
    return "answer:number" if all(_ends_with_number(answer) for answer in answers) else "answer:exact"


_TOOL = '''
def {name}(text: str) -> str:
    """Count the words of a text. (The model reads this, and what stands under Args.)

    Args:
        text: The text.
    """
    return str(len(text.split()))  # an example
'''


def missing_file(name: str, home: Path, kind: Literal["reward", "tool"] = "reward") -> Path | None:
    """The file that the reward or tool ``name`` is to be in, where there is none yet: from the current folder, or from
    the recipe's, ``home``. Raises ``UserError`` for one that is neither one of ours nor in its file."""
    folder: Kind = "rewards" if kind == "reward" else "environments"
    file, attribute = split_file(expanduser(name))
    if file is None:
        if kind == "tool":
            raise UserError(f"--tool: {name} names no file; a tool is a function in one: write --tool tools.py:{name}")
        if wrong := missing_drop_in(folder, name, "looked in the current folder"):
            raise UserError(f"--reward: {wrong}")
        return None
    there = _place(file, home)
    if there.is_file():
        if wrong := missing_drop_in(folder, f"{there}:{attribute}" if attribute else str(there), ""):
            raise UserError(f"--{kind}: {wrong}")
        return None
    if attribute and not attribute.isidentifier():
        raise UserError(f"--{kind}: {attribute!r} is no name of a function; write --{kind} {file}:score")
    if not there.parent.is_dir():
        raise UserError(f"--{kind}: there is no folder {there.parent}, to write {there.name} into; make it")
    return there


def named_in_recipe(name: str, home: Path) -> str:
    """The reward or algorithm ``name`` of the command line, as a recipe in ``home`` names it."""
    file, attribute = split_file(expanduser(name))
    if file is None:
        return name
    beside = not Path(file).is_file() and (home / file).is_file()
    return name if beside else ":".join(filter(None, (in_recipe(file, home), attribute)))


def files_to_begin(names: Sequence[str], home: Path, modality: Modality, *, answers: bool) -> dict[Path, str]:
    """The files that ``names`` are in and that are not there yet, with a reward to change. Raises ``UserError``."""
    missing = ((missing_file(name, home), split_file(name)[1] or DEFAULT["rewards"]) for name in names)
    functions = grouped((path, function) for path, function in missing if path is not None)
    return {path: starting_point(modality, listed, answers=answers) for path, listed in functions.items()}


def tools_to_begin(names: Sequence[str], home: Path) -> dict[Path, str]:
    """The files that the tools ``names`` are in and that are not there yet, with a function each, to change. Raises
    ``UserError``."""
    begun: dict[Path, str] = {}
    for name in names:
        path = missing_file(name, home, "tool")
        if path is not None:
            first = begun.get(path, '"""Functions that the model can call, to change (docs/environments.md)."""\n')
            begun[path] = f"{first}\n{_TOOL.format(name=split_file(name)[1] or path.stem)}"
    return begun


def starting_point(modality: Modality, functions: Sequence[str], *, answers: bool) -> str:
    """A file with a reward for ``modality`` under each name of ``functions``, to change. ``answers``: whether prompts
    have one."""
    reads, made, says = _MADE[modality]
    numbers = reads in ("image", "video")
    parts = [
        f'"""A reward for {made}, to change: it returns a number for each sample, and higher is better."""\n',
        *(["import numpy\n"] if numbers else []),
        "import mmrl\n",
    ]
    body = _BODY["answer" if answers and reads == "text" else reads]
    for function in functions:
        parts.append(
            f'\n@mmrl.reward(inputs=("{reads}",))  # what it reads of a sample\n'
            f"def {function}(samples, *, context):\n"
            f'    """{says}\n\n'
            "    ``sample.prompt.text`` is the prompt, ``sample.prompt.meta`` what else the data says (``answer``).\n"
            '    Return None in place of a number where a sample cannot be scored.\n    """\n\n'
            f"    def one(sample):\n{body}\n"
            "    return [one(sample) for sample in samples]\n"
        )
    return "\n".join(parts)


def _place(file: str, home: Path) -> Path:
    """Where the file is, or is to be."""
    return next((at for at in (Path(file), home / file) if at.is_file()), Path(file))


def _ends_with_number(answer: Cell) -> bool:
    return isinstance(answer, int | float) or (isinstance(answer, str) and answer.strip().rstrip(".%")[-1:].isdigit())

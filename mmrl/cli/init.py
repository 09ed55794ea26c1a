"""``init``: a first recipe for one's own model, data and reward."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from mmrl.commands.arguments import read_recipe
from mmrl.core.errors import UserError
from mmrl.core.garbage import rarely_collected

if TYPE_CHECKING:
    from mmrl.planner.new_recipe.data import FirstData
    from mmrl.planner.new_recipe.model import FirstModel
    from mmrl.planner.new_recipe.recipe import Wanted


Modality = Literal["text", "vision-language", "pictures", "clips"]
"""Those of ``mmrl.planner.new_recipe.model`` (a test compares them)."""
Device = Literal["auto", "cpu", "cuda"]


@dataclass(frozen=True)
class _Asker:
    """Asks on the terminal for what no flag says; where ``on`` is false, takes the default or refuses."""

    on: bool

    def text(self, flag: str, question: str, default: str | None = None) -> str:
        """Raises ``UserError`` where nobody can be asked, and there is no default."""
        if self.on:
            return str(typer.prompt(question, default=default)).strip()
        if default is None:
            raise UserError(f"{flag} is missing: {question}; add it, or run mmrl init in a terminal, where it asks")
        return default

    def one_of(self, flag: str, question: str, names: Sequence[str], default: str | None = None) -> str:
        """The answer to ``question``, which is one of ``names``; otherwise like ``text``."""
        asked = f"{question} ({', '.join(names)})"
        while (said := self.text(flag, asked, default)) not in names:
            if not self.on:
                raise UserError(f"{flag} {said!r} is none of {', '.join(names)}")
            print(f"{said!r} is none of {', '.join(names)}")
        return said

    def yes(self, question: str, *, default: bool) -> bool:
        """The default where nobody can be asked."""
        return typer.confirm(question, default=default) if self.on else default


def init(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The recipe to write.")] = Path("mine.yaml"),
    *,
    model: Annotated[
        str | None,
        typer.Option(metavar="DIR|ORG/NAME", help="A directory of diffusers or transformers, or a hub name."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(metavar="FILE|NAME", help="CSV, JSONL, Parquet, .txt, a folder, a data set of ours or the hub's."),
    ] = None,
    reward: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME|FILE.py:NAME", help="May be repeated. A file that is not there is begun for you."),
    ] = None,
    tool: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILE.py:NAME", help="A function that the model can call. As --reward, may be repeated or new."
        ),
    ] = None,
    modality: Annotated[
        Modality | None, typer.Option(help="What the model is for.", show_default="as its configuration says")
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of docs/algorithms.md.", show_default="grpo; flow_grpo")
    ] = None,
    device: Annotated[Device | None, typer.Option(help="What it computes on.", show_default="auto")] = None,
    lora: Annotated[
        bool | None, typer.Option("--lora/--full", help="Adapters, or all weights.", show_default="lora")
    ] = None,
    prompt_column: Annotated[str | None, typer.Option(metavar="COLUMN", help="The prompt, in a table.")] = None,
    answer_column: Annotated[str | None, typer.Option(metavar="COLUMN", help="The right answer, in a table.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Ask nothing: take the defaults.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file that is there.")] = False,
) -> None:
    """Write a first recipe for your own model, data and reward: short, with comments, and sizes for a short run.

    In a terminal it asks for anything you did not pass. It looks at the model's configuration, the data's columns and
    the reward; it loads no weight. Exit code 1 where mmrl plan finds problems in what it wrote.
    """
    from mmrl.planner.new_recipe.recipe import Wanted, name_of

    ask = _Asker(on=not yes and sys.stdin.isatty())
    _check_target(file, ask, overwrite=overwrite)
    if model is None:
        model = ask.text("--model", "Your model: a directory of diffusers or transformers, or a name on the hub")
    if data is None:
        data = ask.text("--data", "Your data: a file, a folder, a data set of ours or a name on the hub")
    found = _data(data, file.absolute().parent, prompt_column, answer_column, ask)
    chosen = _model(model, modality, algorithm, found, ask)
    algorithm = algorithm or ask.text("--algorithm", "Algorithm (docs/algorithms.md)", chosen.usual_algorithm)
    adapters = ask.yes("Train LoRA adapters, and not all weights?", default=True) if lora is None else lora
    where = device or ask.one_of("--device", "Computes on", get_args(Device), "auto")
    home = file.absolute().parent
    asked = Wanted(name_of(file), home, chosen, found, reward or [], algorithm, str(where), adapters, tools=tool or [])
    wanted, begun = _wanted(asked, ask)
    _write(file, wanted, begun)
    if not _usable(file, wanted):
        raise typer.Exit(1)


def _check_target(file: Path, ask: _Asker, *, overwrite: bool) -> None:
    """Raises ``UserError`` where the recipe cannot be written."""
    if file.suffix not in (".yaml", ".yml"):
        raise UserError(f"{file} does not end in .yaml; write {file}.yaml")
    if not file.absolute().parent.is_dir():
        raise UserError(f"there is no folder {file.parent}; make it, or name another file")
    if file.exists() and not overwrite and not ask.yes(f"{file} exists. Replace it?", default=False):
        raise UserError(f"{file} exists and is left as it is; name another file, or add --overwrite")


def _data(target: str, home: Path, prompt: str | None, answer: str | None, ask: _Asker) -> FirstData:
    """The data, after a question where the column of the prompt is not clear."""
    from mmrl.planner.new_recipe.data import UnknownColumnError, look_at_data

    try:
        found = look_at_data(target, home, prompt, answer)
    except UnknownColumnError as error:
        if not ask.on:
            raise
        column = ask.one_of("--prompt-column", "Which column is the prompt?", error.texts)
        found = look_at_data(target, home, column, answer)
    for line in found.said:
        print(f"data: {line}")
    return found


def _model(name: str, modality: Modality | None, algorithm: str | None, data: FirstData, ask: _Asker) -> FirstModel:
    """The model, after a question where its files are not here to say what it makes."""
    from mmrl.planner.new_recipe import model as first_model

    def look(said: str | None) -> FirstModel:
        known = None if said is None else first_model.Modality(said)
        return first_model.look_at_model(name, known, edits="image" in data.media, algorithm=algorithm)

    try:
        found = look(modality)
    except first_model.UnknownModalityError:
        if not ask.on:
            raise
        found = look(ask.one_of("--modality", f"{name} is not downloaded. What is it for?", get_args(Modality)))
    print(f"model: {found.says}; pipeline {found.pipeline}")
    return found


def _wanted(asked: Wanted, ask: _Asker) -> tuple[Wanted, dict[Path, str]]:
    """What the recipe is for, of what flags and answers come to, and the texts of the files of rewards that are to be
    begun. Raises ``UserError``."""
    from mmrl.config.algorithms import find_algorithm
    from mmrl.planner.new_recipe.model import TEXTS
    from mmrl.planner.new_recipe.reward import files_to_begin, named_in_recipe, tools_to_begin, usual_reward

    home, modality, answers = asked.home, asked.model.modality, asked.data.answers
    offline = find_algorithm(asked.algorithm).settings.kind == "offline"
    if offline and asked.rewards:
        raise UserError(f"--reward: {asked.algorithm} trains on what the data gives, and asks no reward; leave it out")
    rewards = asked.rewards
    if not offline and not rewards:
        usual = usual_reward(modality, answers)
        question = "Reward: a name (mmrl ls rewards), or FILE.py:function, which may be new"
        rewards = [ask.text("--reward", question, usual)]
    if asked.tools and (offline or modality not in TEXTS):
        which = asked.algorithm if offline else f"a model of {modality.value}"
        raise UserError(f"--tool: {which} acts over no turns, and calls nothing; leave it out")
    begun = files_to_begin(rewards, home, modality, answers=bool(answers)) | tools_to_begin(asked.tools, home)
    named = [named_in_recipe(name, home) for name in rewards]
    algorithm = named_in_recipe(asked.algorithm, home)
    tools = [named_in_recipe(tool, home) for tool in asked.tools]
    return replace(asked, rewards=named, algorithm=algorithm, offline=offline, tools=tools), begun


def _write(file: Path, wanted: Wanted, begun: dict[Path, str]) -> None:
    """The recipe, and the rewards and tools that it needs. Raises ``UserError``."""
    from mmrl.planner.new_recipe.recipe import text_of

    for path, text in (*begun.items(), (file, text_of(wanted))):
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        print(f"wrote {path}" + ("" if path == file else ": an example, to change"))


def _usable(file: Path, wanted: Wanted) -> bool:
    """Say the problems of the recipe, and what to do with it. Returns whether it has none."""
    problems = [*_lacks(wanted), *_problems(file)]
    for problem in problems:
        print(f"problem: {problem}")
    print("then:" if problems else "next:")
    for command in ("data check", "plan", "train"):
        print(f"  mmrl {command} {quote(str(file))}")
    return not problems


def _lacks(wanted: Wanted) -> list[str]:
    """What of the data the recipe needs, and a plan does not look for."""
    data, found = wanted.data, list[str]()
    compares = next((name for name in wanted.rewards if name.partition(":")[0] == "answer"), None)
    if compares and data.known and not data.answers:
        found.append(
            f"data: no column is the answer, with which {compares} compares responses; add a column answer, or "
            "--answer-column"
        )
    if wanted.model.modality == "vision-language" and data.known and not data.media:
        found.append(
            "data: no column is a picture or clip, so that prompts are text alone; add a column image or video"
        )
    return found


def _problems(file: Path) -> list[str]:
    """What ``mmrl plan`` says against the recipe."""
    from mmrl.config.errors import RecipeError
    from mmrl.data.fields import UnreadColumns
    from mmrl.planner.plan import plan

    try:
        with rarely_collected(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UnreadColumns)  # said of the data already
            return plan(read_recipe(str(file), ())).problems
    except RecipeError as error:
        return [str(problem) for problem in error.problems]
    except UserError as error:
        return [str(error)]

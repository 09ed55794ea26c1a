"""The tutorials: their CPU commands run as written, and ``mmrl plan`` accepts their commands for real checkpoints."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest

from mmrl.cli import app
from tests.support.example_recipes import RECIPES

ROOT = RECIPES.parents[1]
PAGES = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
FENCE = re.compile(r"<!-- (file: [\w.-]+|run|plan) -->\n```\w+\n(.*?)```", re.DOTALL)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A folder that looks like a checkout to the commands of a page; what they write lands there."""
    for name in ("examples", "pipelines"):
        (tmp_path / name).symlink_to(ROOT / name)
    questions = [{"prompt": f"How many cups are there? {n}", "image": "cup.png", "answer": "one"} for n in range(40)]
    (tmp_path / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in questions))
    (tmp_path / "cup.png").write_bytes((ROOT / "docs" / "img" / "curve.png").read_bytes())
    monkeypatch.chdir(tmp_path)
    return tmp_path


def blocks(page: Path, kind: str) -> list[str]:
    return [text for mark, text in FENCE.findall(page.read_text()) if mark == kind]


def write_files(page: Path, folder: Path) -> None:
    for mark, text in FENCE.findall(page.read_text()):
        if mark.startswith("file: "):
            (folder / mark.removeprefix("file: ")).write_text(text)


def mmrl(line: str) -> None:
    """Run a line of the shell that begins with mmrl, in this process. An exit code other than 0 is an error."""
    words = shlex.split(line, comments=True)
    assert words[0] == "mmrl", line
    try:
        code = app(words[1:], standalone_mode=False)
    except SystemExit as left:
        code = left.code
    assert not code, line


def lines(page: Path, kind: str) -> list[str]:
    return [line for block in blocks(page, kind) for line in block.splitlines() if line.strip()]


def needs_torchvision(page: Path) -> None:
    if page.stem == "vision_language" and importlib.util.find_spec("torchvision") is None:
        pytest.skip("needs torchvision")


def test_there_is_a_tutorial_for_each_kind_of_user():
    assert [page.stem for page in PAGES] == ["own_pictures", "own_reward", "pictures", "vision_language"]
    for page in PAGES:
        assert any("mmrl train" in line for line in lines(page, "run")), page
        assert any("mmrl train" in line for line in lines(page, "plan")), page


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_for_a_cpu_run_as_written(page, checkout):
    needs_torchvision(page)
    write_files(page, checkout)
    for line in lines(page, "run"):
        mmrl(line)
    for run in (checkout / "runs").iterdir():
        assert json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])["optim/grad_norm"] > 0
        assert (run / "report.html").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_commands_for_a_real_checkpoint_are_planned(page, checkout):
    needs_torchvision(page)
    write_files(page, checkout)
    planned = set()
    for line in lines(page, "plan"):
        if line.startswith("mmrl train"):  # the same, but planned
            line = re.sub(r" --out \S+", " --gpu h100-80g", line.replace("mmrl train", "mmrl plan"))
        words = frozenset(shlex.split(line))
        if words not in planned:
            planned.add(words)
            mmrl(line)

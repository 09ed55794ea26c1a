"""Shared by the tests of cli and others."""

import sys
from pathlib import Path

import pytest

from mmrl import cli
from mmrl.core.quiet import QUIET

RECIPE = """\
# A recipe of a test
name: t
pipeline: diffusion/sd3
model: {path: org/tiny}
data: {name: shapes}
sampling: {height: 32, width: 32}
rewards: [{name: shapes}]
algorithm: {type: flow_grpo}
train: {steps: 4, prompts_per_step: 2, group_size: 4, micro_batch_size: 4}
threads: 3
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in (*QUIET, "OMP_NUM_THREADS"):  # set first, so that what the command line sets is undone
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def mmrl(*arguments: str) -> int:
    """Run the command in this process; returns the exit code."""
    before = sys.argv
    sys.argv = ["mmrl", *arguments]
    try:
        cli.main()
    except SystemExit as leaving:
        return int(leaving.code or 0)
    finally:
        sys.argv = before
    return 0

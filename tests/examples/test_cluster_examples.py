"""The recipes of examples/clusters: what `mmrl plan` says of each on the GPUs that its first lines name."""

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmrl.cli import app
from mmrl.planner.gpus import gpu_of

ROOT = Path(__file__).resolve().parents[2]
LONG = ("qwen-image-64-gpus",)  # the other examples of pictures stay
EXAMPLES = [
    pytest.param(path, marks=[pytest.mark.long] * (path.stem in LONG), id=path.stem)
    for path in sorted((ROOT / "examples" / "clusters").glob("*.yaml"))
]


def planned(path, monkeypatch):
    """The exit code and the output of the command in the file's comment, without line breaks."""
    command = re.search(r"^#\s+mmrl (plan .+)$", path.read_text(), re.M).group(1)
    monkeypatch.chdir(ROOT)
    done = CliRunner().invoke(app, shlex.split(command))
    return command, done.exit_code, " ".join((done.output + str(done.exception or "")).split())


@pytest.mark.slow  # 80 layers are traced
@pytest.mark.parametrize("path", EXAMPLES)
def test_the_plan_accepts_an_example_or_names_its_first_limit(path, monkeypatch):
    if "vl-7b" in path.stem:
        pytest.importorskip("torchvision")
    command, code, said = planned(path, monkeypatch)
    gpus, memory = int(re.search(r"--gpus (\d+)", command).group(1)), gpu_of(command.split("--gpu ")[1].split()[0]).gib
    assert str(path.relative_to(ROOT)) in command
    peak = float(re.search(r"peak: ([\d.]+) GiB", said).group(1))
    assert code == 0, said
    assert 10 < peak < memory
    assert f"uses 1 of {gpus}" not in said
    assert "problem:" not in said
    if "72b" in path.stem:
        assert "in replicas of 8 devices" in said

"""The files that pages show whole do what the page says."""

from pathlib import Path

import pytest
from PIL import Image

from mmrl.cli import app
from mmrl.config.schema import Reward
from mmrl.core.reward_contract import Context
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.loading import build
from mmrl.rewards.scoring import check

allow_cpu_only()

DOCS = Path(__file__).resolve().parents[2] / "docs"


def snippet(page, heading, file="mine.py"):
    """The first Python block below ``heading``, which begins with the name of its ``file``."""
    below = (DOCS / page).read_text().partition(f"\n## {heading}\n")[2]
    code = below.partition("```python\n")[2].partition("```")[0]
    assert code.startswith(f"# {file}\n")
    return code


def test_a_data_set_of_ones_own_passes_the_check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(snippet("data.md", "Bring your own"))
    for split, shade in (("train", 10), ("heldout", 200)):
        (tmp_path / "pictures" / split).mkdir(parents=True)
        for n in range(3):
            Image.new("RGB", (8, 8), (shade + n, 0, 0)).save(f"pictures/{split}/{split}{n}.png")
    assert app(["check", "mine.py:prompts", "--options", "path=pictures"], standalone_mode=False) in (0, None)


def test_rewards_of_trl_and_verl_run_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("theirs.py").write_text(snippet("rewards.md", "A reward of TRL or verl", "theirs.py"))
    samples = [Sample(Prompt("p", "2+2", {"answer": "4"}), SampleId(0, 0, 0, n), text=t) for n, t in enumerate("45")]
    for found in check([Reward(name=f"theirs.py:{name}") for name in ("right", "compute_score")]):
        assert build(found, {}).call(samples, context=Context()) == [1.0, 0.0]


@pytest.mark.slow
def test_an_algorithm_of_ones_own_passes_the_check(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(snippet("algorithms.md", "An algorithm of your own"))
    assert app(["check", "mine.py:Mine"], standalone_mode=False) in (0, None)

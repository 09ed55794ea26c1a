"""The short form of the proof of a style: SFT on 30 pictures moves held-out samples to it, and RL begins there."""

import importlib
import json
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from mmrl.app.export import export
from mmrl.config.loader import load_recipe
from mmrl.runtime.start import train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def proof_style():
    """The script, imported as its command imports it."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        yield importlib.import_module("proof_style")
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.slow
def test_thirty_pictures_teach_a_style_that_rl_begins_with(proof_style, tmp_path):
    small = f"{{name: {proof_style.__file__}:small}}"
    settings = [*proof_style.SFT, "train.steps=40", "eval.every=40", f"eval.rewards=[{{name: shapes}}, {small}]"]
    train(load_recipe(["shapes-sft"], settings), tmp_path / "style")
    export(tmp_path / "style", tmp_path / "lora", "lora")
    begun = [
        f"model.lora={{path: {tmp_path / 'lora'}}}",
        proof_style.rewards(Namespace(weight=2.0, tower=True, out=tmp_path), tmp_path / "style", 0),
        f"eval.rewards=[{small}]",
        "train.steps=1",
        "train.prompts_per_step=2",
        "train.group_size=4",
        "train.micro_batch_size=8",
        "eval.samples=28",
    ]
    train(load_recipe(["shapes-lora"], begun), tmp_path / "rl")
    found = proof_style.read(tmp_path / "style", tmp_path / "rl")
    assert found["style/small"] > found["base/small"] + 0.2
    assert found["style/success"] > 0.1
    row = json.loads((tmp_path / "rl" / "metrics.jsonl").read_text().splitlines()[-1])
    assert row["optim/grad_norm"] > 0
    assert 0.8 < row["reward/likeness/likeness"] <= 1
    assert row["reward/likeness/copied"] < 0.5

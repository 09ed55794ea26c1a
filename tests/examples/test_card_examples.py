"""The layer for a small card trains on the quantised path, with its settings and at a small size."""

import json
from pathlib import Path

import pytest

from mmrl.cli import app
from mmrl.config.loader import load_recipe
from tests.support.tiny_diffusion import SHAPES

CARD = Path(__file__).resolve().parents[2] / "examples" / "cards" / "12gb.yaml"


def test_the_layer_is_one_over_the_recipe_that_it_names():
    recipe = load_recipe(["z-image", CARD]).recipe
    assert (recipe.name, recipe.model.quantize, recipe.train.micro_batch_size) == ("z-image", "nf4", 1)
    assert recipe.model.lora is not None


@pytest.mark.slow
def test_its_settings_train_a_small_model_on_a_cpu(tmp_path):
    pytest.importorskip("bitsandbytes")
    small = ["device=cpu", f"model.path={SHAPES}", "train.steps=1", "train.prompts_per_step=1", "train.group_size=2"]
    less = ["sampling.steps=3", "sampling.window={size: 1, last: 1}", "eval.every=null"]
    app(["train", "shapes-lora", str(CARD), *small, *less, "--out", str(tmp_path)], standalone_mode=False)
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["policy/first_ratio_max_dev"] == 0

"""Scripts of other tools and the recipes in their place: these load, and train with the reward as it is."""

import json
import shutil
from pathlib import Path

import pytest

from mmrl.config.loader import load_recipe
from tests.support.cli import mmrl

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "from_others"
MODEL = Path(__file__).resolve().parents[2] / "pipelines" / "llm" / "models" / "sums-qwen3"
SMALL = ["model.dtype=float32", "model.gradient_checkpointing=false", "sampling.max_new_tokens=8", "device=cpu"]
FEW = ["train.steps=1", "train.group_size=2", "train.prompts_per_step=4", "eval.samples=4", "optim.warmup_steps=0"]


@pytest.mark.parametrize("tool", ["trl", "verl"])
def test_a_script_and_its_recipe_have_twelve_lines_at_most_and_load(tool):
    before, after = sorted(FOLDER.glob(f"{tool}_*"), key=lambda file: file.suffix == ".yaml")
    for file in (before, after):
        assert len(file.read_text().splitlines()) <= 12, file
    assert load_recipe([after]).recipe.train.group_size == 8


@pytest.mark.slow
def test_the_recipes_train_with_rewards_as_they_are(tmp_path, monkeypatch):
    shutil.copytree(FOLDER, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    lines = [f"Compute {n} + 2 =,{n + 2}" for n in range(40)]
    Path("questions.csv").write_text("\n".join(["question,solution", *lines]) + "\n")
    records = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"Compute {n} + 3 ="}],
            "reward_model": {"ground_truth": str(n + 3)},
            "extra_info": {"index": n},
        }
        for n in range(40)
    ]
    for name, part in (("train", records[:30]), ("test", records[30:])):
        Path(f"{name}.jsonl").write_text("".join(json.dumps(record) + "\n" for record in part))
    split = ["data.train.path=train.jsonl", "data.heldout.path=test.jsonl", "rollout.engine=transformers"]
    for tool, words in (("trl", []), ("verl", split)):
        out = tmp_path / tool
        assert mmrl("train", f"{tool}_after.yaml", f"model.path={MODEL}", *SMALL, *FEW, *words, "--out", str(out)) == 0
        lines = (out / "metrics.jsonl").read_text().splitlines()
        (row,) = [json.loads(line) for line in lines if "reward/mean" in line]
        assert 0 <= row["reward/mean"] <= 1

"""Model checkpoints of strangers: no traceback, no hang, no gigabytes, whatever their small files hold."""

import json
import os
import random
import shutil
from pathlib import Path

import pytest

from tests import hostile

PIPELINES = Path(__file__).parents[1] / "pipelines"
FOLDERS = {"sums": PIPELINES / "llm/models/sums-qwen3", "shapes-lora": PIPELINES / "diffusion/models/shapes-sd3"}
SMALL = [
    *("train.steps=1", "train.prompts_per_step=1", "train.group_size=2", "train.micro_batch_size=2"),
    "eval.every=null",
]
FEW = {"sums": ["data.train.count=8", "data.heldout.count=8"], "shapes-lora": []}
INIT = {
    "sums": ["--data", "sums", "--reward", "sums", "--yes"],
    "shapes-lora": ["--data", "shapes", "--reward", "shapes", "--yes"],
}
FAILED = (24, 32, 39, 78, 213)
"""Seeds whose files were a traceback once."""
WHOLE = [*hostile.WHOLE, "outside", "huge"]


def spoiled(rng, folder, scratch):
    """Change one small file of the checkpoint in ``folder``. Returns which, and how."""
    file = rng.choice(sorted(folder.rglob("*.json")))
    how = "value" if rng.random() < 0.4 else rng.choice(WHOLE)
    before = file.read_bytes()
    if how == "value":
        file.write_bytes(hostile.dumped(hostile.changed_value(rng, json.loads(before))).encode("utf-8", "replace"))
    elif how == "outside":
        (scratch / "else.json").write_bytes(before)
        file.unlink()
        file.symlink_to(scratch / "else.json")
    elif how == "huge":
        os.truncate(file, 3 << 30)
    else:
        hostile.spoil(rng, file, how)
    return f"{file.relative_to(folder)}: {how}"


def commands(name, folder, scratch):
    """The commands that read a checkpoint."""
    out, app = scratch / "out", hostile.mmrl_command()
    shutil.rmtree(out, ignore_errors=True)
    recipe = [name, f"model.path={folder}", *SMALL, *FEW[name]]
    return {
        "plan": lambda: app(["plan", *recipe], standalone_mode=False),
        "train": lambda: app(["train", *recipe, "--out", str(out)], standalone_mode=False),
        "init": lambda: app(
            ["init", str(scratch / "a.yaml"), "--model", str(folder), *INIT[name]], standalone_mode=False
        ),
    }


@pytest.mark.slow
@pytest.mark.sweep("hostile configuration files of model checkpoints, through plan, train and init")
def test_no_file_of_a_checkpoint_is_a_traceback(tmp_path, sweep):
    for seed in dict.fromkeys([*range(sweep.size(12, 300)), *FAILED]):
        rng = random.Random(seed)
        name = rng.choice(sorted(FOLDERS))
        folder, scratch = tmp_path / "model", tmp_path / "scratch"
        for made in (folder, scratch):
            shutil.rmtree(made, ignore_errors=True)
        scratch.mkdir()
        shutil.copytree(FOLDERS[name], folder)
        change = spoiled(rng, folder, scratch)
        for command, call in commands(name, folder, scratch).items():
            wrong = hostile.attempt(call)
            sweep.check(not wrong, f"seed {seed}: {command} of {name} with {change}: {wrong}")
    sweep.done()

"""A run of SFT that comes first, and what the other run makes of its weights."""

import json

import pytest
import yaml

from mmrl.app.build import open_run
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.logging.metrics import read_numbers as read_rows
from mmrl.runtime.launchers import Launched
from mmrl.runtime.start import train_to_end

pytestmark = pytest.mark.slow
STAGE = {
    "algorithm": {"type": "sft"},
    "data": {"name": "shape_style"},
    "train": {"steps": 3, "prompts_per_step": 4, "group_size": 1},
    "optim": {"lr": 1e-2},
    "eval": {"every": 3},
}
SMALL = ["train.steps=2", "train.prompts_per_step=2", "train.group_size=4", "train.micro_batch_size=8"]
SMALL += ["eval.every=2", "eval.samples=4", "eval.grid=4", "threads=1", "model.dtype=float32"]


def recipe(tmp_path, *changes, section=STAGE, name="shapes-lora"):
    file = tmp_path / "warm.yaml"
    file.write_text(yaml.safe_dump({"warm_start": section}))
    return load_recipe([name, file], [*SMALL, *changes])


def heldout(folder, step):
    (row,) = (row for row in read_rows(folder / "heldout.jsonl") if row["step"] == step)
    return row["reward/shapes"]


@pytest.mark.parametrize("name", ["shapes-lora", "shapes-full"])
def test_the_run_begins_with_the_weights_of_the_first(tmp_path, name):
    out, warm = tmp_path / "run", tmp_path / "run-warm"
    assert train_to_end(recipe(tmp_path, name=name), out)
    made, _ = open_run(out)
    assert made.warm_start is None
    path = made.model.path if made.model.lora is None else made.model.lora.path
    assert path == str(warm / "weights")
    key = "model.path" if made.model.lora is None else "model.lora.path"
    by_hand, base = tmp_path / "by_hand", tmp_path / "base"
    assert train_to_end(load_recipe([name], [*SMALL, f"{key}={path}"]), by_hand)
    assert train_to_end(load_recipe([name], [*SMALL, "train.steps=1"]), base)
    assert heldout(out, 0) == heldout(by_hand, 0) != heldout(base, 0)
    assert heldout(out, 2) == heldout(by_hand, 2)
    assert train_to_end(recipe(tmp_path, name=name), out, resume=True), "it is the same run"
    assert len(list(read_rows(warm / "metrics.jsonl"))) == 3
    for section, named in (
        ({"train": {**STAGE["train"], "steps": 4}}, "train.steps"),
        ({"optim": {"lr": 1}}, "optim.lr"),
    ):
        other = recipe(tmp_path, section={**STAGE, **section}, name=name)
        with pytest.raises(UserError, match=rf"warm_start: {named}.* differ.*add --overwrite to train it anew"):
            train_to_end(other, tmp_path / "run", resume=True)


def test_a_first_run_that_was_stopped_goes_on(tmp_path):
    out, warm = tmp_path / "run", tmp_path / "run-warm"
    short = {**STAGE, "train": {**STAGE["train"], "max_cpu_seconds": 1e-9}}
    both = recipe(tmp_path, section=short)
    assert train_to_end(both, out)
    assert len(list(read_rows(warm / "metrics.jsonl"))) < 3
    before = json.loads((warm / "resolved.json").read_text())
    assert train_to_end(both, tmp_path / "run", overwrite=True)
    assert json.loads((warm / "resolved.json").read_text()) == before
    with pytest.raises(UserError, match="already holds a run"):
        train_to_end(both, out)


def test_processes_of_a_launcher_are_those_of_one_run(tmp_path):
    from mmrl.runtime.external_launch import train

    found = Launched("torchrun", 0, 1, 0, "127.0.0.1", 29500)
    with pytest.raises(UserError, match=r"warm_start: torchrun has started the processes of one run"):
        train(recipe(tmp_path), found, tmp_path / "run", resume=False, overwrite=False)

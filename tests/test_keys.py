"""Every key of a recipe has an effect where it is accepted: a run reads it, or it is refused."""

import json

import pytest
from pydantic import BaseModel

from mmrl._torchvision import allow_cpu_only
from mmrl.config.loader import load_recipe
from mmrl.errors import UserError
from mmrl.runtime import start
from tests.key_reads import recorded
from tests.test_edits import CHANGES

allow_cpu_only()  # before transformers imports torchvision

SMALL = ["train.steps=1", "train.prompts_per_step=2", "device=cpu"]
GROUPS = ["train.group_size=2", "train.micro_batch_size=2", "eval.samples=2"]
RUNS = {"sums": GROUPS, "shapes-lora": GROUPS, "moving-shapes": GROUPS, "scenes": GROUPS}
ELSEWHERE = {
    "architecture": "a plan reads it where there is no checkpoint",
    "ray": "several controllers read it",
    "runtime.patience": "several processes read it",
    "placement.log": "several devices read it",
    "placement.inside": "several devices read it",
    "algorithm.max_attempts": "it limits algorithm.filter_groups and its like",
    "optim.ema_every": "optim.ema_decay reads it",
    "eval.guards.patience": "a guard that is broken reads it",
    "performance.offload_optimizer": "a model on an accelerator reads it",
    "performance.offload_reference": "a reference on an accelerator reads it",
    "performance.gather_dtype": "weights in shards read it",
    "model.offload": "a model on an accelerator reads it",
    "sampling.schedule": "families that have two read it",
    "rollout.rejection": "sampling apart from training reads it",
}
"""Keys that such a run accepts and does not read, and what does."""


def unread(section: BaseModel, read: set, path: str = ""):
    for name in type(section).model_fields:
        value = object.__getattribute__(section, name)
        if isinstance(value, BaseModel):
            yield from unread(value, read, f"{path}{name}.")
        elif (type(section), name) not in read:
            yield path + name


def accepted(recipe: str, key: str) -> list[str]:
    """The changes of a key, to values of its type that are not its own, that the recipe takes."""
    found = []
    for change in [f"{key}={json.loads(value)}" for where, value in CHANGES if where == key]:
        try:
            changed = load_recipe([recipe], [change]).recipe
        except UserError:
            continue
        if changed != load_recipe([recipe]).recipe:
            found.append(change)
    return found


@pytest.mark.slow
@pytest.mark.sweep("keys that a run accepts and does not read")
@pytest.mark.parametrize("recipe", RUNS)
def test_a_key_that_is_accepted_is_read(recipe, sweep, tmp_path):
    if recipe == "scenes":
        pytest.importorskip("torchvision")
    loaded = load_recipe([recipe], [*SMALL, *RUNS[recipe]])
    with recorded() as read:
        start.train(loaded, tmp_path / "run")
    for key in unread(loaded.recipe, read):
        if key not in ELSEWHERE:
            sweep.check(not (taken := accepted(recipe, key)), f"{recipe}: {taken}")
    sweep.done()

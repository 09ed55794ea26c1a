"""Every key of a recipe has an effect where it is accepted: a run reads it, or it is refused."""

import json
import os
import typing
from unittest.mock import patch

import pytest
import torch
from pydantic import BaseModel

import mmrl
from mmrl.app.build import build
from mmrl.config.algorithm_settings import AlgorithmSettings
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.models.policy import Policy
from mmrl.placement.multi_device import MultiDevice
from mmrl.planner.plan import plan
from mmrl.runtime import cluster, start
from mmrl.runtime.program import watchdog
from tests.support.edits import CHANGES
from tests.support.key_reads import recorded
from tests.support.messages import annotations
from tests.support.planning import without_the_step
from tests.support.tiny_diffusion import save

allow_cpu_only()  # before transformers imports torchvision

SMALL = ["train.steps=1", "train.prompts_per_step=2", "device=cpu"]
GROUPS = ["train.group_size=2", "train.micro_batch_size=2", "eval.samples=2"]
RUNS = {"sums": GROUPS, "shapes-lora": GROUPS, "moving-shapes": GROUPS, "scenes": GROUPS}
OFFLINE = ("sums-reward", "sums-dpo", "sums-sft", "shapes-dpo", "shapes-sft")
RUNS |= {name: ["train.micro_batch_size=2", "eval.samples=2"] for name in OFFLINE}
SWITCHED = ["algorithm={type: dapo}", "optim.ema_decay=0.9", "eval.guards.action=stop", "rollout.importance=token"]
SWITCHED += ["eval.guards.method=sequential", "eval.rewards=[{name: answer:exact}]"]
"""What the keys of ``SWITCHES`` belong to."""
SWITCHES = {
    "algorithm.max_attempts": "algorithm.dynamic_sampling reads it",
    "optim.ema_every": "optim.ema_decay reads it",
    "eval.guards.patience": "eval.guards.action=stop reads it",
    "eval.guards.alpha": "eval.guards.method=sequential reads it",
    "eval.guards.follow": "eval.guards.method=sequential reads it",
    "sampling.batch_size": "what samples reads it; recipes for all of that have it",
    "rollout.rejection": "log-probs of another computation, or importance weights, read it",
}
ELSEWHERE = {
    "architecture": "a plan reads it where there is no checkpoint",
    "ray": "several controllers read it",
    "runtime.patience": "several processes read it",
    "placement.log": "several devices read it",
    "placement.inside": "several devices read it",
    "performance.offload_optimizer": "a model on an accelerator reads it",
    "performance.offload_reference": "a reference on an accelerator reads it",
    "performance.gather_dtype": "weights in shards read it",
    "model.offload": "a picture model reads it",
    "sampling.schedule": "families that have two read it",
}
"""Keys that such a run accepts and does not read, and what does."""


def _plan(recipe, *overrides):
    with without_the_step():
        plan(load_recipe([recipe], overrides))


def _several_controllers(folder):
    pytest.importorskip("ray")
    with patch.dict(os.environ):
        cluster._imported(load_recipe(["sums"], ["controllers=2", "device=cpu"]).recipe)


def _several_devices(folder):
    loaded = load_recipe(
        ["shapes-lora"], ["device=cpu", "devices_per_controller=2", "placement={type: partial, log: true}"]
    )
    devices = MultiDevice([], loaded.recipe.placement)
    devices.open(build(loaded.recipe))
    devices.close()


def _other_scheduler(folder):
    """Sana, whose checkpoint comes with another scheduler than the flow's own."""
    save("sana", folder / "sana")
    recipe = load_recipe(["sana15-1.6b"], [f"model.path={folder / 'sana'}", "device=cpu", "model.dtype=float32"]).recipe
    mmrl.load("pipelines", "diffusion/sana").build(recipe, str(folder / "sana"), torch.device("cpu"))


def _away(folder):
    """A policy that is on no CPU."""
    recipe = load_recipe(["sums"]).recipe
    Policy(torch.nn.Linear(2, 2, device="meta"), recipe.optim, 1, performance=recipe.performance)


READERS = {
    "architecture": lambda folder: _plan("smollm2-instructions"),
    "ray": _several_controllers,
    "runtime.patience": lambda folder: watchdog(load_recipe(["sums"]).recipe),
    "placement.log": _several_devices,
    "placement.inside": _several_devices,
    "performance.offload_optimizer": _away,
    "performance.offload_reference": _away,
    "performance.gather_dtype": lambda folder: _plan("sums", "controllers=2", "train.backend=fsdp", "device=cpu"),
    "model.offload": lambda folder: _plan("shapes-lora", "device=cpu"),
    "sampling.schedule": _other_scheduler,
}


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


@pytest.mark.parametrize("key", ["sampling.temperature", "sampling.top_p", "eval.temperature"])
def test_a_reward_model_has_no_key_of_sampling(key):
    with pytest.raises(UserError, match="reward_model samples nothing; remove it"):
        load_recipe(["sums-reward"], [f"{key}=0.5"])
    for recipe in ("sums-sft", "sums-dpo"):
        with pytest.raises(UserError, match="texts that are given have no importance weights; remove it"):
            load_recipe([recipe], ["rollout.importance=token"])


def test_the_failures_of_a_step_are_of_steps_that_call_rewards():
    for recipe in OFFLINE:
        for key in ("max_failed=0.5", "patience=60"):
            with pytest.raises(UserError, match="calls no reward in its steps; remove it"):
                load_recipe([recipe], [f"scoring.{key}"])
    stops = "eval.early_stopping={metric: reward/number}"  # reads it: an evaluation with more failures does not count
    assert load_recipe(["sums-dpo"], [stops, "scoring.max_failed=0.5"])


@pytest.mark.parametrize(
    ("recipe", "changes"),
    [
        ("shapes-lora", []),
        ("shapes-dpo", []),
        ("moving-shapes", []),
        ("sums", ["rollout={engine: vllm, partial: {extra: 2, cut_after: 2}}"]),
        ("sums", ["placement={type: disaggregated}", "devices_per_controller=2"]),
    ],
)
def test_work_is_measured_where_it_divides_the_prompts(recipe, changes):
    assert load_recipe([recipe], changes)
    with pytest.raises(UserError, match=r"train\.balance: .*; set train\.balance to predicted"):
        load_recipe([recipe], [*changes, "train.balance=measured"])
    assert load_recipe(["sums"], ["train.balance=measured"])


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
        if key not in {**ELSEWHERE, **SWITCHES}:
            sweep.check(not (taken := accepted(recipe, key)), f"{recipe}: {taken}")
    sweep.done()


def was_read(key: str, read: set) -> bool:
    """Whether the key, in one of the sections that it may be in, is among those that were read."""
    section, _, name = key.rpartition(".")
    owners = annotations(section) if section else [Recipe]
    classes = {one for of in owners for one in classes_in(of)}
    return any(field == name and issubclass(of, tuple(classes)) for of, field in read)


def classes_in(annotation: object):
    """The sections that a type allows."""
    if isinstance(annotation, type):
        return {annotation} if issubclass(annotation, BaseModel) else set()
    if "as_settings" in str(annotation):
        return {AlgorithmSettings}
    return {one for inner in typing.get_args(annotation) for one in classes_in(inner)}


def test_every_key_that_is_read_elsewhere_has_a_reader():
    assert {*ELSEWHERE} == {*READERS}


@pytest.mark.slow
@pytest.mark.parametrize("reader", dict.fromkeys(READERS.values()))
def test_a_key_is_read_where_it_is_said_to_be(reader, tmp_path):
    with recorded() as read:
        reader(tmp_path)
    keys = [key for key, where in READERS.items() if where is reader]
    assert not [key for key in keys if not was_read(key, read)]


@pytest.mark.slow
def test_a_key_is_read_once_what_it_belongs_to_is_on(tmp_path):
    loaded = load_recipe(["sums"], [*SMALL, *GROUPS, *SWITCHED])
    with recorded() as read:
        start.train(loaded, tmp_path / "run")
    assert not [key for key in SWITCHES if not was_read(key, read)]

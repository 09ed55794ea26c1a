"""Weights in shards over several devices of a controller: real runs that learn as one process, and go on elsewhere."""

import shutil
from concurrent.futures import Future

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.config.placement import Placement
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.placement.device_shares import all_of
from mmrl.placement.task_queue import Task, TaskQueue
from mmrl.planner.plan import plan
from mmrl.training.loop import backward
from tests.support import damage
from tests.support.runs import JUDGED, alike, placed, rows, run
from tests.support.sharded_devices import same_beginning, sampled

allow_cpu_only()  # before transformers imports torchvision
pytest.importorskip("torchvision")

TWO = ["train.backend=fsdp", "devices_per_controller=2"]
FOUR = [*TWO, "controllers=2"]


def was_divided(run, step):
    """Whether both devices trained, have a shard each in the checkpoint of ``step``, and sent weights."""
    assert {line["device"] for line in placed(run) if line.get("role") == "train"} == {0, 1}
    names = {path.name for path in (run / "checkpoints" / f"step_{step:06d}").glob("*.safetensors")}
    assert names == {f"shard-{n:05d}-model-00001-of-00001.safetensors" for n in (1, 2)}
    assert rows(run)[0]["sent/weights"] > 0


@pytest.mark.long  # in short: the shards that Megatron-Core goes on from, below
@pytest.mark.slow
def test_two_devices_learn_as_one_process_which_goes_on_from_their_shards(tmp_path):
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    one = sampled("sums", whole, "train.steps=3")
    same_beginning(one, sampled("sums", shards, "train.steps=2", *TWO))
    was_divided(shards, 2)
    sampled("sums", shards, "train.steps=3", "--resume")
    alike(whole, shards)


@pytest.mark.long  # in short: the shards that Megatron-Core goes on from, below
@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["sums", "shapes-lora"])
def test_two_controllers_of_two_devices_learn_as_one_process_and_others_go_on(recipe, tmp_path):
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    one = sampled(recipe, whole, "train.steps=3")
    same_beginning(one, sampled(recipe, shards, "train.steps=2", *FOUR))
    layouts = {
        "fewer": TWO,
        "controllers": ["train.backend=fsdp", "controllers=3"],
        "replicated": ["controllers=2", "devices_per_controller=2"],
    }
    for name, layout in layouts.items():
        shutil.copytree(shards, tmp_path / name)
        sampled(recipe, tmp_path / name, "train.steps=3", *layout, "--resume")
        alike(whole, tmp_path / name)


PARTS = ["train.backend=megatron", "train.tensor_parallel=2", "devices_per_controller=2"]


@pytest.mark.slow
def test_megatron_goes_on_from_shards_as_one_process_would(tmp_path):
    pytest.importorskip("megatron.core")
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    one = sampled("sums", whole, "train.steps=2")
    same_beginning(one, sampled("sums", shards, "train.steps=1", *TWO))
    was_divided(shards, 1)
    sampled("sums", shards, "train.steps=2", *PARTS, "--resume")
    alike(whole, shards)


@pytest.mark.long
@pytest.mark.slow
def test_megatron_learns_as_one_process_and_goes_on_in_any_layout(tmp_path):
    pytest.importorskip("megatron.core")
    parts = PARTS
    stages = ["train.backend=megatron", "train.pipeline_parallel=2", "devices_per_controller=2"]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    one = sampled("sums", whole, "train.steps=4")
    same_beginning(one, sampled("sums", cut, "train.steps=2", *parts))
    shutil.copytree(cut, tmp_path / "shards")
    newest = tmp_path / "shards" / "checkpoints" / "step_000002"
    says = damage.flipped(newest, newest / "shard-00002-model-00001-of-00001.safetensors")
    assert says in damage.passed_over(newest.parent, 1, 2)
    sampled("sums", tmp_path / "shards", "train.steps=3", *TWO, "--resume")  # after step 1
    sampled("sums", tmp_path / "shards", "train.steps=4", *parts, "--resume")
    alike(whole, tmp_path / "shards")
    several = [*stages, "controllers=2", "train.distributed_optimizer=true"]
    sampled("sums", cut, "train.steps=3", *several, "--resume")
    sampled("sums", cut, "train.steps=4", "--resume")
    alike(whole, cut)


@pytest.mark.long
@pytest.mark.slow
def test_a_run_of_whole_weights_goes_on_in_shards_where_a_device_may_have_no_slice(tmp_path):
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    few = ["train.prompts_per_step=3", "algorithm={type: ppo}", "train.updates_per_step=2"]
    sampled("sums", whole, "train.steps=3", *few)
    sampled("sums", shards, "train.steps=1", *few)
    sampled("sums", shards, "train.steps=3", *few, *FOUR, "--resume")  # a controller has one slice for two devices
    alike(whole, shards)


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """The run of one process, with a generative judge; in float32, as half precision parts by 1e-2 in a step."""
    out = tmp_path_factory.mktemp("sharded") / "one"
    run("shapes-judge", out, *JUDGED, "model.dtype=float32")
    return out


@pytest.mark.long  # in short: tests/placement/test_devices.py, where the devices have whole weights
@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    ["{type: partial, sleep: true}", "adaptive", "colocate"],
)
def test_every_placement_of_a_judge_learns_alike_in_shards(judged, tmp_path, placement):
    run("shapes-judge", tmp_path / "shards", *JUDGED, *TWO, "model.dtype=float32", f"placement={placement}")
    alike(judged, tmp_path / "shards")
    assert {line["device"] for line in placed(tmp_path / "shards") if line.get("role") == "judge"} >= {1}


@pytest.mark.parametrize(
    ("recipe", "overrides", "message"),
    [
        ("shapes-draft", [], "draft back-propagates"),
        ("sums", ["rollout={engine: vllm_server}", "placement.sleep=true"], "placement.sleep: vllm_server would wake"),
        ("sums-dpo", ["model.lora=null"], "set eval.every to null"),
    ],
)
def test_what_shards_over_several_devices_cannot_do_is_refused(recipe, overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe([recipe], [*TWO, *overrides])


def test_a_plan_counts_the_shards_of_all_devices_and_what_is_gathered_while_they_judge():
    words = ["device=cpu", "controllers=2", "devices_per_controller=2", "placement={type: partial, sleep: true}"]
    whole, shards = (
        plan(load_recipe(["shapes-judge"], [*words, f"train.backend={b}"])) for b in ("replicated", "fsdp")
    )
    kept = [next(role.bytes for role in made.roles if role.name == "optimizer") for made in (whole, shards)]
    assert kept[1] == -(-kept[0] // 4)
    at = {phase.name: phase.parts for phase in shards.phases}
    assert at["judge"]["weights gathered for the phase"] == whole.phases[0].parts["policy"]


def test_a_device_takes_its_own_task_whatever_another_has_to_do():
    board = TaskQueue(2, Placement())
    for device in (0, 1):  # two slices of equal numbers
        board.put(Task("train", backward, (torch.ones(2),), device=device))
    taken = board.take(1)
    assert taken is not None
    assert taken.device == 1


def test_a_device_that_fails_is_heard_while_another_waits_for_it():
    waits, fails = Future(), Future()
    fails.set_exception(UserError("no room"))
    with pytest.raises(UserError, match="no room"):
        all_of([waits, fails])
    waits.set_result(1)
    assert all_of([waits]) == [1]

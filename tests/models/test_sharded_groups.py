"""Groups of devices that divide the weights (HSDP): four ranks in groups of two do what whole weights do, each group
has all weights, and a checkpoint goes on with another layout."""

import shutil

import pytest
import torch

from mmrl.config.loader import RecipeError, load_recipe
from mmrl.planner.plan import plan
from tests.support.sharded import close, make, together, work

GROUPS = ("controllers=4", "train.shard_size=2")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["text", pytest.param("full", marks=pytest.mark.long)])
def test_each_group_has_all_weights_and_the_gradient_of_all(name, tmp_path):
    one = work(make(name))
    found = together(name, 4, tmp_path, 1, *GROUPS)
    assert {key: value for rank in found for key, value in rank["sampled"].items()} == one["sampled"]  # to the bit
    for group in (found[:2], found[2:]):
        close([rank["gradient"] for rank in group], one["gradient"])
        close([rank["weights"] for rank in group], one["weights"], 1e-4)
        for copy, values in one["copies"].items():
            close([rank["copies"][copy] for rank in group], values, 1e-4)
    for first, second in zip(found[:2], found[2:], strict=True):  # the same rows of two groups
        for key in ("gradient", "weights"):
            assert all(torch.equal(a, b) for a, b in zip(first[key], second[key], strict=True))
    assert found[0]["rows"][0]["optim/grad_norm"] == pytest.approx(one["rows"][0]["optim/grad_norm"], rel=1e-4)
    for rank in found:
        assert rank["held"] < 0.75 * one["held"]


@pytest.mark.slow
def test_a_checkpoint_of_groups_goes_on_without_them_and_back(tmp_path):
    before = together("lora", 4, tmp_path, "save", *GROUPS)
    checkpoints = tmp_path / "checkpoints"
    for words in (GROUPS, ()):
        folder = tmp_path / f"then-{len(words)}"
        folder.mkdir()
        shutil.copytree(checkpoints, folder / "checkpoints")
        after = together("lora", 4, folder, "go_on", *words)
        parts = 2 if words else 4
        close([rank["weights"] for rank in after[:parts]], torch_joined(before[:2]), 1e-5)
        assert after[0]["counts"] == before[0]["counts"]


def torch_joined(ranks):
    """The whole tensors of what two ranks have rows of."""
    return [torch.cat(rows) for rows in zip(*(rank["weights"] for rank in ranks), strict=True)]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["controllers=4", "train.shard_size=2"], r"train\.shard_size: replicated has no shards of FSDP; remove it"),
        (
            ["controllers=4", "train.backend=fsdp", "train.shard_size=3"],
            "4 devices .* no multiple of 3; set it to 2 or 4",
        ),
        (["controllers=4", "train.backend=fsdp", "train.shard_size=1"], "a group of 1 holds all weights"),
        (["train.backend=fsdp", "train.shard_size=2"], "1 devices that train are no multiple of 2; set it to null"),
    ],
)
def test_groups_that_cannot_be_are_refused(words, said):
    with pytest.raises(RecipeError, match=said):
        load_recipe(["sums"], words)


def test_the_plan_counts_the_rows_of_a_group():
    def memory(*words):
        made = plan(load_recipe(["sums"], ["controllers=8", "train.backend=fsdp", *words]))
        return {phase.name: phase for phase in made.phases}["train"].parts["policy"]

    assert memory("train.shard_size=2") == pytest.approx(4 * memory(), rel=0.1)

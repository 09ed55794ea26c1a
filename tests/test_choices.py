"""What a recipe leaves to the plan: chosen by the device's memory, stored with the run, and used again."""

import json
from dataclasses import replace

import pytest

from mmrl.config.left_to_plan import KEYS, left_open, with_values
from mmrl.config.loader import load_recipe
from mmrl.planner.choices import ROWS, SHARE
from mmrl.planner.gpus import GPUS
from mmrl.planner.plan import plan, resolved

AUTO = [f"{key}=auto" for key in KEYS]
SMALL = ["train.prompts_per_step=12", "train.group_size=4"]
H100 = GPUS["h100-80g"]


def gpu(mib):
    return replace(H100, gib=mib / 1024)


def planned(name, mib, *more):
    loaded = load_recipe([name], [*AUTO, *SMALL, "device=cuda", *more])
    return plan(loaded, gpu=gpu(mib))


def size(made):
    return made.recipe.train.micro_batch_size


@pytest.mark.parametrize("name", ["sums", "shapes-lora"])
def test_auto_is_no_value_and_on_a_cpu_today_s(name):
    auto, none = load_recipe([name], AUTO).recipe, load_recipe([name]).recipe
    assert left_open(auto) == [*KEYS]
    assert auto.train.micro_batch_size == 8
    assert auto.sampling.batch_size is None
    assert not auto.model.gradient_checkpointing
    assert "train.micro_batch_size" not in left_open(none), "what a recipe writes stays"
    loaded = load_recipe([name], [*AUTO, "device=cpu"])
    assert resolved(loaded) is loaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "sizes"),
    [("sums", (24, 20000)), pytest.param("shapes-lora", (24, 32, 20000), marks=pytest.mark.long)],
)
def test_more_memory_is_never_fewer_samples_and_the_plan_fits(name, sizes):
    found = [planned(name, mib) for mib in sizes]
    chosen = [size(made) for made in found]
    assert chosen == sorted(chosen)
    assert len({*chosen}) > 1
    for made, mib in zip(found, sizes, strict=True):
        assert made.peak.total <= SHARE * mib * 2**20
        assert not left_open(made.recipe), "the start of the run chooses nothing again"
        assert [note for note in made.notes if note.startswith("train.micro_batch_size: auto is")]
    assert not found[-1].recipe.model.gradient_checkpointing
    if name == "shapes-lora":
        assert chosen[-1] == ROWS
    assert planned(name, sizes[0]).recipe == found[0].recipe, "a function of the recipe and the memory"


def test_what_is_written_stays():
    loaded = load_recipe(
        ["sums"], [*SMALL, "device=cuda", "train.micro_batch_size=3", "model.gradient_checkpointing=true"]
    )
    made = plan(loaded, gpu=gpu(20000))
    assert (size(made), made.recipe.model.gradient_checkpointing) == (3, True)
    assert not left_open(made.recipe)
    assert not [note for note in made.notes if "auto is" in note]


def test_checkpointing_is_taken_where_a_recipe_does_not_fit_without_it():
    words = [*SMALL, "device=cuda", "train.micro_batch_size=48", "model.gradient_checkpointing=auto"]
    loaded = load_recipe(["sums"], words)
    peaks = [
        plan(replace(loaded, recipe=with_values(loaded.recipe, {KEYS[2]: way})), gpu=gpu(20000)).peak.total
        for way in (False, True)
    ]
    assert peaks[1] < peaks[0]
    made = plan(loaded, gpu=gpu(sum(peaks) / 2 / 2**20))
    assert made.recipe.model.gradient_checkpointing
    assert not made.problems
    assert not plan(loaded, gpu=gpu(peaks[0] * 1.01 / 2**20)).recipe.model.gradient_checkpointing


def test_where_nothing_fits_the_smallest_is_named():
    made = planned("sums", 2)
    assert size(made) == 1
    assert [problem for problem in made.problems if "Try:" in problem]


def test_a_resumed_run_has_what_it_chose(tmp_path):
    loaded = load_recipe(["sums"], AUTO)
    chosen = with_values(loaded.recipe, {"train.micro_batch_size": 5, "model.gradient_checkpointing": True})
    (tmp_path / "resolved.json").write_text(json.dumps(chosen.model_dump(mode="json")))
    again = loaded.for_resume(tmp_path).recipe
    assert (again.train.micro_batch_size, again.model.gradient_checkpointing) == (5, True)
    assert not left_open(again)
    assert load_recipe(["sums"], ["train.micro_batch_size=3"]).for_resume(tmp_path).recipe.train.micro_batch_size == 3
    assert loaded.for_resume(tmp_path / "none").recipe == loaded.recipe

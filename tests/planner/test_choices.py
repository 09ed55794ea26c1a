"""What a recipe leaves to the plan: chosen by the device's memory, stored with the run, and used again."""

import json
from dataclasses import replace

import pytest

from mmrl.config.left_to_plan import KEYS, left_open, with_values
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.planner.choices import COMPILING, ROWS, SHARE
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
    """Rows of a micro-batch, of the greatest length."""
    return made.counts.slice_rows


def said(made, key):
    return "\n".join(note for note in made.notes if note.startswith(f"{key}: auto is"))


@pytest.mark.parametrize("name", ["sums", "shapes-lora"])
def test_auto_is_no_value_and_on_a_cpu_today_s(name):
    auto, none = load_recipe([name], AUTO).recipe, load_recipe([name]).recipe
    assert left_open(auto) == [*KEYS]
    assert auto.train.micro_batch_size == 8
    assert auto.sampling.batch_size is None
    assert auto.train.micro_batch_tokens is None
    assert (auto.model.gradient_checkpointing, auto.model.offload, auto.performance.compile) == (False, True, False)
    assert "train.micro_batch_size" not in left_open(none), "what a recipe writes stays"
    loaded = load_recipe([name], [*AUTO, "device=cpu"])
    assert resolved(loaded) is loaded


@pytest.mark.slow
def test_tokens_limit_what_memory_does_and_more_short_rows_share_a_micro_batch():
    made = planned("sums", 24)
    train = made.recipe.train
    assert train.micro_batch_tokens == size(made) * made.counts.row_tokens
    assert size(made) < train.micro_batch_size == 48, "all samples of an update"
    assert said(made, "train.micro_batch_tokens")
    assert planned("sums", 20000).recipe.train.micro_batch_tokens is None, "all rows at once have no limit"
    by_hand = planned("sums", 24, "train.micro_batch_tokens=null", "train.micro_batch_size=4")
    assert (by_hand.recipe.train.micro_batch_tokens, size(by_hand)) == (None, 4)


def test_tokens_that_are_chosen_beside_rows_by_hand_are_refused_with_both():
    with pytest.raises(RecipeError, match=r"micro_batch_tokens is auto, .* micro_batch_size is 3; remove one"):
        load_recipe(["sums"], ["train.micro_batch_tokens=auto", "train.micro_batch_size=3"])


@pytest.mark.slow
def test_steps_of_text_are_recorded_where_this_process_samples():
    made = planned("sums", 20000)
    assert made.recipe.performance.compile
    assert "CUDA graphs" in said(made, "performance.compile")
    assert not planned("sums", 20000, "performance.compile=false").recipe.performance.compile
    assert "is refused here" in said(planned("sums", 20000, "rollout.engine=vllm"), "performance.compile")


HAND = ["train.micro_batch_size=8", "train.micro_batch_tokens=null", "model.gradient_checkpointing=false"]


@pytest.mark.slow
def test_pictures_are_compiled_where_a_run_is_long_enough():
    long, short = (planned("shapes-lora", 20000, *HAND, f"train.steps={n}") for n in (10**6, 2))
    assert (long.recipe.performance.compile, short.recipe.performance.compile) == (True, False)
    eager = planned("shapes-lora", 20000, *HAND, "train.steps=1000000", "performance.compile=false")
    assert eager.lasts - long.lasts > COMPILING
    assert "of the run by the estimate" in said(long, "performance.compile")
    guarded = planned("shapes-full", 20000, *HAND, "model.dtype=bfloat16", "algorithm={type: grpo_guard}")
    assert not guarded.recipe.performance.compile
    assert "refused here: compiled kernels round" in said(guarded, "performance.compile")


@pytest.mark.slow
def test_idle_models_stay_on_a_gpu_that_has_room_for_them():
    hand = [*HAND, "performance.compile=false"]
    stay, leave = (planned("shapes-lora", 20000, *hand, f"model.offload={way}") for way in ("false", "true"))
    assert leave.host > stay.host
    between = (leave.peak.total + stay.peak.total) / 2 / SHARE / 2**20
    roomy, tight = planned("shapes-lora", 20000, *hand), planned("shapes-lora", between, *hand)
    assert (roomy.recipe.model.offload, tight.recipe.model.offload) == (False, True)
    assert roomy.peak.total == stay.peak.total
    assert tight.peak.total == leave.peak.total
    assert "have room" in said(roomy, "model.offload")
    assert "more than 80%" in said(tight, "model.offload")


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
    assert not said(made, "train.micro_batch_size")
    assert not said(made, "model.gradient_checkpointing")


@pytest.mark.slow
def test_checkpointing_is_taken_where_a_recipe_does_not_fit_without_it():
    words = [*SMALL, "device=cuda", "train.micro_batch_size=48", "model.gradient_checkpointing=auto"]
    loaded = load_recipe(["sums"], words)
    peaks = [
        plan(
            replace(loaded, recipe=with_values(loaded.recipe, {"model.gradient_checkpointing": way})), gpu=gpu(20000)
        ).peak.total
        for way in (False, True)
    ]
    assert peaks[1] < peaks[0]
    made = plan(loaded, gpu=gpu(sum(peaks) / 2 / 2**20))
    assert made.recipe.model.gradient_checkpointing
    assert not made.problems
    assert not plan(loaded, gpu=gpu(peaks[0] * 1.01 / 2**20)).recipe.model.gradient_checkpointing


@pytest.mark.slow
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

"""What a recipe leaves to the plan: chosen by the device's memory, stored with the run, and used again."""

import json
import re
from dataclasses import replace
from functools import cache

import pytest

from mmrl.config.left_to_plan import KEYS, left_open, with_values
from mmrl.config.loader import RecipeError, load_recipe, shipped_recipes
from mmrl.planner.choices import COMPILING, ROWS, SHARE, _each_once, _probed_sizes
from mmrl.planner.fit_check import edits
from mmrl.planner.gpus import GPUS
from mmrl.planner.plan import plan, resolved
from mmrl.planner.plan_data import PhaseMemory, Plan

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


def value_of(recipe, key):
    section, _, name = key.partition(".")
    return getattr(getattr(recipe, section), name)


@pytest.mark.parametrize("name", ["sums", pytest.param("shapes-lora", marks=pytest.mark.long)])
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


# -- every key and every promise ---------------------------------------------------------------------------------------

TEXT = ("train.micro_batch_size", "train.micro_batch_tokens", "sampling.batch_size")
TEXT += ("model.gradient_checkpointing", "performance.compile")
PICTURES = tuple(key for key in KEYS if key != "train.micro_batch_tokens")
CASES = {  # the recipe, MiB of the GPU, what it chooses for, and what it says that the next larger GPU would change
    "text, little memory": (
        "sums",
        24,
        TEXT,
        {"train.micro_batch_size", "sampling.batch_size", "model.gradient_checkpointing"},
    ),
    "text, much memory": ("sums", 20000, TEXT, set()),
    "pictures, little memory": (
        "shapes-lora",
        32,
        PICTURES,
        {"train.micro_batch_size", "model.gradient_checkpointing", "model.offload"},
    ),
    "pictures, much memory": ("shapes-lora", 20000, PICTURES, set()),
    "pictures in text, much memory": ("scenes", 20000, TEXT, set()),
}
WHY = re.compile(r"because|greatest length|of an update|save|memory|limit|ratios|draws|recorded|compiling")


@cache
def case(name):
    recipe, mib, *_ = CASES[name]
    if recipe == "scenes":
        pytest.importorskip("torchvision")
    return planned(recipe, mib)


IN_SHORT = [pytest.param(name, marks=[] if name.startswith("text") else pytest.mark.long) for name in CASES]
"""A case of pictures takes minutes to plan."""


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_SHORT)
def test_every_choice_is_said_once_with_its_reason_and_fits(name):
    made, applies = case(name), CASES[name][2]
    assert not made.problems
    assert made.peak.total <= SHARE * made.device_memory
    for key in KEYS:
        notes = [note for note in made.notes if note.startswith(f"{key}: auto is")]
        assert len(notes) == (key in applies), (key, notes)
        assert all(WHY.search(note) for note in notes), notes
        value = value_of(made.recipe, key)
        if key == "train.micro_batch_size":
            value = size(made)  # of the greatest length, where tokens limit them
        if key == "sampling.batch_size" and value is None:
            value = made.recipe.train.micro_batch_size
        if key in applies:
            assert f"auto is {'no limit' if value is None else str(value).lower()}" in notes[0]
    assert not left_open(made.recipe)


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_SHORT)
def test_what_the_next_larger_gpu_would_change_is_said_where_it_would(name):
    changes = {note.partition(":")[0] for note in case(name).notes if "; on rtx3070-8g it would be " in note}
    assert changes == CASES[name][3]


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_SHORT)
def test_every_choice_is_stored_with_the_run_and_taken_up_again(name, tmp_path):
    recipe = CASES[name][0]
    (tmp_path / "resolved.json").write_text(json.dumps(case(name).recipe.model_dump(mode="json")))
    again = load_recipe([recipe], [*AUTO, *SMALL, "device=cuda"]).for_resume(tmp_path).recipe
    assert not left_open(again)
    for key in KEYS:
        assert value_of(again, key) == value_of(case(name).recipe, key), key


HAND_SET = {
    "train.micro_batch_size": 3,
    "train.micro_batch_tokens": 4096,
    "sampling.batch_size": 6,
    "model.gradient_checkpointing": True,
    "performance.compile": False,
    "model.offload": False,
}


NOT_OF = {
    ("shapes-lora", "train.micro_batch_tokens"): "pictures have no tokens to count",
    ("sums", "model.offload"): "text has none",
}


@pytest.mark.slow
@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("name", ["sums", pytest.param("shapes-lora", marks=pytest.mark.long)])
def test_what_is_set_by_hand_is_kept_beside_what_is_chosen(name, key):
    if refused := NOT_OF.get((name, key)):
        with pytest.raises(RecipeError, match=refused):
            planned(name, 20000, f"{key}={str(HAND_SET[key]).lower()}")
        return
    steps = ["train.steps=1000"] if name == "sums" else ["train.steps=2"]
    by_hand = [f"{key}={str(HAND_SET[key]).lower()}"]
    by_hand += ["train.micro_batch_tokens=null"] * (key == "train.micro_batch_size")
    made = planned(name, 20000, *steps, *by_hand)
    assert value_of(made.recipe, key) == HAND_SET[key]
    assert not said(made, key)
    assert not left_open(made.recipe)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sums", pytest.param("shapes-lora", marks=pytest.mark.long)])
def test_where_nothing_fits_the_smallest_is_taken_and_the_smallest_gpu_named(name):
    made = planned(name, 2)
    assert size(made) == 1
    assert made.recipe.model.gradient_checkpointing
    (problem,) = [problem for problem in made.problems if "Try:" in problem]
    assert "model.gradient_checkpointing" not in problem
    assert "(rtx3070-8g is the smallest of those in docs/gpus.md that holds it)" in problem


def test_nothing_is_planned_twice_for_equal_recipes():
    asked = []

    def once(recipe):
        asked.append(recipe.train.micro_batch_size)
        return Plan(recipe, "cuda", H100.memory, notes=["first"])

    sums = load_recipe(["sums"], ["train.micro_batch_size=3"]).recipe
    plan_once = _each_once(once)
    first = plan_once(sums)
    first.notes.append("of the first alone")
    again = plan_once(sums.model_copy())
    assert (again.notes, again.recipe) == (["first"], sums)
    plan_once(with_values(sums, {"train.micro_batch_size": 4}))
    assert asked == [3, 4]


def test_few_rows_are_planned_where_they_are_long():
    assert _probed_sizes(load_recipe(["sums"]).recipe) == _probed_sizes(load_recipe(["shapes-lora"]).recipe) == (8, 4)
    assert _probed_sizes(load_recipe(["sums"], ["sampling.max_new_tokens=30720"]).recipe) == (2, 1)


def test_the_smallest_gpu_is_one_that_holds_the_peak():
    for need, name in ((1, "rtx3070-8g"), (11, "rtx5070-12g"), (20, "l4-24g"), (70, "a100-80g"), (150, "b200-180g")):
        made = Plan(load_recipe(["sums"]).recipe, "cuda", H100.memory, gpu=H100)
        made.phases = [PhaseMemory("train", {"working memory": need * 2**30})]
        problem = list(edits(made, made.phases[0]))[-1]
        assert problem.startswith(f"a device with more memory ({name} is the smallest")
    made.phases = [PhaseMemory("train", {"working memory": 2**40})]
    assert list(edits(made, made.phases[0]))[-1] == "a device with more memory, or a smaller model.path"


BY_HAND = ("qwen25-vl-3b",)
"""Whose plans of several sizes take minutes."""


@pytest.mark.parametrize("name", [name for name in shipped_recipes() if load_recipe([name]).recipe.device == "cuda"])
def test_recipes_for_a_gpu_leave_the_choice_to_the_plan(name):
    left = left_open(load_recipe([name]).recipe)
    assert left == ([*KEYS] if name not in BY_HAND else ["model.offload", "performance.compile"])


def test_a_resumed_run_has_what_it_chose(tmp_path):
    loaded = load_recipe(["sums"], AUTO)
    chosen = with_values(loaded.recipe, {"train.micro_batch_size": 5, "model.gradient_checkpointing": True})
    (tmp_path / "resolved.json").write_text(json.dumps(chosen.model_dump(mode="json")))
    again = loaded.for_resume(tmp_path).recipe
    assert (again.train.micro_batch_size, again.model.gradient_checkpointing) == (5, True)
    assert not left_open(again)
    assert load_recipe(["sums"], ["train.micro_batch_size=3"]).for_resume(tmp_path).recipe.train.micro_batch_size == 3
    assert loaded.for_resume(tmp_path / "none").recipe == loaded.recipe

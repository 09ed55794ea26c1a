"""Prompts of pictures that are longer than the text encoders read: counted, and treated as ``data.overlong`` says."""

import json
import random

import pytest
import torch

import mmrl
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Slot
from mmrl.planner.data_check import check_recipe
from mmrl.planner.plan import plan
from mmrl.planner.render import render
from tests.support.families import EDITORS, FAMILIES, TOLD, folders, recipe  # noqa: F401

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402

LENGTHS = {"qwen_image": 300, "sana": 64}
AFTER = dict.fromkeys(("qwen_image", "z_image", "flux2_klein", "flux2", "hunyuan_video15"), 64)
"""Tokens that a chat template may write after the text."""
WORDS = "red blue small large circle square above below beside two three green bright".split()  # noqa: SIM905


def text_of(words, seed):
    return " ".join(random.Random(seed).choices(WORDS, k=words))


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in EDITORS])
@pytest.mark.sweep("prompts longer than text encoders read")
def test_a_prompt_is_too_long_exactly_where_its_end_is_not_read(folders, family, sweep):
    """Two prompts that differ in their last word alone have equal features if, and only if, the word is not read."""
    length = {"max_sequence_length": LENGTHS[family]} if family in LENGTHS else {}
    pipeline = contract.Case(recipe(family, folders, **length)).pipeline
    lengths = pipeline.lengths_of_prompts
    for n in range(sweep.size(6, 40)):
        text = text_of(1 + n * sweep.size(14, 2), n)
        read = lengths.of(Prompt("p", text))
        with torch.no_grad():
            first, second = (pipeline.adapter.encode(text + end) for end in (" q", " j"))
        unread = all(torch.equal(first[name], second[name]) for name in first)
        longer = lengths.of(Prompt("p", text + " q"))
        # where the cut falls into the last word, or into what a template writes after it, either may hold; and where
        # an encoder of fewer tokens reads the end, which in the tiny models has longer ones
        each = pipeline.adapter.read(text + " q", lengths._tokenizers)
        right = (
            unread or any(one.tokens <= one.most for one in each)
            if read.tokens > read.most + AFTER.get(family, 0)
            else not unread
            if longer.tokens <= longer.most
            else True
        )
        sweep.check(right, f"{family}: {read} of {text!r}")
    sweep.done()


def written(folder, prompts, pipeline, folders, **data):
    made = recipe(pipeline, folders).model_dump(mode="json")
    made["data"] = {"name": "jsonl", "train": {"path": "a.jsonl", "heldout": 0}, "heldout": {"path": "a.jsonl"}} | data
    made["data"]["heldout"] |= {"heldout": 0}
    made["rewards"] = [{"name": "jpeg:incompressibility"}]
    (folder / "a.jsonl").write_text("".join(json.dumps({"id": str(i)} | p) + "\n" for i, p in enumerate(prompts)))
    (folder / "recipe.yaml").write_text(json.dumps(made))
    return load_recipe([folder / "recipe.yaml"])


LONG = [{"prompt": "a red circle"}, {"prompt": text_of(200, 1)}, {"prompt": "a green square"}, {"prompt": "blue"}]


@pytest.mark.slow
@pytest.mark.parametrize("how", [None, "cut", "skip", "error"])
def test_overlong_is_obeyed_in_plan_data_check_and_training(folders, tmp_path, how):
    loaded = written(tmp_path, LONG, "sd", folders, overlong=how)
    made, checked = plan(loaded), check_recipe(loaded.recipe, 4, 4)
    said = [line for line in (*made.notes, *made.problems) if "too long" in line]
    assert len(said) == 1
    assert "2 of 8 prompts looked at are too long (a:2, a:2)" in said[0]
    assert "the first has " in said[0]
    assert "Stable Diffusion 1 or 2's text encoder reads 12" in said[0]
    split = checked.splits["train"]
    assert split.tokens["fewest"] < 10
    if how == "error":
        assert made.problems == said
        assert checked.faults == 2
        assert "data.overlong=cut" in said[0]
        assert not plan(written(tmp_path, LONG, "sd", folders, overlong="cut")).problems
    else:
        assert not made.problems
        assert (checked.faults, len(split.notes)) == ((2, 0) if how == "skip" else (0, 1))
    pipeline = mmrl.load("pipelines", "diffusion/sd").build(
        loaded.recipe, loaded.recipe.model.path, torch.device("cpu")
    )
    slots = [Slot(0, 0, 0, Prompt("1", LONG[1]["prompt"]))]
    if how == "skip":
        with pytest.raises(BadPromptError, match=r"reads 12 \(data.overlong: skip\)"):
            pipeline.encode(slots)
    elif how == "error":
        with pytest.raises(UserError, match="the prompt 1 has"):
            pipeline.encode(slots)
    else:
        pipeline.encode(slots)


def test_only_the_encoder_that_reads_most_decides(folders):
    """The tiny CLIP reads 12 tokens, and T5 what the recipe says."""
    for most, decides in ((8, 12), (64, 64)):
        pipeline = contract.Case(recipe("flux", folders, max_sequence_length=most)).pipeline
        assert pipeline.lengths_of_prompts.of(Prompt("p", "red")).most == decides


@pytest.mark.slow
@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in (*TOLD, *EDITORS)])
def test_a_negative_prompt_is_too_long_where_its_end_is_not_read(folders, family):
    length = {"max_sequence_length": LENGTHS[family]} if family in LENGTHS else {}
    pipeline = contract.Case(recipe(family, folders, guidance_scale=3.0, **length)).pipeline
    for words in (1, 400):
        text = text_of(words, words)
        why = pipeline.lengths_of_prompts.why(Prompt("p", "red", negative_prompt=text))
        with torch.no_grad():
            first, second = (pipeline.adapter.encode_negative(text + end) for end in (" q", " j"))
        unread = all(torch.equal(first[name], second[name]) for name in first)
        assert unread == (words > 1) == (why is not None and why.startswith("has a negative prompt of ")), why


@pytest.mark.slow
@pytest.mark.parametrize("how", ["cut", "skip", "error"])
@pytest.mark.parametrize("whose", ["record", "recipe"])
def test_a_negative_prompt_is_treated_as_its_prompt(folders, tmp_path, how, whose):
    text = text_of(200, 1)
    prompts = [{"prompt": "red"}, {"prompt": "blue"} | ({"negative_prompt": text} if whose == "record" else {})]
    written(tmp_path, prompts, "sd", folders, overlong=how)
    edits = ["sampling.guidance_scale=4", *([f"sampling.negative_prompt={text}"] if whose == "recipe" else [])]
    loaded = load_recipe([tmp_path / "recipe.yaml"], edits)
    made, found = plan(loaded), "1 of 2" if whose == "record" else "2 of 2"
    said = [line for line in (*made.notes, *made.problems) if "too long" in line]
    assert len(said) == 1
    assert "the first has a negative prompt of " in said[0]
    assert bool(made.problems) == (how == "error" or (how, whose) == ("skip", "recipe"))
    checked = check_recipe(loaded.recipe, 2, 2).splits["train"]
    assert any(f"{found} prompts looked at are too long" in line for line in checked.notes) == (how == "cut")


def test_what_records_carry_and_pictures_do_not_use_is_said(folders, tmp_path):
    import PIL.Image

    PIL.Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    rows = [
        {"prompt": "a red circle", "image": "a.png"},
        {"prompt": "a blue square", "system": "Be brief."},
        {"prompt": "a star", "max_new_tokens": 4},
    ]
    loaded = written(tmp_path, rows, "sd", folders)
    checked = check_recipe(loaded.recipe, 3, 3).splits["train"]
    for notes, n in ((plan(loaded).notes, 2), (checked.notes, 1)):
        said = "\n".join(notes)
        assert f"{n} of {3 * n} prompts looked at carry pictures, and only their captions are used" in said
        assert f"{n} of {3 * n} prompts looked at have a system message" in said
        assert f"{n} of {3 * n} prompts looked at have max_new_tokens" in said
    assert all(record.system is None for record in checked.shown)


@pytest.mark.slow
@pytest.mark.parametrize(("steps", "says"), [(10**12, True), (2, False)])
def test_a_run_of_days_says_so_in_its_first_lines(folders, tmp_path, steps, says):
    from io import StringIO

    from rich.console import Console

    from mmrl.planner.gpus import gpu_of

    loaded = written(tmp_path, LONG[:1], "sd", folders)
    train = loaded.recipe.train.model_copy(update={"steps": steps})
    import dataclasses

    loaded = dataclasses.replace(loaded, recipe=loaded.recipe.model_copy(update={"train": train}))
    for gpu in (None, gpu_of("t4-16g")):
        made = plan(loaded, gpu=gpu)
        for short in (True, False):
            out = StringIO()
            render(made, Console(file=out, width=200), short=short)
            first = "\n".join(out.getvalue().splitlines()[: 1 if short else 2])
            where = "t4-16g, " if gpu else "this machine's cpu (an estimate"
            assert ("this run takes about" in first and "days on " + where in first) == says


def test_devices_are_recognised():
    from mmrl.planner.gpus import like

    names = {
        ("NVIDIA H100 80GB HBM3", 79): "h100-80g",
        ("NVIDIA A100-SXM4-40GB", 39): "a100-40g",
        ("NVIDIA A100-SXM4-80GB", 79): "a100-80g",
        ("NVIDIA L40S", 44): "l40s-48g",
        ("NVIDIA L4", 22): "l4-24g",
        ("NVIDIA GeForce RTX 4090", 23): "rtx4090-24g",
        ("Tesla T4", 14): "t4-16g",
    }
    for (name, gib), expected in names.items():
        assert like(name, gib * 2**30).name == expected
    assert like("NVIDIA GeForce GTX 1080", 8 * 2**30) is None


def test_the_default_of_an_older_run_is_the_same(folders):
    made = recipe("sd", folders).model_dump(mode="json")
    assert Recipe.model_validate(made).overlong == "cut"
    assert load_recipe(["sums"]).recipe.overlong == "skip"

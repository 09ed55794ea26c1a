"""``model.min_pixels`` and ``model.max_pixels``: how many tokens a picture in a prompt has."""

import io

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.errors import UserError
from mmrl.core.media import Media
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.families.text import engine_sampling
from mmrl.planner.plan import plan
from tests.support import tiny

allow_cpu_only()

RECIPE = """
name: tiny
pipeline: vlm/chat
model: {path: model}
data: {name: jsonl, train: {path: q.jsonl, heldout: 0}, heldout: {path: q.jsonl, heldout: 0}}
sampling: {max_new_tokens: 8}
rewards: [{name: "answer:exact"}]
algorithm: {type: grpo, kl_coef: 0.0}
train: {steps: 1, prompts_per_step: 1, group_size: 2, micro_batch_size: 2}
eval: {every: null}
"""
EDGE = {"qwen2_5_vl": 28, "qwen3_vl": 32}
"""Pixels of a token's side."""


def folder_of(root, kind):
    pytest.importorskip("torchvision")
    tiny.vision_model(root / "model", kind)
    (root / "tiny.yaml").write_text(RECIPE)
    Image.new("RGB", (224, 224), "red").save(root / "a.png")
    (root / "q.jsonl").write_text('{"prompt": "What?", "image": "a.png", "answer": "a"}\n')
    return root


@pytest.fixture(scope="module", params=EDGE)
def folder(request, tmp_path_factory):
    return folder_of(tmp_path_factory.mktemp(request.param), request.param)


def loaded(folder, *changes):
    return load_recipe([folder / "tiny.yaml"], changes)


def built(folder, *changes):
    made = loaded(folder, *changes)
    return mmrl.load("pipelines", "vlm/chat").build(made.recipe, str(folder / "model"), torch.device("cpu"))


def tokens_of(pipeline, width, height):
    file = io.BytesIO()
    Image.new("RGB", (width, height), "red").save(file, "PNG")
    features = pipeline.conditioner.encode(Prompt("p", "What?", media=(Media("image", data=file.getvalue()),)))
    return int(features["image_grid_thw"].prod()) // 4


def test_pictures_have_as_many_tokens_as_the_limits_allow(folder, tmp_path):
    edge = EDGE[folder.name.rstrip("0123456789")]
    token = edge * edge
    assert tokens_of(built(folder), 6 * edge, 6 * edge) == 9  # what the checkpoint allows
    larger = built(folder, f"model.max_pixels={25 * token}")
    assert tokens_of(larger, 6 * edge, 6 * edge) == 25
    assert tokens_of(larger, edge, edge) == 1
    least = built(folder, f"model.min_pixels={16 * token}", f"model.max_pixels={25 * token}")
    assert tokens_of(least, edge, edge) == 16
    larger.write(tmp_path / "out", "merged")
    from transformers import AutoProcessor

    assert AutoProcessor.from_pretrained(tmp_path / "out").image_processor.size["longest_edge"] == 25 * token
    with pytest.raises(UserError, match=r"model\.min_pixels: pictures would have at least"):
        built(folder, f"model.min_pixels={100 * token}")


def test_the_plan_counts_them(folder):
    edge = EDGE[folder.name.rstrip("0123456789")]
    lengths = []
    for most in (4, 16):
        counts = plan(loaded(folder, f"model.max_pixels={most * edge * edge}")).counts
        assert counts is not None
        lengths.append(counts.row_tokens)
    assert lengths[1] - lengths[0] == 12


def test_engines_that_make_tokens_of_pictures_get_the_same_limits(folder, monkeypatch):
    seen = {}
    monkeypatch.setattr(engine_sampling, "_start", lambda name, path, options, given: seen.update(options))
    made = loaded(folder, "rollout.engine=vllm", "model.max_pixels=4096")
    engine_sampling.open_engine(made.recipe, "m", 512, torch.device("cpu"), sees=True)
    assert seen["mm_processor_kwargs"] == {"images_kwargs": {"max_pixels": 4096}}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["model.min_pixels=9000"], "is above model.max_pixels"),
        (["rollout.engine=sglang"], r"sglang resizes pictures by itself; set the same limit in rollout\.options"),
        (["rollout.engine=examples/engine.py:OwnCopy"], "would not apply it to pictures"),
    ],
)
def test_what_cannot_be_is_refused_when_the_recipe_is_read(folder, changes, says):
    with pytest.raises(RecipeError, match=says):
        loaded(folder, "model.max_pixels=4096", *changes)


def test_models_without_such_limits_are_named(tmp_path):
    with pytest.raises(RecipeError, match=r"model\.max_pixels: a model that makes pictures has no chat"):
        load_recipe(["shapes-lora"], ["model.max_pixels=4096"])
    with pytest.raises(RecipeError, match=r"model\.max_pixels: llm/chat sees no pictures"):
        load_recipe(["sums"], ["model.max_pixels=4096"])
    pytest.importorskip("num2words")
    with pytest.raises(UserError, match=r"model\.max_pixels: SmolVLMImageProcessor\w* limits no number of pixels"):
        built(folder_of(tmp_path, "smolvlm"), "model.max_pixels=4096")

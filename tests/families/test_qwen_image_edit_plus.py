"""Qwen-Image-Edit-Plus: several pictures, which the text encoder sees smaller than the model."""

import json
from dataclasses import replace

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.new_recipe.model import look_at_model
from mmrl.planner.plan import plan

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402
from tests.support.families import folders, recipe  # noqa: E402, F401

FAMILY = "qwen_image_edit_plus"


@pytest.fixture(scope="module")
def case(folders):
    return contract.Case(recipe(FAMILY, folders, guidance_scale=4.0, steps=2))


def test_each_picture_in_its_place_is_seen_by_the_encoder_and_the_model(case):
    first = case.slots[0]
    one, two = first.prompt.media
    asked = [
        replace(first, prompt=replace(first.prompt, media=media)) for media in ((one, two), (two, one), (one, one))
    ]
    case.pipeline.encode(asked)
    features = [case.pipeline.features.get(case.pipeline.key(slot.prompt)) for slot in asked]
    assert features[0]["source"].shape[0] == 2
    assert torch.equal(features[0]["source"].flip(0), features[1]["source"])
    for other in features[1:]:
        assert (features[0]["embeds"] - other["embeds"]).abs().max() > 1e-3
    adapter, read = case.pipeline.adapter, case.pipeline.lengths_of_prompts.of(first.prompt)
    small = adapter._small(_blank(adapter))
    assert small.size == (384, 384)
    assert features[0]["mask"].sum() == read.tokens + 2 * adapter._tokens(*small.size)
    assert features[0]["source"].shape[2] * 4 == adapter.source_size.height == 64


def _blank(adapter):
    from PIL import Image

    return Image.new("RGB", adapter.source_size[::-1])


def test_condition_tokens_at_time_0_are_the_stock_pipelines(folders, tmp_path):
    """Checkpoints of 2511 say ``zero_cond_t``."""
    import shutil

    shutil.copytree(folders[FAMILY], tmp_path / "model")
    file = tmp_path / "model" / "transformer" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"zero_cond_t": True}))
    contract.sampling_is_the_stock_pipelines(recipe(FAMILY, {FAMILY: tmp_path / "model"}, steps=2))


def test_another_number_of_pictures_is_refused(folders, tmp_path, case):
    first = case.slots[0]
    alone = replace(first, prompt=replace(first.prompt, media=first.prompt.media[:1]))
    with pytest.raises(
        BadPromptError, match=r"has 1 media; give every prompt the 2 pictures .* images; sampling.pictures"
    ):
        case.pipeline.encode([alone])
    (tmp_path / "a.png").write_bytes(first.prompt.media[0].data)
    lines = [{"id": str(n), "prompt": "make it red", "images": ["a.png", "a.png"]} for n in range(4)]
    (tmp_path / "edits.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = recipe(FAMILY, folders).model_dump(mode="json")
    given = {"path": "edits.jsonl", "heldout": 0}
    made["data"] = {"name": "jsonl", "train": given, "heldout": given}
    made["rewards"] = [{"name": "jpeg:incompressibility"}]
    (tmp_path / "recipe.yaml").write_text(json.dumps(made))
    planned = plan(load_recipe([tmp_path / "recipe.yaml"], []))
    assert planned.problems == []
    assert not any("memory is not known" in note for note in planned.notes)
    three = plan(load_recipe([tmp_path / "recipe.yaml"], ["sampling.pictures=3"]))
    assert any("it has 2 media; give every prompt the 3 pictures" in problem for problem in three.problems)


def test_several_pictures_are_for_families_that_take_them(folders):
    with pytest.raises(UserError, match=r"sampling.pictures: FLUX.1 Kontext: a prompt carries one picture; remove"):
        contract.Case(recipe("flux_kontext", folders, pictures=2))
    with pytest.raises(UserError, match=r"sampling.pictures: Wan: it is shown no pictures; remove"):
        contract.Case(recipe("wan", folders, pictures=2))


def test_init_and_the_card_know_it(folders, case):
    assert look_at_model(str(folders[FAMILY]), None, edits=True, algorithm=None).pipeline == f"diffusion/{FAMILY}"
    code = case.pipeline.usage("out", "lora", case.slots[0].prompt).code["With diffusers"]
    assert 'image=[Image.open("picture1.png").resize((64, 64)), Image.open("picture2.png")' in code
    assert "pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE = 48 * 48" in code

"""Qwen-Image-Edit: its text encoder sees the picture, which has a size of its own."""

import json
from dataclasses import replace

import pytest
import torch

from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.plan import plan

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402
from tests.support.families import folders, recipe  # noqa: E402, F401

FAMILY = "qwen_image_edit"


@pytest.fixture(scope="module")
def case(folders):
    return contract.Case(recipe(FAMILY, folders, guidance_scale=4.0, steps=2))


def test_the_text_encoder_sees_the_picture_beside_the_prompt_and_the_negative_prompt(case):
    first, second = case.slots[0], case.slots[2]
    other = replace(first, prompt=replace(first.prompt, media=second.prompt.media))
    case.pipeline.encode([first, other])
    features = case.pipeline.batch_features([first, other])
    for negative, positive in ((0, 1), (2, 3)):
        assert not torch.equal(features["embeds"][negative], features["embeds"][positive])
    for name in ("embeds", "source"):
        assert (features[name][2] - features[name][3]).abs().max() > 1e-3
    assert (features["embeds"][0] - features["embeds"][1]).abs().max() > 1e-3
    read, adapter = case.pipeline.lengths_of_prompts.of(first.prompt), case.pipeline.adapter
    assert features["mask"][2].sum() == read.tokens + adapter._tokens(*adapter.source_size[::-1])


@pytest.mark.slow
def test_a_model_without_the_tokens_of_the_picture_is_not_the_stock_pipeline(folders):
    """What holds the family to its picture: neither the encoder's nor the VAE's may be left out."""
    case = contract.Case(recipe(FAMILY, folders, steps=2))
    with torch.no_grad():
        for name, weight in case.pipeline.adapter.model.named_parameters():
            if weight.ndim == 2 and ".to_" in name:
                weight.mul_(4)
    stock = case.stock(case.pipeline.adapter.pipe)
    assert (case.drawn() - stock).abs().max() < contract.CLOSE
    for slot in case.slots:
        key = case.pipeline.key(slot.prompt)
        kept = case.pipeline.features.get(key)
        case.pipeline.features.put(key, {name: t for name, t in kept.items() if name != "source"})
    assert (case.drawn() - stock).abs().max() > 100 * contract.CLOSE


@pytest.mark.parametrize("size", [(32, 32), (32, 64), (64, 32)])
def test_the_picture_has_the_area_that_is_asked_for(case, size):
    from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

    for side in (None, 64, 384):
        sampling = {"height": size[0], "width": size[1], "condition_size": side}
        adapter = type(case.pipeline.adapter)(
            case.pipeline.adapter.pipe, case.recipe.denoising.model_copy(update=sampling), torch.device("cpu")
        )
        height, width = adapter.source_size
        area = (side or 1024) ** 2
        assert calculate_dimensions(area, width / height) == (width, height)  # the stock call leaves it as it is
        assert abs(height * width / area - 1) <= 32 / (side or 1024)  # 32 pixels are the unit
        assert (width > height) == (size[1] > size[0])
        assert ("calculate_dimensions" in adapter.prepare) == (side is not None)


def test_a_size_of_the_picture_is_refused_where_it_has_none_and_where_nothing_is_left(folders):
    with pytest.raises(UserError, match=r"sampling.condition_size: Qwen-Image: it is shown no pictures; remove"):
        contract.Case(recipe("qwen_image", folders, condition_size=64))
    with pytest.raises(UserError, match=r"sampling.condition_size: FLUX.1 Kontext: .* size that is sampled; remove"):
        contract.Case(recipe("flux_kontext", folders, condition_size=64))
    small = {"height": 32, "width": 160}
    with pytest.raises(UserError, match=r"32 x 32 pixels .* of 160 x 32 .*; raise it to 64"):
        contract.Case(recipe(FAMILY, folders, condition_size=32, **small))
    contract.Case(recipe(FAMILY, folders, condition_size=64, **small))


@pytest.mark.slow
def test_the_plan_knows_features_of_the_picture_without_a_processor(folders, tmp_path):
    made = recipe(FAMILY, folders, guidance_scale=2.0).model_dump(mode="json") | {"data": {"name": "shape_edits"}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(made))
    loaded = load_recipe([tmp_path / "recipe.yaml"], [])
    planned = plan(loaded)
    assert not planned.problems
    assert not any("memory is not known" in note for note in planned.notes)
    case = contract.Case(loaded.recipe)
    kept = case.pipeline.features.get(case.pipeline.key(case.slots[0].prompt))
    assert kept["embeds"].shape[0] == 512 + case.pipeline.adapter._tokens(*case.pipeline.adapter.source_size[::-1])


@pytest.mark.parametrize(
    ("record", "message"),
    [({}, "has 0 media; give every prompt the one picture"), ({"images": ["a.png", "a.png"]}, "it has 2 media; give")],
)
def test_a_prompt_without_its_picture_or_with_two_is_refused_in_the_plan(folders, tmp_path, case, record, message):
    (tmp_path / "a.png").write_bytes(case.slots[0].prompt.media[0].data)
    lines = [{"id": str(n), "prompt": "make it red"} | record for n in range(4)]
    (tmp_path / "edits.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    made = recipe(FAMILY, folders).model_dump(mode="json")
    given = {"path": "edits.jsonl", "heldout": 0}
    made["data"] = {"name": "jsonl", "train": given, "heldout": given}
    made["rewards"] = [{"name": "jpeg:incompressibility"}]
    (tmp_path / "recipe.yaml").write_text(json.dumps(made))
    planned = plan(load_recipe([tmp_path / "recipe.yaml"], []))
    assert any(message in problem for problem in planned.problems), planned.problems
    lenient = plan(load_recipe([tmp_path / "recipe.yaml"], ["data.max_bad_fraction=1"]))
    assert not any(message in problem for problem in lenient.problems), lenient.problems
    assert any(message in note for note in lenient.notes), lenient.notes

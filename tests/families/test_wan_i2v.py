"""Clips from a text and the picture that they begin with."""

import json
import shutil
from dataclasses import replace

import pytest
import torch

from mmrl.algorithms.objective import GraphSteps
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.randomness import noise
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.new_recipe.model import look_at_model
from mmrl.planner.plan import plan

allow_cpu_only()  # before transformers imports torchvision

import transformers  # noqa: E402

from mmrl.pipelines.diffusion import contract  # noqa: E402
from tests.support.families import folders, recipe  # noqa: E402, F401

HELD = "wan22_i2v_5b"
TWO = "wan22_i2v_a14b"


@pytest.mark.parametrize(
    ("family", "check"),
    [
        pytest.param(family, check, marks=[pytest.mark.slow] * (check is not contract.sampling_is_the_stock_pipelines))
        for family in (HELD, TWO)
        for check in contract.CHECKS
    ],
)
def test_wan_22_keeps_the_contract(folders, family, check):
    check(recipe(family, folders, guidance_scale=4.0))


def test_the_first_frame_stays_and_is_no_part_of_what_is_learnt(folders):
    """In float64 from the recorded states: the log-prob is the mean over the other frames."""
    case = contract.Case(recipe(HELD, folders, guidance_scale=2.0))
    pipeline = case.pipeline
    rows = pipeline.sample(case.slots, case.ids, [0], seed=0)
    features = pipeline.batch_features(case.slots, guided=False)
    assert torch.equal(rows.clean[:, :, :1], features["source"])
    assert (rows.clean[0, :, 0] - rows.clean[2, :, 0]).abs().max() > 1e-2
    assert rows.states.shape[2:] == pipeline.shape == (8, 1, 2, 2)
    schedule = pipeline.adapter.schedule(3)
    c = pipeline.coefficients(schedule, [0])
    z = torch.stack([noise(0, [name], "step0", pipeline.shape)[0] for name in case.ids]).double()
    std = c.std[0].item()
    expected = -(z**2) / 2 - torch.tensor(std).double().log() - torch.tensor(2 * torch.pi).double().log() / 2
    torch.testing.assert_close(rows.log_probs[:, 0].double(), expected.flatten(1).mean(1), rtol=1e-4, atol=1e-4)
    with pytest.raises(UserError, match=r"sampling.frames: the first frame .*; use 5"):
        contract.Case(recipe(HELD, folders, frames=1))


@pytest.mark.slow
@pytest.mark.parametrize("family", [HELD, TWO])
def test_another_first_frame_changes_the_clip_as_in_the_stock_pipeline(folders, family):
    case = contract.Case(recipe(family, folders, guidance_scale=3.0))
    before, media = case.drawn(), [slot.prompt.media for slot in case.slots]
    case.slots = [replace(s, prompt=replace(s.prompt, media=m)) for s, m in zip(case.slots, media[::-1], strict=True)]
    case.pipeline.encode(case.slots)
    ours, theirs = case.drawn(), case.stock(case.pipeline.adapter.pipe)
    assert (ours - theirs).abs().max() < contract.CLOSE
    later = slice(1, None)  # frames: the first would differ in any case
    assert (ours - before)[:, later].abs().flatten(1).amax(1).min() > 100 * contract.CLOSE


@pytest.fixture(scope="module")
def case(folders):
    return contract.Case(recipe("wan_i2v", folders, steps=2))


@pytest.mark.parametrize("name", ["source", "seen"])
def test_the_model_is_shown_the_picture_by_channel_and_by_its_encoder(case, name):
    """Another picture in one of the two changes the clip, which with the prompt's own is the stock pipeline's."""
    stock, keys = case.stock(case.pipeline.adapter.pipe), [case.pipeline.key(case.slots[n].prompt) for n in (0, 2)]
    own = [case.pipeline.features.get(key) for key in keys]
    assert (case.drawn() - stock).abs().max() < contract.CLOSE
    try:
        for key, mine, other in zip(keys, own, own[::-1], strict=True):
            case.pipeline.features.put(key, mine | {name: other[name]})
        assert (case.drawn() - stock).abs().flatten(1).amax(1).min() > 2 * contract.CLOSE
    finally:
        for key, mine in zip(keys, own, strict=True):
            case.pipeline.features.put(key, mine)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"type": "diffusion_nft"}, {"type": "draft", "last_steps": 1}])
@pytest.mark.parametrize("family", ["wan_i2v", HELD])
def test_other_kinds_of_objective_have_gradients(folders, family, algorithm):
    made = recipe(family, folders, lora=False).model_dump(mode="json") | {"algorithm": algorithm}
    case = contract.Case(Recipe.model_validate(made))
    if algorithm["type"] == "draft":
        out = case.pipeline.generate(case.slots, case.ids, GraphSteps(1, 2), 0, frozenset(), case.policy.using)
        out["images"].sum().backward()
    else:
        rows = case.pipeline.sample(case.slots, case.ids, [], seed=0)
        out = case.pipeline.renoise(rows, 0, 0, frozenset({"target"}), case.policy.using)
        assert out["x_s"].shape[1:] == out["target"].shape[1:] == case.pipeline.shape
        out["v"].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in case.policy.trainable.values())


@pytest.mark.slow
def test_all_weights_train(folders):
    contract.first_ratio_is_one(recipe("wan_i2v", folders, lora=False, guidance_scale=3.0))
    contract.two_steps_move_every_parameter(recipe("wan_i2v", folders, lora=False))


def test_the_length_of_texts_that_diffusers_takes_for_granted(folders):
    with pytest.raises(UserError, match=r"sampling.max_sequence_length: .* as 512 tokens, .* 64 .*; set it to 512"):
        contract.Case(recipe("wan_i2v", folders, max_sequence_length=64))


def test_a_checkpoint_without_an_image_encoder(folders, tmp_path):
    """The model must have no inputs for it, either."""
    folder = tmp_path / "model"
    shutil.copytree(folders["wan_i2v"], folder)
    index = json.loads((folder / "model_index.json").read_text())
    (folder / "model_index.json").write_text(json.dumps(index | {"image_encoder": [None, None]}))
    with pytest.raises(
        UserError, match=r"says image_dim: 32, .* with no image encoder has null(.|\n)*added_kv_proj_dim"
    ):
        contract.Case(recipe("wan_i2v", {"wan_i2v": folder}))


@pytest.mark.slow
def test_an_image_encoder_with_a_projection_is_read_before_it(folders, tmp_path):
    """The stock pipeline takes its states, too."""
    folder = tmp_path / "model"
    shutil.copytree(folders["wan_i2v"], folder)
    shutil.rmtree(folder / "image_encoder")
    config = transformers.CLIPVisionConfig.from_pretrained(folders["wan_i2v"] / "image_encoder")
    transformers.CLIPVisionModelWithProjection(config).save_pretrained(folder / "image_encoder")
    index = json.loads((folder / "model_index.json").read_text())
    index["image_encoder"][1] = "CLIPVisionModelWithProjection"
    (folder / "model_index.json").write_text(json.dumps(index))
    contract.sampling_is_the_stock_pipelines(recipe("wan_i2v", {"wan_i2v": folder}, steps=2))


def test_init_names_the_pipeline(folders):
    assert look_at_model(str(folders["wan_i2v"]), None, edits=True, algorithm=None).pipeline == "diffusion/wan_i2v"
    with pytest.raises(UserError, match=r"is a WanImageToVideoPipeline, .*set pipeline to .*diffusion/wan_i2v"):
        contract.Case(recipe("wan", {"wan": folders["wan_i2v"]}))
    for edits, named in ((True, HELD), (False, "wan")):
        assert look_at_model(str(folders[HELD]), None, edits=edits, algorithm=None).pipeline == f"diffusion/{named}"
    assert look_at_model(str(folders[TWO]), None, edits=True, algorithm=None).pipeline == f"diffusion/{TWO}"
    assert look_at_model(str(folders["wan"]), None, edits=True, algorithm=None).pipeline == "diffusion/wan"


def test_a_checkpoint_of_another_kind_is_refused_with_the_pipeline_for_it(folders):
    for pipeline, of, message in (
        ("wan_i2v", TWO, r"boundary_ratio: 0.9, .* set pipeline to diffusion/wan22_i2v_a14b"),
        (HELD, "wan", r"expand_timesteps: false, .* set pipeline to diffusion/wan or"),
        (TWO, "wan_i2v", r"nothing as its transformer_2"),
    ):
        with pytest.raises(UserError, match=message):
            contract.Case(recipe(pipeline, {pipeline: folders[of]}))


def test_the_card_loads_the_class_that_takes_a_picture(folders):
    case = contract.Case(recipe(HELD, folders))
    code = case.pipeline.usage("out", "lora", case.slots[0].prompt).code["With diffusers"]
    assert "from diffusers import WanImageToVideoPipeline" in code
    assert "WanImageToVideoPipeline.from_pretrained(" in code
    assert "image=Image.open" in code


def test_the_plan_refuses_a_record_without_its_first_frame(folders, tmp_path, case):
    (tmp_path / "clips.jsonl").write_text(
        "".join(json.dumps({"id": str(n), "prompt": "it moves"}) + "\n" for n in range(4))
    )
    made = recipe("wan_i2v", folders).model_dump(mode="json")
    made["rewards"] = [{"name": "frames", "options": {"name": "jpeg:incompressibility"}}]
    given = {"path": "clips.jsonl", "heldout": 0}
    made["data"] = {"name": "jsonl", "train": given, "heldout": given}
    (tmp_path / "recipe.yaml").write_text(json.dumps(made))
    planned = plan(load_recipe([tmp_path / "recipe.yaml"], []))
    assert any("has 0 media; give every prompt the one picture" in problem for problem in planned.problems)
    first = case.slots[0]
    bare = replace(first, prompt=replace(first.prompt, media=()))
    with pytest.raises(Exception, match="has 0 media"):
        case.pipeline.encode([bare])
    assert torch.isfinite(case.pipeline.features.get(case.pipeline.key(first.prompt))["source"]).all()

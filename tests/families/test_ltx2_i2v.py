"""Clips with sound from the picture that they begin with."""

import importlib.util
import json
from dataclasses import replace

import diffusers
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

from mmrl.pipelines.diffusion import contract  # noqa: E402
from tests.support.families import folders, recipe  # noqa: E402, F401

FAMILY = "ltx2_i2v"
OWN = {"guidance_scale": 3.0, "audio_guidance_scale": 5.0, "frame_rate": 12.0, "steps": 2}


@pytest.fixture(scope="module")
def case(folders):
    return contract.Case(recipe(FAMILY, folders, **OWN))


def test_another_first_frame_changes_clip_and_sound_as_in_the_stock_pipeline(case):
    before, sound, slots = case.drawn(), case.heard["ours"], case.slots
    media = [slot.prompt.media for slot in slots[::-1]]
    try:
        case.slots = [replace(s, prompt=replace(s.prompt, media=m)) for s, m in zip(slots, media, strict=True)]
        case.pipeline.encode(case.slots)
        ours, theirs = case.drawn(), case.stock(case.pipeline.adapter.pipe)
    finally:
        case.slots = slots
    assert case.gap(ours, theirs) < contract.CLOSE
    later = slice(1, None)  # frames: the first would differ in any case
    for now, then in ((ours[:, later], before[:, later]), (case.heard["ours"], sound)):
        assert (now - then).abs().flatten(1).amax(1).min() > 10 * contract.CLOSE


@pytest.mark.slow
def test_the_first_frame_is_compressed_as_in_the_stock_pipeline(folders):
    pytest.importorskip("av")
    plain = contract.Case(recipe(FAMILY, folders, **OWN))
    before = plain.drawn()
    for crf in (None, 20):
        case = contract.Case(recipe(FAMILY, folders, **OWN, image_crf=crf))
        ours = case.drawn()
        assert case.gap(ours, case.stock(case.pipeline.adapter.pipe)) < contract.CLOSE
        assert (ours - before)[:, 1:].abs().flatten(1).amax(1).min() > 10 * contract.CLOSE
        assert ("image_crf=20," in case.pipeline.usage("out", "lora", case.slots[0].prompt).code["With diffusers"]) == (
            crf == 20
        )


def test_the_first_frame_stays_and_is_no_part_of_what_is_learnt(case):
    """In float64 from the noise: the log-prob is the mean over the other frames and the sound."""
    pipeline = case.pipeline
    rows = pipeline.sample(case.slots, case.ids, [0], seed=0)
    source = pipeline.batch_features(case.slots, guided=False)["source"]
    picture, sound = pipeline.adapter.parts(rows.clean)
    assert (source.shape[1:], picture.shape[1:], sound.shape[1:]) == ((4 * 4, 4), (2 * 4 * 4, 4), (10, 8))
    assert torch.equal(picture[:, : 4 * 4], source)
    assert (source[0] - source[2]).abs().max() > 1e-2
    assert rows.states.shape[2:] == pipeline.shape == (4 * 4 * 4 + 10 * 8,)
    c = pipeline.coefficients(pipeline.adapter.schedule(), [0])
    z = torch.cat([noise(0, [name], "step0", pipeline.shape) for name in case.ids]).double()
    std = torch.tensor(c.std[0].item()).double()
    expected = (-(z**2) / 2 - std.log() - torch.tensor(2 * torch.pi).double().log() / 2).mean(1)
    torch.testing.assert_close(rows.log_probs[:, 0].double(), expected, rtol=1e-4, atol=1e-4)
    new = pipeline.replay(rows, [0], frozenset({"log_probs"}), case.policy.using)["log_probs"]
    assert torch.equal(new.detach(), rows.log_probs)


@pytest.mark.slow
@pytest.mark.parametrize("lora", [True, False])
@pytest.mark.parametrize("algorithm", [{"type": "diffusion_nft"}, {"type": "draft", "last_steps": 1}])
def test_other_kinds_of_objective_have_gradients(folders, algorithm, lora):
    made = recipe(FAMILY, folders, lora=lora).model_dump(mode="json") | {"algorithm": algorithm}
    case = contract.Case(Recipe.model_validate(made))
    if algorithm["type"] == "draft":
        out = case.pipeline.generate(case.slots, case.ids, GraphSteps(2, 2), 0, frozenset(), case.policy.using)
        assert out["images"].shape[1:] == (5, 3, 32, 32)
        out["images"].sum().backward()
    else:
        rows = case.pipeline.sample(case.slots, case.ids, [], seed=0)
        out = case.pipeline.renoise(rows, 0, 0, frozenset({"target"}), case.policy.using)
        assert out["x_s"].shape[1:] == out["target"].shape[1:] == case.pipeline.shape
        out["v"].square().sum().backward()
    assert [name for name, p in case.policy.trainable.items() if p.grad is None] == []
    moved = {name.partition(".lora_")[0] for name, p in case.policy.trainable.items() if p.grad.abs().sum() > 0}
    assert any("video_to_audio_attn" in name for name in moved)


@pytest.mark.slow
def test_all_weights_train_and_are_exported_whole(folders, tmp_path):
    contract.first_ratio_is_one(recipe(FAMILY, folders, lora=False, **OWN))
    contract.two_steps_move_every_parameter(recipe(FAMILY, folders, lora=False))
    case = contract.Case(recipe(FAMILY, folders, lora=False, **OWN))
    case.push()
    ours = case.drawn()
    case.pipeline.write(tmp_path / "out", "merged")
    pipe = diffusers.LTX2ImageToVideoPipeline.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert case.gap(ours, case.stock(pipe)) < contract.CLOSE


def test_what_is_refused(folders, monkeypatch):
    with pytest.raises(UserError, match=r"sampling.frames: the first frame .*; use 5"):
        contract.Case(recipe(FAMILY, folders, frames=1))
    with pytest.raises(UserError, match=r"sampling.image_crf: LTX-2 compresses no pictures; remove image_crf"):
        contract.Case(recipe("ltx2", folders, image_crf=0))
    with pytest.raises(UserError, match=r"sampling.buckets: a sample of LTX-2 is a row .*, or remove buckets"):
        contract.Case(recipe("ltx2", folders, buckets=[[32, 32], [32, 64]]))
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name == "av" else found(name, *more))
    with pytest.raises(
        UserError, match=r"sampling.image_crf: .* with PyAV \(0 leaves them .*, which is not installed: "
    ):
        contract.Case(recipe(FAMILY, folders, image_crf=None))


def test_init_names_the_pipeline_and_the_card_loads_the_class_that_takes_a_picture(folders, case):
    for edits, named in ((True, FAMILY), (False, "ltx2")):
        assert look_at_model(str(folders["ltx2"]), None, edits=edits, algorithm=None).pipeline == f"diffusion/{named}"
    usage = case.pipeline.usage("out", "lora", case.slots[0].prompt)
    for line in ("LTX2ImageToVideoPipeline.from_pretrained(", "image=Image.open", "image_crf=0,", "stg_scale=0.0,"):
        assert line in usage.code["With diffusers"]
    assert usage.task == "image-to-video"


@pytest.mark.slow
def test_the_plan_refuses_a_record_without_its_first_frame(folders, tmp_path):
    (tmp_path / "clips.jsonl").write_text(
        "".join(json.dumps({"id": str(n), "prompt": "it moves"}) + "\n" for n in range(4))
    )
    made = recipe(FAMILY, folders, steps=2).model_dump(mode="json")
    made["rewards"] = [{"name": "frames", "options": {"name": "jpeg:incompressibility"}, "modality": "video"}]
    (tmp_path / "recipe.yaml").write_text(json.dumps(made | {"data": {"name": "shape_edits"}}))
    right = plan(load_recipe([tmp_path / "recipe.yaml"], []))
    assert right.problems == []
    assert not any("memory is not known" in note for note in right.notes), right.notes
    given = {"path": "clips.jsonl", "heldout": 0}
    (tmp_path / "recipe.yaml").write_text(
        json.dumps(made | {"data": {"name": "jsonl", "train": given, "heldout": given}})
    )
    wrong = plan(load_recipe([tmp_path / "recipe.yaml"], []))
    assert any("has 0 media; give every prompt the one picture" in problem for problem in wrong.problems)

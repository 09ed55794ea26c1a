"""Clips with sound: both are the stock pipeline's, both are sampled and trained."""

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
from mmrl.planner.plan import plan

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402
from mmrl.pipelines.diffusion.ltx2 import LTX2Adapter  # noqa: E402
from tests.support.families import folders, recipe  # noqa: E402, F401
from tests.support.planning import without_the_step  # noqa: E402

FAMILY = "ltx2"
OWN = {"guidance_scale": 3.0, "audio_guidance_scale": 5.0, "frame_rate": 12.0, "steps": 2}


@pytest.fixture(scope="module")
def case(folders):
    return contract.Case(recipe(FAMILY, folders, **OWN))


def test_picture_and_sound_are_the_stock_pipelines_with_a_scale_for_each(folders, case):
    ours, theirs = case.drawn(), case.stock(case.pipeline.adapter.pipe)
    sound = case.heard["ours"]
    assert (ours - theirs).abs().max() < contract.CLOSE
    assert (sound - case.heard["stock"]).abs().max() < contract.CLOSE
    assert sound.shape == (2, 2, 4 * (4 * round(5 / 12 * 25) - 3))
    assert sound.std() > 1e-3
    other = contract.Case(recipe(FAMILY, folders, **OWN | {"audio_guidance_scale": 2.0}))
    other.drawn()
    assert (other.heard["ours"] - sound).abs().flatten(1).amax(1).min() > 100 * contract.CLOSE


def test_another_text_of_the_sound_alone_changes_the_result_as_in_the_stock_pipeline(case):
    """The connectors are made to answer, for the sound, with the states of the other prompt."""
    pipe, pipeline = case.pipeline.adapter.pipe, case.pipeline
    before = case.drawn(), case.heard["ours"]
    keys = [pipeline.key(case.slots[n].prompt) for n in (0, 2)]
    own = [pipeline.features.get(key) for key in keys]
    real, turns = pipe.connectors.forward, [own[1]["sound"], own[0]["sound"]]

    def swapped(*given, **more):
        picture, sound, mask = real(*given, **more)
        return picture, torch.stack([sound[0], turns.pop(0)]), mask

    try:
        for key, mine, other in zip(keys, own, own[::-1], strict=True):
            pipeline.features.put(key, mine | {"sound": other["sound"]})
        pipe.connectors.forward = swapped
        ours, theirs = case.drawn(), case.stock(pipe)
    finally:
        pipe.connectors.forward = real
        for key, mine in zip(keys, own, strict=True):
            pipeline.features.put(key, mine)
    assert not turns
    assert case.gap(ours, theirs) < contract.CLOSE
    for now, then in ((ours, before[0]), (case.heard["ours"], before[1])):
        assert (now - then).abs().flatten(1).amax(1).min() > 10 * contract.CLOSE


def test_both_are_noised_recorded_and_counted(case):
    """In float64 from the noise: the log-prob is the mean over both; the sound's states change in the step."""
    pipeline = case.pipeline
    rows = pipeline.sample(case.slots, case.ids, [0], seed=0)
    picture, sound = pipeline.adapter.parts(rows.states[:, 1] - rows.states[:, 0])
    assert (picture.shape[1:], sound.shape[1:]) == ((2 * 4 * 4, 4), (10, 8))
    assert sound.abs().amax((1, 2)).min() > 0.01
    assert pipeline.shape == (2 * 4 * 4 * 4 + 10 * 8,)
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
    """Of a reward of the picture alone, what the last block makes of the sound has zeros."""
    made = recipe(FAMILY, folders, lora=lora).model_dump(mode="json") | {"algorithm": algorithm}
    case = contract.Case(Recipe.model_validate(made))
    if algorithm["type"] == "draft":
        out = case.pipeline.generate(case.slots, case.ids, GraphSteps(2, 2), 0, frozenset(), case.policy.using)
        out["images"].sum().backward()
    else:
        rows = case.pipeline.sample(case.slots, case.ids, [], seed=0)
        out = case.pipeline.renoise(rows, 0, 0, frozenset({"target"}), case.policy.using)
        out["v"].square().sum().backward()
    assert [name for name, p in case.policy.trainable.items() if p.grad is None] == []
    moved = {name.partition(".lora_")[0] for name, p in case.policy.trainable.items() if p.grad.abs().sum() > 0}
    assert any("video_to_audio_attn" in name for name in moved)


@pytest.mark.slow
def test_all_weights_train_and_are_exported_whole(folders, tmp_path):
    case = contract.Case(recipe(FAMILY, folders, lora=False, **OWN))
    contract.two_steps_move_every_parameter(recipe(FAMILY, folders, lora=False))
    case.push()
    ours = case.drawn()
    case.pipeline.write(tmp_path / "out", "merged")
    pipe = diffusers.LTX2Pipeline.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert case.gap(ours, case.stock(pipe)) < contract.CLOSE


def test_what_is_refused(folders, tmp_path, case):
    with pytest.raises(UserError, match=r"sampling.audio_guidance_scale: .* is 1, .* remove audio_guidance_scale"):
        contract.Case(recipe(FAMILY, folders, audio_guidance_scale=2.0))
    for key in ("audio_guidance_scale", "frame_rate"):
        with pytest.raises(UserError, match=rf"sampling.{key}: Wan makes no sound; remove {key}"):
            contract.Case(recipe("wan", folders, guidance_scale=3.0, **{key: 2.0}))
    made = recipe(FAMILY, folders).model_dump(mode="json") | {"algorithm": {"type": "sft"}, "rewards": []}
    made["train"] |= {"group_size": 1}
    with pytest.raises(
        UserError, match=r"algorithm.type: picture_sft .* learns sound, .* use an algorithm that samples"
    ):
        contract.Case(Recipe.model_validate(made))
    with pytest.raises(UserError, match=r"sampling.frames: so short a clip has no sound at 96 a second; use 5"):
        contract.Case(recipe(FAMILY, folders, frames=1, frame_rate=96.0))
    pipe = case.pipeline.adapter.pipe
    before = pipe.connectors.config
    pipe.connectors.register_to_config(video_connector_num_learnable_registers=48)
    try:
        with pytest.raises(UserError, match=r"sampling.max_sequence_length: 64 is no multiple of 48, .* set it to 96"):
            LTX2Adapter(pipe, case.recipe.denoising, case.device)
    finally:
        pipe.connectors._internal_dict = before


@pytest.mark.slow
def test_the_plan_counts_both_decoders_and_refuses_to_cut_clips(folders, tmp_path, case):
    made = recipe(FAMILY, folders, steps=2).model_dump(mode="json")
    made["rewards"] = [{"name": "frames", "options": {"name": "jpeg:incompressibility"}, "modality": "video"}]
    (tmp_path / "recipe.yaml").write_text(json.dumps(made))
    planned = plan(load_recipe([tmp_path / "recipe.yaml"], []))
    assert planned.problems == []
    assert not any("memory is not known" in note for note in planned.notes), planned.notes
    pipe = case.pipeline.adapter.pipe
    decoders = sum(
        t.nbytes for name in ("vae", "audio_vae", "vocoder") for t in getattr(pipe, name).state_dict().values()
    )
    (parts,) = (phase.parts for phase in planned.phases if phase.name == "decode")
    assert decoders <= parts["VAE"] < 1.2 * decoders
    cut = ["device=cpu", "devices_per_controller=2", "train.context_parallel=2"]
    with without_the_step():
        cut = plan(load_recipe([tmp_path / "recipe.yaml"], cut))
    assert any("cuts positions and text wrongly" in problem for problem in cut.problems), cut.problems


def test_the_card_tells_the_stock_call_what_is_not_used(case):
    code = case.pipeline.usage("out", "lora", replace(case.slots[0].prompt)).code["With diffusers"]
    for line in ("frame_rate=12.0,", "audio_guidance_scale=5.0,", "stg_scale=0.0,", "audio_modality_scale=1.0,"):
        assert line in code

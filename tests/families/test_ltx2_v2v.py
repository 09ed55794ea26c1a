"""Clips with sound that go on from a clip."""

import io
from dataclasses import replace

import diffusers
import pytest
import torch
from PIL import Image

from mmrl.algorithms.objective import GraphSteps
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import Media
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.planner.new_recipe.model import look_at_model

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402
from tests.support.families import folders, recipe  # noqa: E402, F401

FAMILY = "ltx2_v2v"
OWN = {"guidance_scale": 3.0, "audio_guidance_scale": 5.0, "steps": 2}


def clip(frames=12, side=32, shade=0):
    """A film that grows brighter, at another pace with another ``shade``."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as out:
        stream = out.add_stream("libx264", rate=4)
        stream.width = stream.height = side
        for n in range(frames):
            picture = Image.new("RGB", (side, side), (shade, (20 + (40 + shade) * n) % 256, 200))
            out.mux(stream.encode(av.VideoFrame.from_image(picture)))
        out.mux(stream.encode())
    return Media("video", data=file.getvalue())


@pytest.fixture(scope="module")
def case(folders):
    return contract.Case(recipe(FAMILY, folders, **OWN))


def of_clips(case, media):
    """The slots of ``case`` with other clips, encoded."""
    slots = [replace(s, prompt=replace(s.prompt, media=(media[n // 2],))) for n, s in enumerate(case.slots)]
    case.pipeline.encode(slots)
    return slots


def test_another_clip_changes_what_comes_after_and_the_sound_as_in_the_stock_pipeline(case):
    before, sound, slots = case.drawn(), case.heard["ours"], case.slots
    moves = [clip(), clip(shade=50)]
    try:
        case.slots = of_clips(case, moves)
        ours, theirs = case.drawn(), case.stock(case.pipeline.adapter.pipe)
        first = [case.pipeline.adapter.sources(slot.prompt) for slot in case.slots[::2]]
    finally:
        case.slots = slots
    assert case.gap(ours, theirs) < contract.CLOSE
    for now, then in ((ours[:, 9:], before[:, 9:]), (case.heard["ours"], sound)):
        assert (now - then).abs().flatten(1).amax(1).min() > 10 * contract.CLOSE
    assert [len(frames) for frames in first] == [9, 9]
    greens = [frame.getpixel((0, 0))[1] for frame in first[0]]
    assert greens == pytest.approx([(20 + 40 * n) % 256 for n in range(9)], abs=8), "they follow one another"


def test_the_beginning_stays_and_is_no_part_of_what_is_learnt(case):
    pipeline = case.pipeline
    rows = pipeline.sample(case.slots, case.ids, [0], seed=0)
    source = pipeline.batch_features(case.slots, guided=False)["source"]
    picture, _ = pipeline.adapter.parts(rows.clean)
    assert (source.shape[1:], picture.shape[1:]) == ((3 * 4 * 4, 4), (4 * 4 * 4, 4))
    assert torch.equal(picture[:, : 3 * 4 * 4], source)
    sound = round(13 / 24 * 25)
    assert rows.states.shape[2:] == pipeline.shape == (4 * 4 * 4 + sound * 8,)
    new = pipeline.replay(rows, [0], frozenset({"log_probs"}), case.policy.using)["log_probs"]
    assert torch.equal(new.detach(), rows.log_probs)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"type": "diffusion_nft"}, {"type": "draft", "last_steps": 1}])
def test_other_kinds_of_objective_have_gradients(folders, algorithm):
    made = recipe(FAMILY, folders, lora=False).model_dump(mode="json") | {"algorithm": algorithm}
    case = contract.Case(Recipe.model_validate(made))
    if algorithm["type"] == "draft":
        out = case.pipeline.generate(case.slots, case.ids, GraphSteps(2, 2), 0, frozenset(), case.policy.using)
        assert out["images"].shape[1:] == (13, 3, 32, 32)
        out["images"].sum().backward()
    else:
        rows = case.pipeline.sample(case.slots, case.ids, [], seed=0)
        out = case.pipeline.renoise(rows, 0, 0, frozenset({"target"}), case.policy.using)
        assert out["x_s"].shape[1:] == out["target"].shape[1:] == case.pipeline.shape
        out["v"].square().sum().backward()
    assert [name for name, p in case.policy.trainable.items() if p.grad is None] == []


@pytest.mark.slow
def test_all_weights_train_and_are_exported_whole(folders, tmp_path):
    contract.two_steps_move_every_parameter(recipe(FAMILY, folders, lora=False))
    case = contract.Case(recipe(FAMILY, folders, lora=False, **OWN))
    case.push()
    ours = case.drawn()
    case.pipeline.write(tmp_path / "out", "merged")
    pipe = diffusers.LTX2ConditionPipeline.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert case.gap(ours, case.stock(pipe)) < contract.CLOSE


def test_what_is_refused(folders):
    for family, changes, message in (
        (FAMILY, {"held_frames": None}, r"sampling.held_frames: LTX-2 from a clip: say how many frames"),
        (FAMILY, {"held_frames": 6}, r"sampling.held_frames: 6 is not one more than a multiple of 4, .*; use 9"),
        (FAMILY, {"frames": 9}, r"sampling.frames: 9 frames are those of the prompt's clip .* no other .*; use 13"),
        (FAMILY, {"image_crf": 0}, r"sampling.image_crf: LTX-2 from a clip compresses no pictures; remove image_crf"),
        ("ltx2_i2v", {"held_frames": 5}, r"sampling.held_frames: LTX-2 from a picture: .*; remove held_frames"),
        ("wan_v2v", {"held_frames": 5}, r"sampling.held_frames: Wan video-to-video: .*; remove held_frames"),
    ):
        with pytest.raises(UserError, match=message):
            contract.Case(recipe(family, folders, **changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": 8}, r"its clip has 8 frames, and 9 stay \(sampling.held_frames\); take it out"),
        ({"side": 16}, r"its clip is of 16 x 16 pixels, and 32 x 32 are sampled .*; lower them or take it out"),
    ],
)
def test_another_clip_than_is_needed_is_no_prompt(case, changes, message):
    with pytest.raises(BadPromptError, match=message):
        of_clips(case, [clip(**changes)] * 2)


def test_init_asks_for_no_clips_and_the_card_opens_one(folders, case):
    for edits, named in ((True, "ltx2_i2v"), (False, "ltx2")):
        assert look_at_model(str(folders["ltx2"]), None, edits=edits, algorithm=None).pipeline == f"diffusion/{named}"
    usage = case.pipeline.usage("out", "lora", case.slots[0].prompt)
    assert usage.task == "video-to-video"
    code = usage.code["With diffusers"]
    assert 'conditions=[LTX2VideoCondition(frames=load_video("clip.mp4")[:9])],' in code
    for line in ("import LTX2ConditionPipeline", "import LTX2VideoCondition", "num_frames=13,"):
        assert line in code
    assert "image" not in code

"""Clips that sampling starts from a clip: its noise level, its place in the result, what is refused."""

import io
import json
import shutil
from dataclasses import replace

import pytest
import torch
from PIL import Image

from mmrl.algorithms.objective import GraphSteps
from mmrl.config.loader import load_recipe
from mmrl.config.schema import Recipe
from mmrl.core.errors import BadPromptError, UserError
from mmrl.core.media import Media
from mmrl.core.randomness import noise
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt
from mmrl.planner.new_recipe.model import look_at_model
from mmrl.planner.plan import plan

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402
from tests.support.families import folders, recipe  # noqa: E402, F401
from tests.support.planning import without_the_step  # noqa: E402

FAMILY = "wan_v2v"


def clip(frames=5, side=32, shade=0):
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
    return contract.Case(recipe(FAMILY, folders, guidance_scale=3.0))


def test_sampling_begins_at_the_level_of_the_first_step_that_is_taken(case):
    """Its first state is the noised latent of the clip; skipped steps are neither sampled nor trained."""
    pipeline = case.pipeline
    whole = pipeline.adapter._schedule(3)
    schedule = pipeline.adapter.schedule()
    assert pipeline.steps == len(schedule.timesteps) == 2
    assert torch.equal(schedule.sigmas, whole.sigmas[1:])
    assert pipeline.noisy_steps(0) == [0]
    assert pipeline.renoising.levels == [0]
    rows = pipeline.sample(case.slots, case.ids, [0], seed=0)
    s, source = whole.sigmas[1].item(), pipeline.batch_features(case.slots, guided=False)["source"]
    eps = torch.cat([noise(0, [name], "initial", pipeline.shape) for name in case.ids])
    torch.testing.assert_close(rows.states[:, 0], (1 - s) * source + s * eps)
    assert pipeline.adapter.schedule(10).start == pytest.approx(pipeline.adapter._schedule(10).sigmas[3].item())


def test_another_clip_changes_the_result_as_in_the_stock_pipeline(folders, case):
    still, moves = case.drawn(), [clip(), clip(shade=50)]
    slots = case.slots
    try:
        case.slots = [replace(s, prompt=replace(s.prompt, media=(moves[n // 2],))) for n, s in enumerate(slots)]
        case.pipeline.encode(case.slots)
        ours, theirs = case.drawn(), case.stock(case.pipeline.adapter.pipe)
    finally:
        case.slots = slots
    assert (ours - theirs).abs().max() < contract.CLOSE
    assert (ours - still).abs().flatten(1).amax(1).min() > 100 * contract.CLOSE
    features = [
        case.pipeline.adapter.encode_source(case.pipeline.adapter.sources(Prompt("", "", media=(m,)))) for m in moves
    ]
    assert not torch.equal(features[0]["source"][:, 1], features[1]["source"][:, 1])


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"type": "diffusion_nft"}, {"type": "draft", "last_steps": 1}])
def test_other_kinds_of_objective_have_gradients(folders, algorithm):
    made = recipe(FAMILY, folders, lora=False, steps=5).model_dump(mode="json") | {"algorithm": algorithm}
    case = contract.Case(Recipe.model_validate(made))
    if algorithm["type"] == "draft":
        out = case.pipeline.generate(case.slots, case.ids, GraphSteps(1, 2), 0, frozenset(), case.policy.using)
        out["images"].sum().backward()
    else:
        rows = case.pipeline.sample(case.slots, case.ids, [], seed=0)
        out = case.pipeline.renoise(rows, 0, 0, frozenset({"target"}), case.policy.using)
        assert out["sigma"].max() <= case.pipeline.adapter.schedule().start
        out["v"].square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in case.policy.trainable.values())


def test_what_is_no_strength_is_refused(folders, tmp_path):
    for family, changes, message in (
        (FAMILY, {"strength": None}, r"sampling.strength: Wan video-to-video: say how far .* default is 0.8"),
        ("wan", {"strength": 0.8}, r"sampling.strength: Wan: it starts from noise alone; remove strength"),
    ):
        with pytest.raises(UserError, match=message):
            contract.Case(recipe(family, folders, **changes))
    given = recipe(FAMILY, folders).model_dump(mode="json")
    given["rewards"] = [{"name": "frames", "options": {"name": "jpeg:incompressibility"}}]
    (tmp_path / "recipe.yaml").write_text(json.dumps(given))
    for change, message in (
        ("sampling.strength=0.5", r"sampling.strength: of 3 steps \(sampling.steps\) 0.5 takes 1, and 2 or more are"),
        ("eval.steps=1", r"sampling.strength: of 1 steps \(eval.steps\) 0.7 takes 0, and 1 or more are needed"),
        ("sampling.window={size: 2}", r"sampling.window: 2 steps do not fit into \[0, 1\)"),
        ("algorithm={type: srpo}", r"algorithm.type: srpo trains noise levels of its own, .* to draft"),
    ):
        with pytest.raises(UserError, match=message):
            load_recipe([tmp_path / "recipe.yaml"], [change])
    load_recipe([tmp_path / "recipe.yaml"], ["algorithm={type: draft, last_steps: 1}", "train.group_size=1"])


def test_a_wan_22_is_refused_and_init_asks_for_no_clips(folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders["wan"], folder)
    index = json.loads((folder / "model_index.json").read_text())
    for name, value in (("boundary_ratio", 0.875), ("expand_timesteps", True)):
        (folder / "model_index.json").write_text(json.dumps(index | {name: value}))
        with pytest.raises(UserError, match=rf"says {name}: (0.875|true), which is of another kind .* give one that"):
            contract.Case(recipe(FAMILY, {FAMILY: folder}))
    for edits in (True, False):
        assert look_at_model(str(folders["wan"]), None, edits=edits, algorithm=None).pipeline == "diffusion/wan"
    (folder / "model_index.json").write_text(json.dumps(index | {"_class_name": "WanVideoToVideoPipeline"}))
    assert look_at_model(str(folder), None, edits=True, algorithm=None).pipeline == f"diffusion/{FAMILY}"


def test_the_card_opens_a_clip(case):
    usage = case.pipeline.usage("out", "lora", case.slots[0].prompt)
    code = usage.code["With diffusers"]
    assert 'video=load_video("clip.mp4")[:5],' in code
    assert "strength=0.7," in code
    assert "num_frames" not in code
    assert usage.task == "video-to-video"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"frames": 3}, r"its clip has 3 frames, and 5 train \(sampling.frames\); take it out"),
        ({"side": 16}, r"its clip is of 16 x 16 pixels, and 32 x 32 are sampled .*; lower them or take it out"),
    ],
)
def test_another_clip_than_is_sampled_is_no_prompt(case, changes, message):
    bad = replace(case.slots[0], prompt=replace(case.slots[0].prompt, id="bad", media=(clip(**changes),)))
    with pytest.raises(BadPromptError, match=message):
        case.pipeline.encode([bad])


def test_the_plan_counts_the_steps_that_are_taken_and_refuses_such_clips(folders, tmp_path):
    made = recipe(FAMILY, folders).model_dump(mode="json")
    made["rewards"] = [{"name": "frames", "options": {"name": "jpeg:incompressibility"}}]
    given = {"path": "clips.jsonl", "heldout": 0}
    made["data"] = {"name": "jsonl", "train": given, "heldout": given}
    (tmp_path / "recipe.yaml").write_text(json.dumps(made))
    found = []
    for name, media in {"none": None, "small": clip(side=16), "right": clip()}.items():
        record = {"prompt": "it moves"}
        if media is not None:
            (tmp_path / f"{name}.mp4").write_bytes(media.data)
            record["video"] = f"{name}.mp4"
        (tmp_path / "clips.jsonl").write_text("".join(json.dumps(record | {"id": str(n)}) + "\n" for n in range(2)))
        with without_the_step():
            found.append(plan(load_recipe([tmp_path / "recipe.yaml"], [])))
    none, small, right = (" ".join(one.problems) for one in found)
    assert "has 0 media; give every prompt the one clip that it starts from" in none
    assert "its clip is of 16 x 16 pixels, and 32 x 32 are sampled" in small
    assert "media" not in right
    assert "clip" not in right
    assert found[-1].counts.sampling_forwards == 2 * found[-1].counts.micro_batches

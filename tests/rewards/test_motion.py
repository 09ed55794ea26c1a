"""Clips of moving shapes: what is drawn, and that the verifier tells a motion from what only looks like one."""

import io
import random
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import mmrl
from mmrl.app.trainer import Trainer
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from mmrl.core.media import Media, open_image
from mmrl.core.signals import Stop
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.logging.metrics import read
from mmrl.logging.rundir import RunDir

motions = mmrl.load("datasets", "motions")
motion = mmrl.load("rewards", "motion")


BACK = motions.BACKGROUND


def png(image):
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def sample(prompt, frames):
    return Sample(prompt, SampleId(0, 0, 0, 0), video=tuple(frames))


def one(prompt, frames, reward=motion.score):
    return {part: values[0] for part, values in reward([sample(prompt, frames)]).items()}


def test_held_out_pairs_are_not_trained_on_and_every_word_is():
    train, heldout = motions.prompts("train"), motions.prompts("heldout")
    assert (len(train), len(heldout), len(motions.prompts("all"))) == (60, 20, 80)
    assert not {p.text for p in train} & {p.text for p in heldout}
    assert not {p.text.rsplit(" ", 1)[0] for p in train} & {p.text.rsplit(" ", 1)[0] for p in heldout}
    assert {w for p in train for w in p.text.split()} == {w for p in heldout for w in p.text.split()}
    with pytest.raises(UserError, match="'train', 'heldout' and 'all'"):
        motions.prompts("test")


def test_drawn_clips_succeed_and_under_another_direction_they_do_not():
    prompts = motions.prompts("all")
    rng = random.Random(0)
    for prompt in prompts:
        frames = motions.frames(prompt, rng)
        assert len(frames) == 5
        assert one(prompt, frames) == {"score": 1.0, "success": 1.0, "direction": 1.0, "seen": 1.0}
        assert one(prompt, frames, motion.looks)["success"] == 1.0
        for other in (o for o in prompts if o.text.rsplit(" ", 1)[0] == prompt.text.rsplit(" ", 1)[0]):
            if other is not prompt:
                assert one(other, frames)["score"] == 0.0


def test_what_only_resembles_the_motion_is_no_success():
    prompt = next(p for p in motions.prompts("train") if p.meta["direction"] == "right")
    frames = motions.frames(prompt, random.Random(1))
    assert one(prompt, frames[:1] * 5)["score"] == 0.0  # it stands
    assert one(prompt, frames[::-1])["score"] == 0.0
    shuffled = one(prompt, [frames[i] for i in (0, 3, 1, 2, 4)])
    assert (shuffled["success"], shuffled["direction"]) == (0.0, 1.0)  # it turns back on its way
    empty = Image.new("RGB", frames[0].size, tuple(prompt.meta["background"]))
    gone = one(prompt, [*frames[:2], empty, *frames[3:]])
    assert (gone["success"], gone["seen"]) == (0.0, 0.8)
    assert gone["direction"] == pytest.approx(0.8)
    assert one(prompt, [empty] * 5) == {"score": 0.0, "success": 0.0, "direction": 0.0, "seen": 0.0}
    flood = [Image.new("RGB", f.size, tuple(prompt.meta["palette"][prompt.meta["colour"]])) for f in frames]
    assert one(prompt, flood)["seen"] == 0.0
    noise = np.random.default_rng(0).integers(0, 255, (5, 32, 32, 3), np.uint8)
    assert one(prompt, [Image.fromarray(f) for f in noise])["score"] == 0.0


def test_the_colour_has_to_be_the_prompts_and_the_kind_is_seen_by_looks():
    prompts = motions.prompts("all")
    circle = next(p for p in prompts if p.meta["kind"] == "circle")
    for other in prompts:
        if other.meta["direction"] != circle.meta["direction"] or other is circle:
            continue
        frames = motions.frames(other, random.Random(2))
        same = other.meta["colour"] == circle.meta["colour"]
        assert one(circle, frames)["seen"] == (1.0 if same else 0.0), other.text
        assert one(circle, frames, motion.looks)["success"] == 0.0


def test_what_changes_or_jumps_is_not_steady():
    prompts = motions.prompts("train")
    circle = next(p for p in prompts if p.meta["kind"] == "circle")
    triangle = replace(circle, meta={**circle.meta, "kind": "triangle"})
    frames = motions.frames(circle, random.Random(4))
    for prompt in prompts:
        drawn = one(prompt, motions.frames(prompt, random.Random(5)), motion.steady)
        assert min(drawn["identity"] - 0.7, drawn["smooth"] - 0.9) > 0, (prompt.text, drawn)
    steady = one(circle, frames, motion.steady)
    assert one(circle, frames[:1] * 5, motion.steady) == {"score": 1.0, "identity": 1.0, "smooth": 1.0}
    changed = one(circle, [frames[0], *motions.frames(triangle, random.Random(4))[1:]], motion.steady)
    assert changed["identity"] < steady["identity"] - 0.2
    assert changed["smooth"] > 0.8
    jumped = one(circle, [frames[0], frames[0], frames[0], frames[0], frames[4]], motion.steady)
    assert jumped["smooth"] < 0.3
    assert jumped["identity"] == pytest.approx(steady["identity"], abs=0.1)
    empty = Image.new("RGB", frames[0].size, tuple(circle.meta["background"]))
    assert one(circle, [empty, *frames[1:]], motion.steady)["score"] == 0.0
    gone = one(circle, [*frames[:4], empty], motion.steady)
    assert gone["identity"] == pytest.approx(0.8 * steady["identity"], abs=0.05)
    small = replace(circle, media=(Media("image", data=png(frames[0].resize((24, 24)))),))
    assert one(small, frames, motion.steady)["identity"] > 0.7  # the picture is of another size


def test_a_prompt_has_first_frames_of_its_own():
    plain, many = motions.prompts("heldout"), motions.prompts("heldout", pictures=3)
    assert [p.text for p in many] == [p.text for p in plain] * 3
    assert len({p.id for p in many}) == len({p.media[0].data for p in many}) == len(many)
    assert many[:20] == motions.prompts("heldout", pictures=1), "more pictures begin with the fewer"
    for prompt in many:
        assert (
            motion.place(open_image(prompt.media[0]), prompt.meta["palette"][prompt.meta["colour"]], BACK) is not None
        )
    with pytest.raises(UserError, match="how many first frames"):
        motions.prompts(pictures=-1)


def test_sizes_and_shifts_of_brightness_do_not_matter():
    prompt = motions.prompts("heldout")[3]
    frames = motions.frames(prompt, random.Random(3))
    large = [f.resize((96, 96), Image.Resampling.BICUBIC) for f in frames]
    assert one(prompt, large)["success"] == 1.0
    brighter = [Image.fromarray(np.clip(np.asarray(f, int) + 12, 0, 255).astype(np.uint8)) for f in frames]
    assert one(prompt, brighter)["success"] == 1.0


def test_samples_it_cannot_judge_are_refused():
    prompt = motions.prompts("train")[0]
    with pytest.raises(ValueError, match="needs a clip of two frames"):
        motion.score([Sample(prompt, SampleId(0, 0, 0, 0))])
    with pytest.raises(ValueError, match=r"needs colour.*data set 'motions'"):
        motion.score([sample(Prompt("x", "x"), motions.frames(prompt, random.Random(0)))])


@pytest.mark.slow
def test_the_shipped_model_draws_the_colour_it_is_told_and_a_step_of_rl_starts_from_ratio_one(tmp_path):
    small = ["train.steps=1", "train.prompts_per_step=2", "train.group_size=4", "train.micro_batch_size=8"]
    loaded = load_recipe(["moving-shapes"], [*small, "eval={every: 1, samples: 100, grid: 2}"])
    with RunDir.create(tmp_path / "run") as directory:
        Trainer(loaded, directory).begin(Stop(), resume=False)
    before = read(tmp_path / "run" / "heldout.jsonl")[0]
    assert before["reward/motion/seen"] > 0.5
    assert 0 < before["reward/motion/direction"] < 0.8
    (step,) = read(tmp_path / "run" / "metrics.jsonl")
    assert step["policy/first_ratio_max_dev"] <= 1e-5
    assert step["optim/grad_norm"] > 0

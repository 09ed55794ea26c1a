"""A reward of pictures asked about the frames of a clip."""

import numpy as np
import pytest
from PIL import Image

import mmrl
from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context, Failed
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.scoring import RewardSet

frames = mmrl.load("rewards", "frames")
BRIGHT = "colour:brightness"
HALF = """
def score(samples, *, context):
    return {"a": [None if s.image.getpixel((0, 0))[0] == 0 else 1.0 for s in samples], "b": [0.0 for s in samples]}
"""


def clip(*levels):
    video = tuple(Image.fromarray(np.full((8, 8, 3), level, np.uint8)) for level in levels)
    return Sample(Prompt("p", "p"), SampleId(0, 0, 0, 0), video=video)


def test_the_mean_of_frames_at_even_distances():
    clips = [clip(0, 51, 102, 153, 204), clip(*[255] * 5)]
    for count, expected in ((5, [0.4, 1.0]), (2, [0.4, 1.0]), (1, [0.0, 1.0]), (3, [0.4, 1.0])):
        assert frames.Frames(BRIGHT, count).score(clips, context=Context()) == pytest.approx(expected)
    assert frames.Frames(BRIGHT, 2).score([clip(51, 0, 0)], context=Context()) == pytest.approx([0.1])


def test_parts_are_averaged_and_a_frame_that_fails_fails_its_clip(tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text(HALF)
    monkeypatch.chdir(tmp_path)
    made = frames.Frames("half.py", 2).score([clip(9, 9), clip(9, 0)], context=Context())
    assert made[0] == 0.5
    assert isinstance(made[1], Failed)


def test_a_reward_that_is_awaited_is_asked_about_frames_too(tmp_path, monkeypatch):
    (tmp_path / "half.py").write_text(HALF.replace("def score", "async def score"))
    monkeypatch.chdir(tmp_path)
    rewards = RewardSet(
        [Reward(name="frames", options={"name": str(tmp_path / "half.py"), "count": 2}, on_failure="drop")]
    )
    found = rewards.score([clip(9, 9), clip(9, 0)], [[0, 1]])
    rewards.close()
    assert found.parts["frames"][0] == 0.5
    assert len(found.failures) == 1


def test_rewards_of_another_kind_are_refused():
    with pytest.raises(UserError, match="reads pictures one by one, and motion is another"):
        frames.Frames("motion")
    with pytest.raises(UserError, match="count is 0"):
        frames.Frames(BRIGHT, 0)


def test_the_models_of_the_inner_reward_are_the_plans():
    models = mmrl.load("rewards", "frames").Frames.__mmrl_reward__.models
    assert [w.path for w in models({"name": "pickscore"})] == ["yuvalkirstain/PickScore_v1"]
    assert list(models({"name": BRIGHT})) == []

"""VBench's measures of steadiness: closed forms, and small models of the real classes against the library."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import mmrl
from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context, Failed
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from mmrl.rewards.scoring import RewardSet
from tests.support import asleep, tiny

allow_cpu_only()  # before transformers imports torchvision
REPO = Path(__file__).resolve().parents[2]
vbench = mmrl.load("rewards", "vbench")


def clip(*frames, k=0):
    return Sample(Prompt("p", "p"), SampleId(0, 0, 0, k), video=frames)


def grey(level):
    return Image.fromarray(np.full((8, 8, 3), level, np.uint8))


def noise(seed, n=4):
    rng = np.random.default_rng(seed)
    small = [Image.fromarray(rng.integers(0, 256, (4, 5, 3), dtype=np.uint8)) for _ in range(n)]
    return [frame.resize((32, 32), Image.Resampling.BICUBIC) for frame in small]


def test_flicker_is_the_mean_difference_of_neighbours():
    clips = [clip(grey(0), grey(51), grey(0)), clip(*[grey(9)] * 3), clip(grey(0), grey(255)), clip(grey(3))]
    found = vbench.flicker(clips)
    assert found[:3] == pytest.approx([0.8, 1.0, 0.0])
    assert isinstance(found[3], Failed)


def test_consistency_is_of_the_frame_before_and_of_the_first():
    root = 0.5**0.5
    features = np.array([[2.0, 0], [root, root], [0, 3.0], [-1.0, 0]])
    # before: cos 45, cos 45, 0; first: cos 45, 0, max(-1, 0)
    assert vbench.consistency(features) == pytest.approx((root + root + 0 + root + 0 + 0) / 6)
    assert vbench.consistency(np.array([[1.0, 2], [2, 4]])) == pytest.approx(1.0)


@pytest.fixture(scope="module")
def dino(tmp_path_factory):
    return str(tiny.eyes(tmp_path_factory.mktemp("dino")))


def by_hand(features):
    """VBench's loop over frames."""
    f, sums = torch.nn.functional.normalize(features.double(), dim=-1), 0.0
    for i in range(1, len(f)):
        sums += (max(0.0, float(f[i - 1] @ f[i])) + max(0.0, float(f[0] @ f[i]))) / 2
    return sums / (len(f) - 1)


def test_subject_is_of_the_class_token_and_a_frame_alone_fails(dino, monkeypatch):
    from transformers import ViTImageProcessor, ViTModel

    monkeypatch.setattr(vbench, "AT_ONCE", 3)  # a clip's frames are in two passes
    made = [clip(*noise(0)), clip(grey(1), k=1), clip(*noise(1, 5), k=2), clip(*[noise(2, 1)[0]] * 2, k=3)]
    rewards = RewardSet([Reward(name="vbench:subject", options={"path": dino}, on_failure="drop")])
    answer = rewards.answer(rewards.labels[0], made, 0)
    model, images = ViTModel.from_pretrained(dino).eval(), ViTImageProcessor.from_pretrained(dino)
    expected = []
    for n in (0, 2):
        with torch.no_grad():
            seen = model(**images(list(made[n].video), return_tensors="pt")).last_hidden_state[:, 0]
        expected.append(by_hand(seen))
    assert [answer.total[0], answer.total[2]] == pytest.approx(expected, abs=1e-5)
    assert answer.total[3] == pytest.approx(1.0, abs=1e-6)
    assert answer.reasons[1] == "a clip of one frame has nothing to compare"
    assert all(0.01 < value < 0.99 for value in expected)


def test_background_is_of_clips_image_features(dino, tmp_path):
    from transformers import CLIPModel, CLIPProcessor

    folder = str(tiny.clip(tmp_path / "clip"))
    made = clip(*noise(3))
    (found,) = vbench.Background(folder).score([made], context=Context())
    model, processor = CLIPModel.from_pretrained(folder).eval(), CLIPProcessor.from_pretrained(folder)
    pixels = processor.image_processor(list(made.video), return_tensors="pt")["pixel_values"]
    with torch.no_grad():
        seen = model(input_ids=torch.tensor([[1, 2]]), pixel_values=pixels).image_embeds
    assert found == pytest.approx(by_hand(seen), abs=1e-5)
    with pytest.raises(UserError, match="is no CLIP model"):
        vbench.Background(dino)
    with pytest.raises(UserError, match=r"cannot load a vision transformer .* options\.path"):
        vbench.Subject(str(tmp_path / "nowhere"))


def test_each_sleeps_whole_and_scores_the_same(dino, tmp_path, monkeypatch):
    clips = [clip(*noise(0)), clip(*noise(1), k=1)]
    for reward in (vbench.Subject(dino), vbench.Background(str(tiny.clip(tmp_path)))):
        with monkeypatch.context() as only:
            asleep.scores_the_same(reward, lambda one=reward: one.score(clips, context=Context()), only)

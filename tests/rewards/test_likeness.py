"""Likeness to given pictures: the library's embeddings, the nearest ones, copies, and folders that are no style."""

from types import SimpleNamespace

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support import asleep, tiny
from tests.support.tiny_diffusion import SHAPES

allow_cpu_only()  # before transformers imports torchvision

likeness = mmrl.load("rewards", "likeness")
SCENES = SHAPES.parents[2] / "vlm" / "models" / "scenes-vl"


def picture(seed, side=40):
    """A square on a ground, both of colours of their own."""
    shown = Image.new("RGB", (side, side), ((70 * seed) % 256, (110 * seed) % 256, (30 * seed) % 256))
    shown.paste(((50 * seed + 90) % 256, (200 * seed) % 256, 120), (seed, 5, seed + 14, 30))
    return shown


def saved(folder, count=6):
    folder.mkdir(parents=True, exist_ok=True)
    for n in range(count):
        picture(n).save(folder / f"{n}.png")
    return folder


def dino(folder):
    from transformers import BitImageProcessor, Dinov2Config, Dinov2Model

    torch.manual_seed(0)
    model = Dinov2Model(Dinov2Config(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, image_size=28))
    model.save_pretrained(folder)
    BitImageProcessor(size={"shortest_edge": 28}, crop_size={"height": 28, "width": 28}).save_pretrained(folder)
    return folder


def scored(reward, pictures):
    parts = reward.score([SimpleNamespace(image=one) for one in pictures], context=Context())
    return {name: torch.tensor(part) for name, part in parts.items()}


def of_clip(folder, pictures):
    from transformers import CLIPModel, CLIPProcessor

    processor = CLIPProcessor.from_pretrained(folder)
    inputs = processor(text=["a"] * len(pictures), images=pictures, return_tensors="pt")
    return CLIPModel.from_pretrained(folder, dtype=torch.float32)(**inputs).image_embeds


def of_dino(folder, pictures):
    from transformers import AutoImageProcessor, AutoModel

    inputs = AutoImageProcessor.from_pretrained(folder)(pictures, return_tensors="pt")
    return AutoModel.from_pretrained(folder, dtype=torch.float32)(**inputs).pooler_output


def of_scenes(folder, pictures):
    """Each picture by itself."""
    from transformers import AutoImageProcessor, Qwen2_5_VLForConditionalGeneration

    tower = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).model.visual
    made = [AutoImageProcessor.from_pretrained(folder)([one], return_tensors="pt") for one in pictures]
    found = [tower(one["pixel_values"], grid_thw=one["image_grid_thw"]) for one in made]
    return torch.stack([getattr(one, "pooler_output", one).mean(0) for one in found])


@pytest.mark.parametrize(
    ("make", "embed"),
    [(tiny.clip, of_clip), (dino, of_dino), (lambda _: SCENES, of_scenes)],
    ids=["clip", "dino", "vision-language"],
)
@pytest.mark.parametrize("nearest", [1, 3, None])
def test_it_is_the_mean_cosine_with_the_nearest(tmp_path, make, embed, nearest):
    path = make(tmp_path / "model")
    reward = likeness.Likeness(str(saved(tmp_path / "mine")), str(path), nearest, None, "float32")
    shown = [picture(n, 50) for n in (9, 11, 13)]
    with torch.no_grad():
        a, b = (embed(path, [*pictures]).double() for pictures in (shown, [picture_at(m) for m in reward.given]))
    cosines = torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=-1)
    best = cosines.sort(dim=1, descending=True).values[:, :nearest]
    found = scored(reward, shown)
    torch.testing.assert_close(found["score"].double(), best.mean(1), rtol=0, atol=2e-5)  # other batch shapes
    torch.testing.assert_close(found["nearest"].double(), best[:, 0], rtol=0, atol=2e-5)  # other batch shapes
    assert not found["copied"].any()


def picture_at(medium):
    return Image.open(medium.path).convert("RGB")


def test_a_copy_is_counted_and_earns_less_than_what_is_alike(tmp_path):
    path, folder = tiny.clip(tmp_path / "model"), saved(tmp_path / "mine")
    plain = likeness.Likeness(str(folder), str(path), 3, None, "float32")
    shown = [picture_at(plain.given[2]), picture(9), picture(13)]
    free = scored(plain, shown)
    bound = (free["nearest"][1:].max().item() + 1) / 2
    guarded = scored(likeness.Likeness(str(folder), str(path), 3, bound, "float32"), shown)
    assert guarded["copied"].tolist() == [1, 0, 0]
    assert guarded["score"][1:].tolist() == free["score"][1:].tolist()
    assert guarded["score"][0].item() == pytest.approx(free["score"][0].item() - 1, abs=1e-3)
    assert guarded["score"].argmin() == 0
    half = likeness.Likeness(str(folder), str(path), 3, 2 * free["nearest"][1].item() - 1, "float32")
    assert scored(half, shown)["score"][1].item() == pytest.approx(free["score"][1].item() - 0.5, abs=1e-3)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_it_sleeps_whole_and_scores_the_same(tmp_path, monkeypatch):
    reward = likeness.Likeness(str(saved(tmp_path / "mine")), str(tiny.clip(tmp_path / "model")), dtype="float32")
    asleep.scores_the_same(reward, lambda: scored(reward, [picture(9)])["score"].tolist(), monkeypatch)


def test_pictures_that_cannot_be_read_are_counted_and_named(tmp_path):
    folder = saved(tmp_path / "mine")
    (folder / "broken.png").write_bytes(b"no picture")
    (folder / "notes.txt").write_text("not looked at")
    with pytest.warns(likeness.LeftOut, match=r"1 of 7 pictures cannot be read and are left out: .*broken\.png"):
        assert len(likeness.readable(folder)) == 6


def test_three_pictures_are_no_style(tmp_path):
    with pytest.warns(likeness.LeftOut, match="has 3 pictures: likeness to so few .* add more"):
        likeness.readable(saved(tmp_path / "mine", 3))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pictures": "gone"}, "options.pictures: .*gone is no folder"),
        ({"pictures": "empty"}, "empty has no picture that can be read; put some into it"),
        ({"pictures": "broken"}, r"broken has no picture that can be read: a\.png"),
        ({"nearest": 0}, "options.nearest is 0"),
        ({"copy_above": 1.0}, "options.copy_above is 1.0"),
        ({"dtype": "int8"}, "options.dtype is 'int8'"),
        ({"path": "empty"}, "cannot load a vision model from .*empty"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, options, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "a.png").write_bytes(b"no picture")
    saved(tmp_path / "mine")
    for key in {"pictures", "path"} & options.keys():
        options = options | {key: str(tmp_path / options[key])}
    with pytest.raises(UserError, match=message):
        likeness.Likeness(**{"pictures": str(tmp_path / "mine"), "path": str(SCENES), **options})

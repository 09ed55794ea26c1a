"""Rewards that are checkpoints of others: the same number as their authors' formula, written down here once more."""

import functools
import os
import pickle
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, interpolate, layer_norm, linear

from mmrl.config.schema import Reward
from mmrl.core.errors import UserError
from mmrl.core.reward_contract import Context
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Sample
from mmrl.rewards.checkpoints import read_tensors
from mmrl.rewards.hpsv2 import letterboxed
from mmrl.rewards.loading import build, find
from mmrl.rewards.scoring import RewardSet
from tests.support import asleep
from tests.support.reward_models import HEAD, OpenCLIP, head, made, samples  # noqa: F401

allow_cpu_only()  # before transformers imports torchvision
REPO = Path(__file__).resolve().parents[2]
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


def reward(name, options):
    return build(find(name), options).call


def rated(tensors, prefix, x):
    for index, _ in HEAD:
        x = linear(x, tensors[f"{prefix}{index}.weight"], tensors[f"{prefix}{index}.bias"])
    return x[:, 0]


class Blip:
    """ImageReward's forward, from its weights by their own names; attention heads are 64 wide."""

    def __init__(self, tensors):
        self.t = tensors

    def at(self, name, x):
        return linear(x, self.t[f"{name}.weight"], self.t[f"{name}.bias"])

    def norm(self, name, x, eps):
        return layer_norm(x, x.shape[-1:], self.t[f"{name}.weight"], self.t[f"{name}.bias"], eps)

    @staticmethod
    def attend(q, k, v, keep=None):
        q, k, v = (x.unflatten(-1, (-1, 64)).transpose(1, 2) for x in (q, k, v))
        scores = q @ k.transpose(-1, -2) / 8
        scores = scores if keep is None else scores + (1 - keep[:, None, None, :].float()) * -10000.0
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)

    def see(self, pixels):
        v = "blip.visual_encoder"
        x = nn.functional.conv2d(
            pixels, self.t[f"{v}.patch_embed.proj.weight"], self.t[f"{v}.patch_embed.proj.bias"], stride=8
        )
        x = torch.cat([self.t[f"{v}.cls_token"].expand(len(x), -1, -1), x.flatten(2).mT], 1) + self.t[f"{v}.pos_embed"]
        for i in range(2):
            b = f"{v}.blocks.{i}"
            q, k, value = self.at(f"{b}.attn.qkv", self.norm(f"{b}.norm1", x, 1e-6)).chunk(3, -1)
            x = x + self.at(f"{b}.attn.proj", self.attend(q, k, value))
            x = x + self.at(f"{b}.mlp.fc2", gelu(self.at(f"{b}.mlp.fc1", self.norm(f"{b}.norm2", x, 1e-6))))
        return self.norm(f"{v}.norm", x, 1e-6)

    def score(self, pixels, ids, keep):
        seen, e = self.see(pixels), "blip.text_encoder.embeddings"
        x = self.t[f"{e}.word_embeddings.weight"][ids] + self.t[f"{e}.position_embeddings.weight"][: ids.shape[1]]
        x = self.norm(f"{e}.LayerNorm", x, 1e-12)
        for i in range(2):
            b = f"blip.text_encoder.encoder.layer.{i}"
            for kind, source, mask in (("attention", None, keep), ("crossattention", seen, None)):
                a, other = f"{b}.{kind}", x if source is None else source
                q, k, v = (self.at(f"{a}.self.{n}", y) for n, y in (("query", x), ("key", other), ("value", other)))
                x = self.norm(
                    f"{a}.output.LayerNorm", x + self.at(f"{a}.output.dense", self.attend(q, k, v, mask)), 1e-12
                )
            y = self.at(f"{b}.output.dense", gelu(self.at(f"{b}.intermediate.dense", x)))
            x = self.norm(f"{b}.output.LayerNorm", x + y, 1e-12)
        return (rated(self.t, "mlp.layers.", x[:, 0]) - 0.16717362830052426) / 1.0333394966054072


NAMES = ("clip", "pickscore", "aesthetic", "hpsv2", "imagereward")


@functools.cache
def loaded(name, options):
    return RewardSet([Reward(name=name, options=dict(options))])


def values(name, options, given):
    scores = loaded(name, tuple(options.items())).score(given, [list(range(len(given)))])
    assert not scores.failures
    return scores.total


def test_aesthetic_is_the_linear_head_over_the_normalised_embedding(made):
    from transformers import CLIPModel, CLIPProcessor

    clip = made["aesthetic"]["clip"]
    model, processor = CLIPModel.from_pretrained(clip).eval(), CLIPProcessor.from_pretrained(clip)
    inputs = processor(text=["a"] * 4, images=[s.image for s in samples()], return_tensors="pt")
    with torch.no_grad():
        embedded = model(**inputs).image_embeds
        assert embedded.norm(dim=-1).sub(1).abs().max() < 1e-5
        expected = rated(torch.load(made["aesthetic"]["path"], weights_only=True), "layers.", embedded)
    assert expected.std() > 0.001
    torch.testing.assert_close(
        values("aesthetic", made["aesthetic"], samples()), expected.double(), rtol=1e-5, atol=1e-5
    )


def letterbox_by_hand(image, size=32):
    x = torch.from_numpy(np.array(image, dtype=np.float32) / 255).permute(2, 0, 1)
    height, width = x.shape[1:]
    to = (size, round(size * width / height)) if height > width else (round(size * height / width), size)
    x = interpolate(x[None], to, mode="bicubic", antialias=True)[0]
    square = torch.zeros(3, size, size)
    top, left = (size - to[0]) // 2, (size - to[1]) // 2
    square[:, top : top + to[0], left : left + to[1]] = x
    return (square - torch.tensor(MEAN)[:, None, None]) / torch.tensor(STD)[:, None, None]


@pytest.mark.parametrize("size", [(60, 48), (30, 70), (32, 32), (32, 20)])
def test_hpsv2_is_openclips_cosine_of_the_letterboxed_picture(size, made):
    from transformers import CLIPTokenizer

    model = OpenCLIP()
    model.load_state_dict(torch.load(made["hpsv2"]["path"], weights_only=True)["state_dict"])
    given = samples(size)
    tokens = CLIPTokenizer.from_pretrained(made["hpsv2"]["base"])
    ids = [tokens(s.prompt.text, truncation=True, max_length=16)["input_ids"] for s in given]
    ids = torch.tensor([row + [0] * (16 - len(row)) for row in ids])
    with torch.no_grad():
        expected = (model.picture(torch.stack([letterbox_by_hand(s.image) for s in given])) * model.text(ids)).sum(-1)
    assert expected.std() > 0.05
    torch.testing.assert_close(values("hpsv2", made["hpsv2"], given), expected.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", [(60, 48), (31, 97), (500, 20)])
def test_a_letterboxed_picture_is_torchvisions(size):
    vision = pytest.importorskip("torchvision.transforms.functional")
    picture = vision.to_tensor(samples(size)[0].image)
    scale = 224 / max(size)
    to = [round(n * scale) for n in picture.shape[1:]]
    expected = vision.resize(picture, to, vision.InterpolationMode.BICUBIC, antialias=True)
    high, wide = 224 - to[0], 224 - to[1]
    expected = vision.pad(expected, [wide // 2, high // 2, wide - wide // 2, high - high // 2], fill=0)
    torch.testing.assert_close(letterboxed(picture, 224), expected, rtol=0, atol=1e-6)


def test_imagereward_is_the_authors_forward(made):
    from transformers import BertTokenizer, CLIPImageProcessor

    options, given = made["imagereward"], samples()
    tensors = torch.load(options["path"], weights_only=True)
    tokens = BertTokenizer.from_pretrained(options["tokenizer"])(
        [s.prompt.text for s in given], padding="max_length", truncation=True, max_length=35, return_tensors="pt"
    )
    images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    pixels = images([s.image for s in given], return_tensors="pt")["pixel_values"]
    expected = Blip(tensors).score(pixels, tokens["input_ids"], tokens["attention_mask"])
    assert expected.std() > 0.01
    assert 0 < tokens["attention_mask"].float().mean() < 1
    torch.testing.assert_close(values("imagereward", options, given), expected.double(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_scores_as_one_by_one_and_any_size_does(name, made):
    given = samples()
    together = values(name, made[name], given)
    apart = torch.cat([values(name, made[name], [one]) for one in given])
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-5)
    mixed = [samples((20, 50))[0], samples((64, 33))[1]]
    torch.testing.assert_close(
        values(name, made[name], mixed),
        torch.cat([values(name, made[name], [one]) for one in mixed]),
        rtol=1e-5,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", NAMES)
def test_the_pathwise_form_is_the_same_number_where_nothing_is_resized(name, made):
    given = samples((32, 32), gradient=True)
    rewards = RewardSet([Reward(name=f"{name}:pathwise", options=made[name])])
    gradient = rewards.weighted(rewards.gradient_parts(given))
    scored = values(name, made[name], given)
    if name == "clip":
        gradient, scored = gradient[scored > 0], scored[scored > 0]  # its score alone is clamped
    torch.testing.assert_close(gradient.detach().double(), scored, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_is_that_of_finite_differences(name, made):
    call = reward(f"{name}:pathwise", made[name])
    for module in vars(call.__self__).values():
        if isinstance(module, nn.Module):
            module.double()
    given = samples((40, 36), gradient=True, dtype=torch.float64)

    def total(pictures):
        changed = [Sample(s.prompt, s.id, s.image, x) for s, x in zip(given, pictures, strict=True)]
        return call(changed, context=Context())

    pictures = [s.tensor.detach() * 0.8 + 0.1 for s in given]  # away from 0 and 1, where they are clamped
    for x in pictures:
        x.requires_grad_(True)
    total(pictures).sum().backward()
    generator = torch.Generator().manual_seed(0)
    ways = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for x in pictures]
    with torch.no_grad():
        ahead, back = (total([x + step * way for x, way in zip(pictures, ways, strict=True)]) for step in (1e-6, -1e-6))
    along = torch.stack([(x.grad * way).sum() for x, way in zip(pictures, ways, strict=True)])
    assert along.abs().min() > 1e-6
    torch.testing.assert_close(along, (ahead - back) / 2e-6, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_in_bfloat16_the_scores_are_float32_and_near(name, made):
    """Within a tenth of the scores' own deviation and one rounding of a score; the gradient has float32's direction."""
    scores, gradients = {}, {}
    for dtype in ("float32", "bfloat16"):
        given = samples((32, 32), gradient=True)
        call = reward(f"{name}:pathwise", made[name] | {"dtype": dtype})
        with torch.autocast("cpu", dtype=torch.float16):  # what is on outside does not count
            out = call(given, context=Context())
        assert out.dtype == torch.float32
        out.sum().backward()
        scores[dtype], gradients[dtype] = out.detach(), torch.cat([s.tensor.grad.flatten() for s in given])
    off = (scores["bfloat16"] - scores["float32"]).abs().max()
    assert 0 < off < 0.1 * scores["float32"].std() + scores["float32"].abs().max() / 2**9
    assert torch.nn.functional.cosine_similarity(*gradients.values(), dim=0) > 0.99


def test_a_dtype_that_there_is_not_is_refused_before_a_model_is_loaded():
    for name in NAMES:
        with pytest.raises(UserError, match="set it to auto, float32 or bfloat16"):
            reward(name, {"path": "nowhere", "dtype": "float16"})


class Harm:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def bad_files(folder, good):
    tensors = torch.load(good, weights_only=True)
    fewer = {k: v for k, v in tensors.items() if not k.startswith(("layers.6", "layers.7"))}
    torch.save({**tensors, "extra": Harm()}, folder / "harm.pth")
    (folder / "old.pth").write_bytes(pickle.dumps(Harm()))
    torch.save(fewer, folder / "fewer.pth")
    torch.save(tensors | {"layers.9.weight": torch.zeros(2)}, folder / "more.pth")
    torch.save(tensors | {"layers.2.weight": torch.zeros(3, 4)}, folder / "shape.pth")
    torch.save([1, 2], folder / "list.pth")
    (folder / "torn.pth").write_bytes(Path(good).read_bytes()[:5000])
    (folder / "text.pth").write_text("<html>not found</html>")
    (folder / "empty.pth").write_bytes(b"")
    (folder / "torn.safetensors").write_bytes(b"nonsense" * 9)
    with zipfile.ZipFile(folder / "zip.pth", "w") as z:
        z.writestr("readme", "no tensors")


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("harm.pth", r"is refused: beside tensors it asks for posix\.mkdir.*save_file and set options\.path"),
        ("old.pth", r"cannot be read as a checkpoint"),
        ("fewer.pth", r"it lacks 6\.weight, 6\.bias, 7\.weight and 1 more\. Set options\.path"),
        ("more.pth", r"it has besides 9\.weight\. Set options\.path"),
        ("shape.pth", r"it has in another shape 2\.weight \[3, 4\] for \[128, 1024\]"),
        ("list.pth", r"holds no state dict \(tensors by name\) but a list"),
        ("torn.pth", r"cannot be read as a checkpoint: .*fetch it again"),
        ("text.pth", r"cannot be read as a checkpoint: .*fetch it again"),
        ("empty.pth", r"cannot be read as a checkpoint: .*fetch it again"),
        ("zip.pth", r"cannot be read as a checkpoint: .*fetch it again"),
        ("torn.safetensors", r"torn\.safetensors cannot be read: .*fetch it again"),
        ("none.pth", r"none\.pth is no file; set the reward's options\.path"),
        ("", r"is no file; set the reward's options\.path"),
    ],
)
def test_a_wrong_file_is_refused_and_nothing_in_it_runs(file, said, made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bad_files(tmp_path, made["aesthetic"]["path"])
    with pytest.raises(UserError, match=said):
        reward("aesthetic", made["aesthetic"] | {"path": str(tmp_path / file)})
    assert not (tmp_path / "harmed").exists()


def test_used_wrongly_each_says_the_edit(made, tmp_path):
    swapped = {"path": made["hpsv2"]["path"], "tokenizer": made["imagereward"]["tokenizer"]}
    with pytest.raises(UserError, match=r"hps\.pt is no checkpoint of ImageReward: it has no BLIP .*set options\.path"):
        reward("imagereward", swapped)
    with pytest.raises(UserError, match=r"ImageReward\.pt is no checkpoint of this reward: it lacks .*has besides"):
        reward("hpsv2", made["hpsv2"] | {"path": made["imagereward"]["path"]})
    with pytest.raises(UserError, match=r"cannot load a CLIP model from .*options\.base"):
        reward("hpsv2", made["hpsv2"] | {"base": str(tmp_path)})
    with pytest.raises(UserError, match=r"cannot load a tokenizer from .*options\.tokenizer"):
        reward("imagereward", made["imagereward"] | {"tokenizer": str(tmp_path)})
    with pytest.raises(UserError, match=r"cannot load a CLIP model from .*options\.clip"):
        reward("aesthetic", made["aesthetic"] | {"clip": str(tmp_path)})
    torch.save(head(9), tmp_path / "wide.pth")
    with pytest.raises(UserError, match=r"reads embeddings of 9 numbers and .* makes 8; set options\.clip"):
        reward("aesthetic", made["aesthetic"] | {"path": str(tmp_path / "wide.pth")})
    with pytest.raises(UserError, match=r"cannot fetch THUDM/ImageReward/ImageReward\.pt: .*to a local file"):
        reward("imagereward", {"tokenizer": made["imagereward"]["tokenizer"]})
    with pytest.raises(UserError, match=r"options\.path: aesthetic needs it"):
        reward("aesthetic", {})


def test_safetensors_and_other_dtypes_give_the_same_score(made, tmp_path):
    from safetensors.torch import save_file

    options = made["imagereward"]
    tensors = {name: t.contiguous() for name, t in torch.load(options["path"], weights_only=True).items()}
    save_file(tensors, tmp_path / "same.safetensors")
    before = values("imagereward", options, samples())
    assert torch.equal(values("imagereward", options | {"path": str(tmp_path / "same.safetensors")}, samples()), before)
    half = {name: t.half() if t.is_floating_point() else t for name, t in tensors.items()}
    torch.save(half, tmp_path / "half.pt")
    call = reward("imagereward", options | {"path": str(tmp_path / "half.pt")})
    assert {p.dtype for p in call.__self__.model.parameters()} == {torch.float32}
    assert not any(p.requires_grad for p in call.__self__.model.parameters())
    assert not torch.equal(call(samples(), context=Context()).double(), before)


def test_shapes_are_read_without_the_numbers(made):
    found = read_tensors(made["imagereward"]["path"], "meta", fetch=False)
    assert {t.device.type for t in found.values()} == {"meta"}
    assert found["mlp.layers.0.weight"].shape == (1024, 64)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_sleeps_whole_and_scores_the_same(name, made, monkeypatch):
    call, given = reward(name, made[name]), samples()[:2]
    with torch.no_grad():
        asleep.scores_the_same(call.__self__, lambda: call(given, context=Context()).tolist(), monkeypatch)

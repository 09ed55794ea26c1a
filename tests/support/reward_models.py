"""Shared by the tests of reward models and others."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from torch.nn.functional import gelu, normalize

from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, Sample, SampleId
from tests.support import tiny

allow_cpu_only()  # before transformers imports torchvision
HEAD = ((0, 1024), (2, 128), (4, 64), (6, 16), (7, 1))


def samples(size=(60, 48), gradient=False, dtype=torch.float32):
    made, rng = [], np.random.default_rng(1)
    for i, text in enumerate(["a red cat", "a dog " * 20, "a red cat", "two birds"]):
        image = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8)).resize(size, Image.Resampling.BICUBIC)
        tensor = torch.from_numpy(np.array(image)).permute(2, 0, 1).to(dtype) / 255
        made.append(Sample(Prompt(str(i), text), SampleId(0, i, 0, 0), image, tensor.requires_grad_(gradient)))
    return made


def head(width, prefix="layers.", generator=None):
    found = {}
    for index, out in HEAD:
        found[f"{prefix}{index}.weight"] = torch.randn(out, width, generator=generator) / width**0.5
        found[f"{prefix}{index}.bias"] = torch.randn(out, generator=generator)
        width = out
    return found


class OpenCLIP(nn.Module):
    """A CLIP as OpenCLIP saves it, from torch's own attention."""

    def __init__(self, width=16, out=8, image=32, patch=8, words=74, length=16, layers=2):
        super().__init__()
        self.visual = nn.Module()
        self.visual.conv1 = nn.Conv2d(3, width, patch, patch, bias=False)
        self.visual.class_embedding = nn.Parameter(torch.randn(width))
        self.visual.positional_embedding = nn.Parameter(torch.randn((image // patch) ** 2 + 1, width))
        self.visual.ln_pre, self.visual.ln_post = nn.LayerNorm(width), nn.LayerNorm(width)
        self.visual.proj = nn.Parameter(torch.randn(width, out))
        self.visual.transformer, self.transformer = self.tower(width, layers), self.tower(width, layers)
        self.token_embedding = nn.Embedding(words, width)
        self.positional_embedding = nn.Parameter(torch.randn(length, width))
        self.ln_final = nn.LayerNorm(width)
        self.text_projection = nn.Parameter(torch.randn(width, out))
        self.logit_scale = nn.Parameter(torch.tensor(4.6))

    @staticmethod
    def tower(width, layers):
        tower = nn.Module()
        tower.resblocks = nn.ModuleList()
        for _ in range(layers):
            block = nn.Module()
            block.ln_1, block.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            block.attn = nn.MultiheadAttention(width, 2, batch_first=True)
            block.mlp = nn.ModuleDict({"c_fc": nn.Linear(width, 2 * width), "c_proj": nn.Linear(2 * width, width)})
            tower.resblocks.append(block)
        return tower

    @staticmethod
    def run(tower, x, mask=None):
        for block in tower.resblocks:
            y = block.ln_1(x)
            x = x + block.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
            x = x + block.mlp["c_proj"](gelu(block.mlp["c_fc"](block.ln_2(x))))
        return x

    def picture(self, pixels):
        v = self.visual
        x = v.conv1(pixels).flatten(2).transpose(1, 2)
        x = torch.cat([v.class_embedding.expand(len(x), 1, -1), x], 1) + v.positional_embedding
        return normalize(v.ln_post(self.run(v.transformer, v.ln_pre(x))[:, 0]) @ v.proj, dim=-1)

    def text(self, ids):
        mask = torch.full((ids.shape[1],) * 2, -torch.inf).triu(1)
        x = self.run(self.transformer, self.token_embedding(ids) + self.positional_embedding, mask)
        return normalize(self.ln_final(x)[range(len(ids)), ids.argmax(-1)] @ self.text_projection, dim=-1)


def blip_tensors(wide=128, width=64, layers=2, image=32, patch=8, words=40):
    """Random weights under the names that ``ImageReward.pt`` has."""
    g = torch.Generator().manual_seed(3)
    shapes = {
        "visual_encoder.cls_token": (1, 1, wide),
        "visual_encoder.pos_embed": (1, (image // patch) ** 2 + 1, wide),
        "visual_encoder.patch_embed.proj": (wide, 3, patch, patch),
        "visual_encoder.norm": (wide,),
        "text_encoder.embeddings.word_embeddings.weight": (words, width),
        "text_encoder.embeddings.position_embeddings.weight": (40, width),
        "text_encoder.embeddings.LayerNorm": (width,),
        "vision_proj": (16, wide),
        "text_proj": (16, width),
    }
    for i in range(layers):
        v, t = f"visual_encoder.blocks.{i}.", f"text_encoder.encoder.layer.{i}."
        shapes |= {f"{v}norm1": (wide,), f"{v}norm2": (wide,), f"{v}attn.qkv": (3 * wide, wide)}
        shapes |= {f"{v}attn.proj": (wide, wide), f"{v}mlp.fc1": (96, wide), f"{v}mlp.fc2": (wide, 96)}
        for kind, source in (("attention", width), ("crossattention", wide)):
            shapes |= {f"{t}{kind}.self.{which}": (width, source) for which in ("key", "value")}
            shapes |= {f"{t}{kind}.self.query": (width, width), f"{t}{kind}.output.dense": (width, width)}
            shapes[f"{t}{kind}.output.LayerNorm"] = (width,)
        shapes |= {f"{t}intermediate.dense": (48, width), f"{t}output.dense": (width, 48)}
        shapes[f"{t}output.LayerNorm"] = (width,)
    found = {}
    for name, shape in shapes.items():
        whole = name.endswith(("weight", "_token", "_embed"))
        scale = 1 if whole or len(shape) == 1 else np.prod(shape[1:]) ** -0.5
        found["blip." + name + ("" if whole else ".weight")] = torch.randn(shape, generator=g) * scale
        if not whole:
            found[f"blip.{name}.bias"] = torch.randn(shape[0], generator=g)
    found["blip.text_encoder.embeddings.position_ids"] = torch.arange(40)[None]
    return found | head(width, "mlp.layers.", g)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Options of every reward here, in float32 whatever this CPU multiplies."""
    found = checkpoints(tmp_path_factory.mktemp("rewards"))
    return {name: {**given, "dtype": "float32"} for name, given in found.items()}


def checkpoints(folder):
    """Options of every reward here, with a tiny checkpoint of its own format."""
    from transformers import BertTokenizer

    torch.manual_seed(7)
    clip, base = str(tiny.clip(folder / "clip")), str(tiny.clip(folder / "base", "gelu"))
    torch.save(head(8), folder / "head.pth")
    open_clip = OpenCLIP()
    for parameter in open_clip.parameters():
        if parameter.ndim:
            parameter.data.normal_()
    torch.save({"state_dict": open_clip.state_dict(), "epoch": 3}, folder / "hps.pt")
    torch.save(blip_tensors(), folder / "ImageReward.pt")
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "red", "cat", "dog", "two", "bird", "##s"]
    (folder / "bert").mkdir()
    BertTokenizer(vocab={w: i for i, w in enumerate(words)}).save_pretrained(folder / "bert")
    return {
        "clip": {"path": clip},
        "pickscore": {"path": clip, "processor": clip},
        "aesthetic": {"path": str(folder / "head.pth"), "clip": clip},
        "hpsv2": {"path": str(folder / "hps.pt"), "base": base},
        "imagereward": {"path": str(folder / "ImageReward.pt"), "tokenizer": str(folder / "bert")},
    }

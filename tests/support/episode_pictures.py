"""Shared by the tests of episode pictures and others."""

import random

import pytest
import torch
from PIL import Image

import mmrl
from mmrl.config.schema import Recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.episodes.shown import content_of
from tests.support import tiny
from tests.support.episodes import Script, written

allow_cpu_only()
pytest.importorskip("torchvision")
chat = mmrl.load("pipelines", "vlm/chat")
KINDS = ["qwen2_5_vl", "qwen3_vl", "smolvlm"]
SIZES = [(16, 16), (40, 32), (32, 90), (64, 64), (100, 30), (200, 160)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    if request.param == "smolvlm":
        pytest.importorskip("num2words")
    return request.param


def picture(draw, size=None):
    size = size or draw.choice(SIZES)
    return Image.frombytes("RGB", size, draw.randbytes(size[0] * size[1] * 3))


WORLDS = """
import io
import random
import struct
import zlib
from PIL import Image
from mmrl import Observation

def bomb():
    header = struct.pack(">IIBBBBB", 12_000, 12_000, 1, 0, 0, 0, 0)
    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
    pixels = zlib.compress(bytes(12_000 * 1_501))
    return b"\\x89PNG\\r\\n\\x1a\\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")

class World:
    pictures = True

    def __init__(self, how="pictures"):
        self.how = how

    def reset(self, prompt, seed):
        self.rng, self.turn = random.Random(seed), 0
        return ["Look.", self.picture()] if self.how == "first" else None

    def picture(self):
        size = self.rng.choice([(16, 16), (40, 32), (32, 90)])
        return Image.frombytes("RGB", size, self.rng.randbytes(size[0] * size[1] * 3))

    def step(self, action):
        self.turn += 1
        if self.how == "bomb":
            return Image.open(io.BytesIO(bomb()))
        if self.how == "bytes":
            return [{"type": "image", "image": bomb()}]
        if self.how == "broken":
            return [{"type": "image", "image": b"GIF89a no picture"}]
        if self.how == "type":
            return [{"type": "sound", "sound": b""}]
        if self.how == "many":
            return [self.picture()] * 9
        if self.turn == 2:
            return Observation("No picture this time.", reward=0.5)
        return Observation(["Look: ", self.picture(), f" number {self.turn}"], reward=0.5)


def draw(width: int) -> Image.Image:
    \"\"\"Draw a picture.

    Args:
        width: Its width.
    \"\"\"
    return Image.new("RGB", (width, 16))
"""


@pytest.fixture(scope="module")
def worlds(tmp_path_factory):
    file = tmp_path_factory.mktemp("worlds") / "worlds.py"
    file.write_text(WORLDS)
    return file


def tiny_recipe(path, worlds, template=None, new=10, **environment):
    return Recipe.model_validate(
        {
            "name": "tiny",
            "pipeline": "vlm/chat",
            "model": {"path": str(path), "chat_template": template},
            "data": {"name": "scenes"},
            "sampling": {"max_new_tokens": new},
            "environment": {"name": f"{worlds}:World", "max_turns": 4, "max_tokens": 400, **environment},
            "rewards": [{"name": "environment"}],
            "algorithm": {"type": "grpo", "kl_coef": 0.0},
            "train": {"steps": 1, "prompts_per_step": 2, "group_size": 2, "micro_batch_size": 4},
        }
    )


def rows_of(path, worlds, turns=None, **environment):
    """A pipeline of a tiny model, and the rows of four samples of two prompts; ``turns``: what is written, else the
    model samples."""
    pipeline = chat.build(tiny_recipe(path, worlds, **environment), str(path), torch.device("cpu"))
    if turns is not None:
        tokenizer = pipeline.conditioner.tokenizer
        pipeline.engine = Script([(written(tokenizer, text), "stop") for text in turns])
    draw = random.Random(5)
    prompts = [Prompt("a", "<image>What is it?", media=content_of([picture(draw)])), Prompt("b", "No picture yet.")]
    slots = [Slot(0, n, 0, prompt) for n, prompt in enumerate(prompts) for _ in range(2)]
    ids = [SampleId(0, slot.index, 0, n % 2) for n, slot in enumerate(slots)]
    pipeline.encode(slots)
    return pipeline, pipeline.sample(slots, ids, [], 3)


@pytest.fixture(scope="module")
def path(kind, tmp_path_factory):
    return tiny.vision_model(tmp_path_factory.mktemp(kind), kind)

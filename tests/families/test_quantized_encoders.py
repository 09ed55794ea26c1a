"""Text encoders of pictures in 8 or 4 bits: near the plain ones, and the same in every call."""

import io

import pytest
import torch
from PIL import Image
from torch import nn

import mmrl
from mmrl.config.schema import Recipe
from mmrl.core.media import Media
from mmrl.core.trajectory import Prompt, SampleId, Slot
from mmrl.models.quantized import QuantizedLinear
from tests.support.families import folders, recipe  # noqa: F401

PACKAGES = {"int8": "torchao", "fp8": "torchao", "nf4": "bitsandbytes"}
FAMILIES = ["sd3", "sdxl", "qwen_image_edit", "wan", "sana", "z_image", "flux2_klein"]
"""One of each kind of text encoder."""
TEXTS = ("a red circle", "two blue squares beside a green triangle")


def _build(family, at, kind):
    values = recipe(family, at).model_dump(mode="json")
    values["model"]["quantize"] = kind
    made = Recipe.model_validate(values)
    return mmrl.load("pipelines", made.pipeline).build(made, made.model.path, torch.device("cpu"))


def _slots(pipeline):
    file = io.BytesIO()
    Image.linear_gradient("L").resize((64, 64)).convert("RGB").save(file, "png")
    media = (Media("image", data=file.getvalue()),) if pipeline.adapter.edits else ()
    return [Slot(0, i, 0, Prompt(str(i), text, media=media)) for i, text in enumerate(TEXTS)]


def _encoded(pipeline):
    keys = pipeline.encode(_slots(pipeline))
    found = [pipeline.features.get(key) for key in keys]
    for key in keys:
        pipeline.features.drop(key)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prompt_has_the_same_embeddings_in_every_call_near_the_plain_ones(folders, family):
    pytest.importorskip("torchao")
    made = _build(family, folders, "int8")
    for encoder in made.adapter.text_encoders:
        inside = [m for name, m in encoder.named_modules() if {"layers", "block"} & {*name.split(".")}]
        assert not [m for m in inside if type(m) is nn.Linear]
        assert [m for m in inside if isinstance(m, QuantizedLinear)]
    first, again, plain = _encoded(made), _encoded(made), _encoded(_build(family, folders, None))
    for one, other, before in zip(first, again, plain, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)
        gap = (one["embeds"] - before["embeds"]).norm() / before["embeds"].norm()
        assert 1e-4 < gap < 0.03, "as the weights: 0.006 of each, through the layers"


@pytest.mark.parametrize(("kind", "most"), [("int8", 0.001), ("nf4", 0.005)])
def test_a_picture_of_the_shipped_model_stays_near_that_of_plain_encoders(folders, kind, most):
    pytest.importorskip(PACKAGES[kind])
    pictures = []
    for quantised in (kind, None):
        made = _build("sd3", folders, quantised)
        if quantised is None:
            made.policy = _build("sd3", folders, kind).policy  # what differs are the encoders alone
        slots = _slots(made)
        made.encode(slots)
        ids = [SampleId(0, slot.index, 0, 0) for slot in slots]
        pictures.append(made.images(made.sample(slots, ids, [], 0)))
    gap = (pictures[0] - pictures[1]).abs().mean()
    assert 0 < gap < most, gap

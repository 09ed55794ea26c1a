"""Every family of pictures and clips with its base in 8 or 4 bits: one arithmetic, and every adapter learns."""

import pytest
from torch import nn

from mmrl.config.schema import Recipe
from mmrl.models.quantized import quantized_layers
from tests.support.families import FAMILIES, UNREAD, folders, recipe  # noqa: F401

from mmrl.pipelines.diffusion import contract  # isort: skip  # after what allows transformers without torchvision

EVERY = [*FAMILIES, "wan22_ti2v", "wan22_a14b"]
FAST = ("flux", "flux2_klein")


def _recipe(family, folders, kind, dtype="float32"):
    scales = {"guidance_scale": 3.0} | ({"guidance_scale_2": 2.0} if family == "wan22_a14b" else {})
    values = recipe(family, folders, **scales).model_dump(mode="json")
    values["model"] |= {"quantize": kind, "dtype": dtype}
    return Recipe.model_validate(values)


def _holds(family, made):
    contract.first_ratio_is_one(made)
    contract.two_steps_move_every_parameter(made, UNREAD.get(family, ()))


@pytest.mark.parametrize("family", [pytest.param(f, marks=[pytest.mark.slow] * (f not in FAST)) for f in EVERY])
def test_the_first_ratio_is_one_and_every_adapter_learns(folders, family):
    pytest.importorskip("torchao")
    _holds(family, _recipe(family, folders, "int8"))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["flux2_klein", "z_image", "qwen_image_edit", "wan22_a14b"])
def test_four_bits_in_half_precision_too(folders, family):
    """Another arithmetic in training than in sampling shows in half precision first."""
    pytest.importorskip("bitsandbytes")
    _holds(family, _recipe(family, folders, "nf4", "bfloat16"))


def test_each_of_two_models_is_quantised(folders):
    pytest.importorskip("torchao")
    pipe = contract.Case(_recipe("wan22_a14b", folders, "int8")).pipeline.adapter.pipe
    for model in (pipe.transformer, pipe.transformer_2):
        layers = quantized_layers(model)
        inside = [m for name, m in model.named_modules() if "blocks." in name and "lora_" not in name]
        assert layers
        assert not [m for m in inside if type(m) is nn.Linear]

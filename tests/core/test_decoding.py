"""The VAE in bfloat16: where it shows the same pictures, and not where it does not."""

import pytest
import torch

import mmrl
from mmrl._torchvision import allow_cpu_only
from mmrl.app.build import build
from mmrl.config.loader import RecipeError, load_recipe
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()

CUDA = torch.device("cuda")
"""Of which the class reads the name alone; what it computes is on the CPU."""


def made(*words):
    return build(load_recipe(["shapes-lora"], [f"model.path={two_blocks()}", *words]).recipe).pipeline


@pytest.fixture
def pipeline():
    return made()


def decoder(pipeline, device, dtype="bfloat16"):
    recipe = pipeline.recipe.model_copy(update={"model": pipeline.recipe.model.model_copy(update={"dtype": dtype})})
    return mmrl.load("pipelines", "diffusion/decoding").Decoder(pipeline.adapter, recipe, device)


def latents(pipeline):
    return torch.randn(2, *pipeline.shape, generator=torch.Generator().manual_seed(1))


def test_a_cpu_and_float32_decode_as_they_did(pipeline):
    x = latents(pipeline)
    with torch.no_grad():
        expected = (pipeline.adapter.decode(x) / 2 + 0.5).clamp(0, 1)
    for one in (pipeline.decoded, decoder(pipeline, torch.device("cpu")), decoder(pipeline, CUDA, "float32")):
        assert torch.equal(one(x), expected)


def test_on_cuda_half_precision_is_tried_once_and_taken(pipeline):
    one, x = decoder(pipeline, CUDA), latents(pipeline)
    assert one.half is None
    found = one(x)
    assert one.half
    exact = one.shown(x)
    assert not torch.equal(found, exact)
    assert (found - exact).abs().mean() <= 1 / 255
    assert torch.equal(made("performance.vae=bfloat16").decoded(x), found)


def test_a_vae_that_cancels_large_numbers_stays_float32(pipeline, capsys):
    """Its last layer sees 1,000 in all channels, of which its weights leave nothing: bfloat16 has steps of 4 there."""
    last = pipeline.adapter.vae.decoder
    with torch.no_grad():
        last.conv_norm_out.bias.fill_(1000.0)
        last.conv_out.weight -= last.conv_out.weight.mean((1, 2, 3), keepdim=True)
    one, x = decoder(pipeline, CUDA), latents(pipeline)
    assert torch.equal(one(x), one.shown(x))
    assert one.half is False
    one(x)
    assert "".join(capsys.readouterr()).count("the VAE decodes in float32: in bfloat16 pixels differ by") == 1


def test_text_has_no_vae():
    with pytest.raises(RecipeError, match=r"performance.vae: text has no VAE that decodes; remove it"):
        load_recipe(["sums"], ["performance.vae=bfloat16"])

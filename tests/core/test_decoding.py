"""The VAE in bfloat16: where it shows the same pictures, and not where it does not."""

import pytest
import torch

import mmrl
from mmrl.app.build import build
from mmrl.config.loader import RecipeError, load_recipe
from mmrl.core.torchvision_on_cpu import allow_cpu_only
from tests.support import tiny_diffusion
from tests.support.tiny_diffusion import two_blocks

allow_cpu_only()

CUDA = torch.device("cuda")
"""Of which the class reads the name alone; what it computes is on the CPU."""


def made(*words):
    return build(load_recipe(["shapes-lora"], [f"model.path={two_blocks()}", *words]).recipe).pipeline


@pytest.fixture
def pipeline():
    return made()


def beside(pipeline, dtype):
    """The recipe of ``pipeline`` with another ``model.dtype``."""
    return pipeline.recipe.model_copy(update={"model": pipeline.recipe.model.model_copy(update={"dtype": dtype})})


def decoder(pipeline, device, dtype="bfloat16"):
    return mmrl.load("pipelines", "diffusion/decoding").Decoder(pipeline.adapter, beside(pipeline, dtype), device)


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


def laid(vae):
    """How many weights of convolutions lie with their channels last, of those for which it makes a difference."""
    weights = [w for w in vae.parameters() if w.ndim == 4 and w.shape[1] > 1 and w.shape[2:].numel() > 1]
    assert weights
    return sum(w.is_contiguous(memory_format=torch.channels_last) for w in weights) / len(weights)


def test_beside_half_precision_on_cuda_channels_lie_last_and_pictures_stay_the_same(pipeline):
    """In float32, since the order of sums in bfloat16 says nothing: values and the gradient of a pathwise objective."""
    lay = mmrl.load("pipelines", "diffusion/decoding").lay
    x, direction = latents(pipeline).requires_grad_(), torch.randn(2, 3, 32, 32)
    assert laid(pipeline.adapter.vae) == 0
    before = pipeline.decoded.shown(x)
    (expected,) = torch.autograd.grad((before * direction).sum(), x)
    for device, dtype in (("cpu", "bfloat16"), ("cuda", "float32"), ("cuda", "bfloat16")):
        lay(pipeline.adapter.vae, beside(pipeline, dtype), torch.device(device))
        assert laid(pipeline.adapter.vae) == ((device, dtype) == ("cuda", "bfloat16"))
    after = pipeline.decoded.shown(x)
    assert after.is_contiguous()  # rewards may read it as it lies
    assert torch.allclose(after, before, atol=1e-5)
    (found,) = torch.autograd.grad((after * direction).sum(), x)
    assert (found - expected).norm() <= 1e-4 * expected.norm()


@pytest.mark.parametrize("family", ["sd", "flux", "sana", "wan", "qwen_image"])
def test_weights_that_go_over_time_stay_as_they_are(pipeline, tmp_path, family):
    import diffusers

    tiny_diffusion.save(family, tmp_path)
    vae = diffusers.DiffusionPipeline.from_pretrained(tmp_path).vae
    over_time = any(w.ndim == 5 for w in vae.parameters())
    assert over_time == (family in ("wan", "qwen_image"))
    before = [w.stride() for w in vae.parameters()]
    mmrl.load("pipelines", "diffusion/decoding").lay(vae, beside(pipeline, "bfloat16"), CUDA)
    assert ([w.stride() for w in vae.parameters()] == before) == over_time
    assert over_time or laid(vae) == 1


def test_text_has_no_vae():
    with pytest.raises(RecipeError, match=r"performance.vae: text has no VAE that decodes; remove it"):
        load_recipe(["sums"], ["performance.vae=bfloat16"])

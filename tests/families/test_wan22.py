"""Wan 2.2 as tiny pipelines of the real class. TI2V-5B: a VAE of patches, and a time for every token."""

import pytest
import torch

from mmrl.algorithms.objective import GraphSteps
from mmrl.config.schema import Recipe
from mmrl.core.errors import UserError
from mmrl.core.torchvision_on_cpu import allow_cpu_only

allow_cpu_only()  # before transformers imports torchvision

from mmrl.pipelines.diffusion import contract  # noqa: E402
from tests.support.families import folders, recipe  # noqa: E402, F401


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=[pytest.mark.slow] * (check is not contract.sampling_is_the_stock_pipelines))
        for check in contract.CHECKS
    ],
)
def test_ti2v_keeps_the_contract(folders, check):
    check(recipe("wan22_ti2v", folders, guidance_scale=4.0, steps=3))


@pytest.mark.slow
def test_all_weights_of_ti2v_train(folders):
    contract.first_ratio_is_one(recipe("wan22_ti2v", folders, lora=False))
    contract.two_steps_move_every_parameter(recipe("wan22_ti2v", folders, lora=False))


def test_ti2v_has_sixteen_pixels_to_a_latent_and_four_frames(folders):
    adapter = contract.Case(recipe("wan22_ti2v", folders)).pipeline.adapter
    assert adapter.latent_shape(64, 32) == (8, 2, 4, 2)
    clip = torch.rand(1, 5, 3, 64, 32, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        latents = adapter.encode_image(clip)
        assert latents.shape == (1, 8, 2, 4, 2)
        assert adapter.decode(latents).shape == clip.shape
    with pytest.raises(UserError, match=r"48 x 32 is no multiple of 32.*use 64 x 32"):
        contract.Case(recipe("wan22_ti2v", folders, height=48))


def test_a_time_for_every_token_is_that_of_the_sample(folders):
    """Text-to-video gives all tokens one time, so that the model needs no second kind of input."""
    pipeline = contract.Case(recipe("wan22_ti2v", folders)).pipeline
    x = torch.randn(2, *pipeline.shape, generator=torch.Generator().manual_seed(0))
    features = {k: torch.stack([v, v]) for k, v in pipeline.adapter.encode("a red circle").items()}
    times = torch.tensor([900.0, 300.0])
    with torch.no_grad():
        one = pipeline.adapter.predict(pipeline.policy, x, times, features)
        each = pipeline.adapter.predict(pipeline.policy, x, times.unsqueeze(1).expand(2, 2), features)
    torch.testing.assert_close(one, each, rtol=1e-5, atol=1e-6)
    assert (one[0] - one[1]).abs().max() > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [{"type": "diffusion_nft"}, {"type": "draft", "last_steps": 1}])
def test_other_kinds_of_objective_have_gradients(folders, algorithm):
    made = recipe("wan22_ti2v", folders).model_dump(mode="json") | {"algorithm": algorithm}
    case = contract.Case(Recipe.model_validate(made))
    if algorithm["type"] == "draft":
        out = case.pipeline.generate(case.slots, case.ids, GraphSteps(1, 2), 0, frozenset(), case.policy.using)
        out["images"].sum().backward()
    else:
        rows = case.pipeline.sample(case.slots, case.ids, [], seed=0)
        out = case.pipeline.renoise(rows, 0, 0, frozenset(), case.policy.using)
        out["v"].square().sum().backward()
    assert all(p.grad is not None for p in case.policy.trainable.values())
    assert any(p.grad.abs().sum() > 0 for p in case.policy.trainable.values())

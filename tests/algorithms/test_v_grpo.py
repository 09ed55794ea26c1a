"""V-GRPO: the authors' surrogate and clipped loss, one update without a copy, and refusals."""

import pytest
import torch

from mmrl.algorithms.v_grpo import VGRPO, VGRPOSettings, adaptive_loss
from mmrl.config.loader import load_recipe
from mmrl.core.errors import UserError
from tests.support.training_loop import FORWARD, SMALL, make, step, update_gradient


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


def golden_batch():
    x0, noise = f64([[0.2, -0.4, 1.0], [0.5, 0.1, -0.3]]), f64([[1.0, -0.5, 0.3]])
    new = {
        "v": f64([[0.5, 0.1, -0.2], [0.9, -0.4, 0.1]]).requires_grad_(),
        "v_old": f64([[0.45, 0.2, -0.3], [0.8, -0.2, 0.2]]),
        "target": noise - x0,
        "sigma": f64([0.8, 0.8]),
    }
    return new, {"advantages": f64([1.5, -0.7]), "weights": torch.ones(2).double()}


@pytest.mark.parametrize(
    ("clip", "value", "second"),
    [(0.5, -0.34539394, [-0.19428456, -0.09714228, 0.24285570]), (0.01, -0.33897487, [0.0] * 3)],
)
def test_golden_of_the_authors_code(clip, value, second):
    """tang-bd/v-grpo's ``calc_surrogate`` with ``self_normalize`` and its loss, run on these numbers in float64. The
    repository itself was out of reach: the two functions are those that a public article quotes."""
    new, old = golden_batch()
    loss = VGRPO(VGRPOSettings(clip_range=clip)).loss(new, old, 2.0)
    (gradient,) = torch.autograd.grad(loss.value, new["v"])
    assert loss.value.item() == pytest.approx(value, abs=1e-6)
    assert gradient[0].tolist() == pytest.approx([-0.32607385, 0.21738257, 0.54345642], abs=1e-6)
    assert gradient[1].tolist() == pytest.approx(second, abs=1e-6)
    assert adaptive_loss(new["v"], new["target"], new["sigma"]).tolist() == pytest.approx([0.304, 0.32727273], abs=1e-6)
    assert loss.sums["policy/ratio"].item() / 2 == pytest.approx((0.98001199 + 0.97132816) / 2, abs=1e-6)


def test_soft_clip_and_the_pull_to_the_old_policy():
    new, old = golden_batch()
    same = new | {"v_old": new["v"].detach()}
    hard = VGRPO(VGRPOSettings(soft_clip=None)).loss(same, old | {"advantages": f64([9.0, -1.0])}, 2.0)
    assert hard.value.item() == pytest.approx(-(5.0 - 1.0) / 2), "advantage_clip alone"
    soft = VGRPO(VGRPOSettings(soft_clip=2.0)).loss(same, old | {"advantages": f64([9.0, 0.0])}, 2.0)
    assert soft.value.item() == pytest.approx(-2 * torch.tensor(2.5).tanh().item() / 2)
    pulled = VGRPO(VGRPOSettings(old_kl_coef=0.3)).loss(new, old | {"advantages": f64([0.0, 0.0])}, 2.0)
    distance = 0.64 * (new["v"] - new["v_old"]).square().mean(1)
    assert pulled.value.item() == pytest.approx(0.3 * distance.mean().item(), rel=1e-6)
    none = VGRPO(VGRPOSettings(clip_range=None)).loss(new, old, 2.0)
    assert none.sums["policy/clip_fraction"] == 0


def test_one_update_needs_no_copy_and_has_the_same_gradient():
    several, alone = VGRPO(VGRPOSettings()), VGRPO(VGRPOSettings())
    alone.in_one_update()
    assert ({*several.copies}, {*alone.copies}) == ({"old"}, set())
    assert several.needs - alone.needs == {"v_old"}
    new, old = golden_batch()
    found = []
    for objective in (several, alone):
        loss = objective.loss(new | {"v_old": new["v"].detach()}, old, 2.0)
        assert loss.maxima["policy/ratio_max_dev"] == 0
        found.append((loss.value.item(), torch.autograd.grad(loss.value, new["v"], retain_graph=True)[0].tolist()))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["algorithm={type: v_grpo, old_kl_coef: 0.3}", *FORWARD],
            "set train.updates_per_step to 2 or more, or remove",
        ),
        (["algorithm={type: v_grpo, noise_levels: 5}", *FORWARD], "4 have a level that trains; set it to 4 or less"),
        (["algorithm={type: v_grpo}"], "sampling.window: v_grpo records no denoising actions"),
        (
            ["algorithm={type: v_grpo}", *FORWARD, "devices_per_controller=2", "placement=disaggregated"],
            "v_grpo needs samples of the current policy",
        ),
    ],
)
def test_what_cannot_work_is_refused_with_the_edit(overrides, message):
    with pytest.raises(UserError, match=message):
        load_recipe(["shapes-lora"], [*SMALL, *overrides])


@pytest.mark.slow
def test_several_updates_have_the_copys_gradient_first_and_a_ratio_that_moves():
    reward = 'rewards=[{name: "jpeg:compressibility"}]'
    run = make("algorithm={type: v_grpo, noise_levels: 2}", reward, *FORWARD, "train.updates_per_step=2")
    assert "old" in run.policy.copies
    row, _ = step(run)
    assert row["policy/first_ratio_max_dev"] <= 1e-6 < row["policy/ratio_max_dev"]
    alone = make("algorithm={type: v_grpo, noise_levels: 2}", reward, *FORWARD)
    assert "old" not in alone.policy.copies
    gradient, row = update_gradient(alone)
    assert row["policy/ratio_max_dev"] == 0
    assert gradient.norm() > 0

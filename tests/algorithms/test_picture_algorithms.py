"""Objectives over pictures against closed forms, golden numbers, the peers' own formulas and float64 differences."""

import math

import pytest
import torch

from mmrl.algorithms import (
    awm,
    sde,
)
from mmrl.algorithms.advantages import group_advantages
from mmrl.algorithms.alignprop import AlignProp, AlignPropSettings
from mmrl.algorithms.awm import AWM, AWMSettings
from mmrl.algorithms.dgpo import DGPO, DGPOSettings
from mmrl.algorithms.diffusion_dpo import DiffusionDPO, DiffusionDPOSettings
from mmrl.algorithms.draft import DRaFT, DRaFTSettings
from mmrl.algorithms.flow_dppo import FlowDPPO, FlowDPPOSettings
from mmrl.algorithms.flow_grpo import FlowGRPO, FlowGRPOSettings
from mmrl.algorithms.grpo_guard import GRPOGuard, GRPOGuardSettings
from mmrl.algorithms.objective import GraphSteps, Scored
from mmrl.algorithms.refl import ReFL, ReFLSettings
from mmrl.algorithms.rwr import RWR, RWRSettings
from mmrl.algorithms.srpo import SRPO, SRPOSettings


def f64(rows):
    return torch.tensor(rows, dtype=torch.float64)


REWARDS, GROUPS = f64([1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 1.0, 1.0, 0.5, 0.5]), torch.tensor([0] * 4 + [1] * 4 + [2] * 2)


# -- denoising steps -------------------------------------------------------------------------------------------------


def moved_step(rows=3, shift=0.05, seed=0):
    """A recorded Flow-SDE step of ``rows`` samples and its replay with means that have moved, all float64: new and old
    as ``DenoisingObjective.loss`` takes them, the shift of the means and the noise."""
    torch.manual_seed(seed)
    c = sde.coefficients(f64([0.8, 0.6, 0.0]), "flow", 0.7, [0])
    std, dt = c.std[:1].double(), c.dt[:1].double()
    mean, z = torch.randn(rows, 4, 3).double(), torch.randn(rows, 4, 3).double()
    delta = (shift * torch.randn(rows, 4, 3).double()).requires_grad_()

    def log_prob(of):
        distance = (mean + std * z - of).square().flatten(1).mean(1, keepdim=True)
        return -distance / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)

    new = {"log_probs": log_prob(mean + delta), "old_distance": delta.square().flatten(1).mean(1, keepdim=True)}
    old = {"log_probs": log_prob(mean), "weights": torch.ones(rows), "std": std, "dt": dt, "c_v": c.c_v[:1].double()}
    old |= {"every_std": std, "every_c_v": old["c_v"]}
    return new, old, delta, z


def test_golden_guard():
    """x = 1, v = .5, x' = .9, s = .8 to .6, and a mean that moved by .01."""
    c = sde.coefficients(f64([0.8, 0.6, 0.0]), "flow", 0.7, [0])
    x, v, following = torch.ones(1, 1), torch.full((1, 1), 0.5), torch.full((1, 1), 0.9)
    before = sde.step_mean(x, v, c, 0)
    log_probs = [sde.log_prob(following, mean, c, 0).unsqueeze(1) for mean in (before, before + 0.01)]
    assert (log_probs[1] - log_probs[0]).item() == pytest.approx(0.006747, abs=1e-6)
    new = {"log_probs": log_probs[1], "old_distance": torch.full((1, 1), 1e-4)}
    old = {"log_probs": log_probs[0], "advantages": torch.ones(1), "weights": torch.ones(1), "std": c.std[:1]}
    loss = GRPOGuard(GRPOGuardSettings(clip_range=1)).loss(new, old | {"dt": c.dt[:1]}, 1.0)
    assert loss.sums["policy/ratio"].item() == pytest.approx(1.00431371, abs=1e-6)
    assert loss.value.item() == pytest.approx(-1.00431371 / 0.2, abs=1e-5)


def test_guard_is_the_exponential_of_noise_times_shift_of_each_sample_alone():
    new, old, delta, z = moved_step()
    advantages = f64([1.0, -0.5, 2.0])
    loss = GRPOGuard(GRPOGuardSettings(clip_range=1)).loss(new, old | {"advantages": advantages}, 3.0)
    ratio = (z * delta).flatten(1).mean(1).exp()
    assert loss.value.item() == pytest.approx((-advantages * ratio / 0.2).mean().item(), rel=1e-6)
    # the bias taken over the batch as well, as in the authors' code, is another number where samples moved differently
    batch = new | {"old_distance": new["old_distance"].mean().expand(3, 1)}
    wrong = GRPOGuard(GRPOGuardSettings(clip_range=1)).loss(batch, old | {"advantages": advantages}, 3.0)
    assert abs(wrong.value.item() - loss.value.item()) > 1e-5
    alone = [
        GRPOGuard(GRPOGuardSettings(clip_range=1)).loss(
            {k: v[i : i + 1] for k, v in new.items()},
            old | {k: v[i : i + 1] for k, v in {**old, "advantages": advantages}.items() if len(v) == 3},
            3.0,
        )
        for i in range(3)
    ]
    assert sum(one.value for one in alone).item() == pytest.approx(loss.value.item(), rel=1e-12)


def test_guard_gradients_are_alike_whatever_the_step_and_plain_ones_are_not():
    """At ratio 1 the gradient by the mean is z / n times -A / -dt; the plain one is divided by the step's noise."""
    new, old, delta, z = moved_step(shift=0.0)
    loss = GRPOGuard(GRPOGuardSettings()).loss(new, old | {"advantages": torch.ones(3).double()}, 3.0)
    assert loss.maxima["policy/ratio_max_dev"] == 0
    (gradient,) = torch.autograd.grad(loss.value, delta, retain_graph=True)
    torch.testing.assert_close(gradient, -z / 12 / 0.2 / 3, rtol=1e-6, atol=0)
    plain = FlowGRPO(FlowGRPOSettings(kl_coef=0)).loss(new, old | {"advantages": torch.ones(3).double()}, 3.0)
    (gradient,) = torch.autograd.grad(plain.value, delta)
    torch.testing.assert_close(gradient, -z / 12 / old["std"] / 3, rtol=1e-6, atol=0)


def test_dppo_leaves_out_what_moved_far_and_would_move_further():
    old = {"log_probs": f64([[0.0]] * 6), "weights": torch.ones(6), "std": f64([0.5]), "dt": f64([-0.1])}
    log_probs = f64([[0.2], [0.2], [-0.2], [-0.2], [0.2], [0.0]]).requires_grad_()
    distance = f64([[0.1], [0.1], [0.1], [0.1], [1e-9], [0.1]])
    advantages = f64([1.0, -1.0, 1.0, -1.0, 1.0, 1.0])
    loss = FlowDPPO(FlowDPPOSettings(max_divergence=0.1)).loss(
        {"log_probs": log_probs, "old_distance": distance}, old | {"advantages": advantages}, 6.0
    )
    loss.value.backward()
    ratio = log_probs.detach().exp().flatten()
    kept = f64([0, 1, 1, 0, 1, 1])
    torch.testing.assert_close(log_probs.grad.flatten(), -advantages * ratio * kept / 6)
    assert loss.value.item() == pytest.approx((-advantages * ratio * kept).sum().item() / 6)
    assert loss.sums["policy/clip_fraction"] == 2
    assert loss.sums["policy/old_kl"].item() == pytest.approx((5 * 0.1 + 1e-9) / 0.5)


def flash(s, dt, d):
    """A step's weight as the authors write it."""
    return 1 / (math.sqrt(-dt) / d + d * math.sqrt(-dt) * (1 - s) / (2 * s))


WEIGHTS = [flash(0.8, -0.2, 1.4), *(flash(s, -0.2, 0.7 * math.sqrt(s / (1 - s))) for s in (0.6, 0.4))]


@pytest.mark.parametrize(
    ("weight", "expected"),
    [("none", 1.0), ("tempflow", 2.25 * 0.626099), ("flash", WEIGHTS[0] / (sum(WEIGHTS) / 3))],
)
def test_weights_of_steps(weight, expected):
    assert WEIGHTS[0] == pytest.approx(2.514454, abs=1e-6)
    new, old, _, _ = moved_step(shift=0.0)
    c = sde.coefficients(f64([0.8, 0.6, 0.4, 0.2, 0.0]), "flow", 0.7, [0, 1, 2])
    old |= {"every_std": c.std[:3].double(), "every_c_v": c.c_v[:3].double()}
    objective = FlowGRPO(FlowGRPOSettings(kl_coef=0, step_weight=weight))
    loss = objective.loss(new, old | {"advantages": f64([1.0, 1.0, 1.0])}, 3.0)
    assert -loss.value.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("kind", ["flow", "cps", "linear"])
def test_the_pull_to_the_reference_has_the_scale_of_each_noises_authors(kind):
    """|mu - mu_ref|^2 / (2 e^2), written out in float64."""
    new, old, _, _ = moved_step(shift=0.0)
    sigmas = f64([0.8, 0.6, 0.0])
    c = sde.coefficients(sigmas, kind, 0.7, [0])
    e = {
        "flow": 0.7 * math.sqrt(0.8 / 0.2),
        "cps": 0.6 * math.sin(0.7 * math.pi / 2),
        "linear": 0.7 * 0.6 * 0.8 * math.sqrt(0.2),
    }[kind]
    new["reference_distance"] = f64([[0.01], [0.02], [0.0]])
    loss = FlowGRPO(FlowGRPOSettings(kl_coef=0.04)).loss(
        new, old | {"advantages": f64([0.0, 0.0, 0.0]), "kl_std": c.kl_std[:1].double()}, 3.0
    )
    assert loss.value.item() == pytest.approx(0.04 * 0.03 / 3 / (2 * e**2), rel=1e-6)
    assert loss.sums["policy/kl"].item() == pytest.approx(0.03 / (2 * e**2), rel=1e-6)


# -- the forward process ---------------------------------------------------------------------------------------------


def noised(rows, seed=0, **named):
    """Predictions ``[rows, 6]`` float64 with graph, and what they are to match."""
    torch.manual_seed(seed)
    target = torch.randn(rows, 6).double()
    v = (target + 0.3 * torch.randn(rows, 6).double()).requires_grad_()
    others = {name: target + 0.3 * torch.randn(rows, 6).double() for name in ("v_old", "v_reference", "v_average")}
    return {"v": v, "target": target, "sigma": torch.linspace(0.2, 0.9, rows).double(), **others, **named}


def errors(values, target):
    return (values - target).square().mean(1)


def difference(objective, new, old, total, row, column, h=1e-6):
    """The loss's derivative by one number of ``v``, as a quotient."""
    values = []
    for sign in (1, -1):
        v = new["v"].detach().clone()
        v[row, column] += sign * h
        values.append(objective.loss(new | {"v": v}, old, total).value.item())
    return (values[0] - values[1]) / (2 * h)


@pytest.fixture
def exact(monkeypatch):
    """Squared distances in float64, or quotients drown in rounding."""
    for module in ("awm", "dgpo", "diffusion_dpo", "rwr", "forward_process"):
        path = f"mmrl.algorithms.{module}.squared_distance"
        monkeypatch.setattr(path, lambda a, b: (a - b).square().flatten(1).mean(1))


def test_golden_awm():
    assert -awm.weighted_error(f64([0.01]), f64([0.5]), "ghuber", 0.25).item() == pytest.approx(-0.626131, abs=1e-6)


@pytest.mark.parametrize(
    ("weighting", "expected"), [("uniform", 0.01), ("t", 0.005), ("t2", 0.0025), ("huber", 0.5 * (0.1 - 1e-5))]
)
def test_awm_weighs_the_matching_error(weighting, expected):
    assert awm.weighted_error(f64([0.01]), f64([0.5]), weighting, 0.25).item() == pytest.approx(expected, rel=1e-6)


def test_awm_gradient_at_ratio_one_is_minus_advantage_times_that_of_the_log_prob(exact):
    new = noised(4)
    new["v_old"] = new["v"].detach()
    old = {"advantages": f64([1.0, -2.0, 20.0, 0.0]), "weights": torch.ones(4).double()}
    loss = AWM(AWMSettings(kl_coef=0, average_coef=0)).loss(new, old, 4.0)
    assert loss.maxima["policy/ratio_max_dev"] == 0
    (gradient,) = torch.autograd.grad(loss.value, new["v"], retain_graph=True)
    weighted = awm.weighted_error(errors(new["v"], new["target"]), new["sigma"], "ghuber", 0.25)
    (expected,) = torch.autograd.grad((weighted * f64([0.2, -0.4, 1.0, 0.0])).sum() / 4, new["v"])
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("objective", "advantages"),
    [
        (AWM(AWMSettings(clip_range=0.5)), [2.0, -1.0, 3.0, 1.0]),
        (DGPO(DGPOSettings(beta=20, kl_coef=0.1, clip_range=None)), [1.2, -0.4, 0.3, -1.1]),
        (DGPO(DGPOSettings(beta=20, clip_range=None, reference="average")), [1.2, -0.4, 0.3, -1.1]),
        (DiffusionDPO(DiffusionDPOSettings(beta=50)), [1.0, -1.0, -1.0, 1.0]),
        (RWR(RWRSettings(kl_coef=0.1)), [0.5, 1.5, 1.9, 0.1]),
    ],
    ids=["awm", "dgpo", "dgpo_average", "diffusion_dpo", "rwr"],
)
def test_gradients_are_the_losses_own(exact, objective, advantages):
    new, groups = noised(4), torch.tensor([0, 0, 1, 1])
    old = {"advantages": f64(advantages), "weights": torch.ones(4).double(), "groups": groups}
    (gradient,) = torch.autograd.grad(objective.loss(new, old, 4.0).value, new["v"])
    assert gradient.abs().max() > 1e-3
    for row, column in ((0, 0), (1, 3), (2, 5), (3, 1)):
        assert difference(objective, new, old, 4.0, row, column) == pytest.approx(
            gradient[row, column].item(), rel=1e-5, abs=1e-9
        )


def test_golden_diffusion_dpo():
    """Errors .50 and .60 against the reference's .52 and .59, beta 2000: inside is 30."""
    roots = f64([[0.5], [0.6]]).sqrt(), f64([[0.52], [0.59]]).sqrt()
    new = {"v": roots[0], "v_reference": roots[1], "target": torch.zeros(2, 1).double()}
    old = {"advantages": f64([1.0, -1.0]), "weights": torch.ones(2), "groups": torch.tensor([0, 0])}
    objective = DiffusionDPO(DiffusionDPOSettings(beta=2000))
    loss = objective.loss(new, old, objective.loss_denominator(torch.ones(2), torch.ones(2)))
    assert loss.sums["policy/pair_margin"].item() == pytest.approx(30, abs=1e-3)
    same = objective.loss(new | {"v_reference": new["v"]}, old, 1.0)
    assert same.value.item() == pytest.approx(math.log(2), rel=1e-6)


def test_diffusion_dpo_takes_the_best_and_the_worst_of_a_group_that_differs():
    a = DiffusionDPO(DiffusionDPOSettings()).advantages(Scored(REWARDS, GROUPS))
    assert a.values.tolist() == [-1, 0, 0, 1, -1, 0, 1, 0, 0, 0]
    assert a.valid.tolist() == [True, False, False, True, True, False, True, False, False, False]
    assert (a.groups, a.zero_std_groups) == (3, 1)
    dropped = DiffusionDPO(DiffusionDPOSettings()).advantages(
        Scored(f64([math.nan, 5.0, 7.0, 6.0]), torch.zeros(4, dtype=torch.long))
    )
    assert dropped.values.tolist() == [0, -1, 1, 0]


def test_dgpo_gradient_is_the_authors_detached_sigmoid_form(exact):
    new, groups = noised(5), torch.tensor([0, 0, 0, 1, 1])
    a, size = f64([1.5, -0.5, -1.0, 0.7, -0.7]), f64([3.0, 3, 3, 2, 2])
    objective = DGPO(DGPOSettings(beta=30, clip_range=None))
    old = {"advantages": a, "weights": torch.ones(5).double(), "groups": groups}
    (gradient,) = torch.autograd.grad(objective.loss(new, old, 5.0).value, new["v"], retain_graph=True)
    dsm, reference = errors(new["v"], new["target"]), errors(new["v_reference"], new["target"])
    term = a * 30 * (dsm - reference).detach() / size
    s = torch.stack([term[groups == g].sum() for g in groups])
    assert (s.sigmoid() - 0.5).abs().min() > 1e-3
    (expected,) = torch.autograd.grad((s.sigmoid() * a * dsm).mean(), new["v"])
    torch.testing.assert_close(gradient, expected)


def test_dgpo_error_past_the_average_has_no_gradient_and_counts_as_before(exact):
    new, old = noised(4), {"weights": torch.ones(4).double(), "groups": torch.tensor([0] * 4)}
    error = errors(new["v"], new["target"]).detach()
    past = error - f64([0.02, -0.02, -0.02, 0.02])  # errors of the average: rows 1 and 2 got better, 0 and 3 worse
    new["v_average"] = new["target"] + past.sqrt().unsqueeze(1)
    old["advantages"] = f64([1.0, 1.5, -2.0, -0.5])
    made = {}
    for clip in (None, 0.01, 0.03):
        loss = DGPO(DGPOSettings(beta=30, clip_range=clip)).loss(new, old, 4.0)
        made[clip] = loss, torch.autograd.grad(loss.value, new["v"], retain_graph=True)[0]
    assert {loss.value.item() for loss, _ in made.values()} == {made[None][0].value.item()}
    assert made[0.01][0].sums["policy/clip_fraction"] == 2
    assert made[None][1].abs().sum(1).min() > 1e-3
    torch.testing.assert_close(made[0.01][1], made[None][1] * f64([[1.0], [0], [1], [0]]))
    torch.testing.assert_close(made[0.03][1], made[None][1])


def test_dgpo_keeps_an_average_where_something_asks_for_it():
    plain = DGPO(DGPOSettings(clip_range=None, average_samples_after=None))
    assert (plain.copies, plain.needs) == ({}, {"v", "v_reference", "target"})
    assert plain.samples_with(10**6) == "current"
    late = DGPO(DGPOSettings(clip_range=None, average_samples_after=3))
    assert [late.samples_with(n) for n in (0, 3, 4)] == ["current", "current", "average"]
    assert [late.copies["average"](n) for n in (0, 10, 1000)] == [0, 0.01, 0.3]
    assert "v_average" not in late.needs
    assert DGPO(DGPOSettings(reference="average")).needs == {"v", "v_average", "target"}


def test_dgpo_keeps_groups_whole_where_a_sample_was_dropped():
    a = DGPO(DGPOSettings()).advantages(Scored(f64([1.0, math.nan, 3.0]), torch.zeros(3, dtype=torch.long)))
    assert a.valid.all()
    assert a.values[1] == 0
    assert a.values[0] < 0 < a.values[2]


def test_reward_weighted_regression_weighs_by_the_softmax_in_a_group():
    a = RWR(RWRSettings(temperature=0.5)).advantages(Scored(REWARDS, GROUPS))
    inside = group_advantages(REWARDS, GROUPS, "group").values
    torch.testing.assert_close(a.values[:4], 4 * (inside[:4] / 0.5).softmax(0))
    assert a.values[4:8].sum().item() == pytest.approx(4)
    assert a.valid.tolist() == [True] * 8 + [False] * 2
    best = RWR(RWRSettings(weights="best")).advantages(Scored(REWARDS, GROUPS))
    assert best.values.tolist() == [0, 0, 0, 1, 0, 0, 1, 0, 0, 0]
    assert best.valid.tolist() == [v > 0 for v in best.values.tolist()]


def test_reward_weighted_regression_is_weighted_flow_matching():
    new = noised(3)
    old = {"advantages": f64([0.5, 2.0, 0.0]), "weights": torch.ones(3)}
    loss = RWR(RWRSettings()).loss(new, old, 3.0)
    expected = (f64([0.5, 2.0, 0.0]) * errors(new["v"], new["target"])).mean()
    assert loss.value.item() == pytest.approx(expected.item(), rel=1e-6)


# -- pathwise --------------------------------------------------------------------------------------------------------


def test_steps_with_a_graph():
    assert DRaFT(DRaFTSettings(last_steps=3)).graph_steps(10, 0.7) == GraphSteps(7, 9)
    assert DRaFT(DRaFTSettings(renoise=2)).graph_steps(10, 0.7) == GraphSteps(9, 9, 2)
    draws = torch.linspace(0, 0.999, 200).tolist()
    steps = {ReFL(ReFLSettings()).graph_steps(40, draw) for draw in draws}
    assert steps == {GraphSteps(n, n) for n in range(30, 40)}
    steps = [AlignProp(AlignPropSettings()).graph_steps(10, draw) for draw in draws]
    assert steps[0] == GraphSteps(0, 9), "0 is what takes most memory"
    assert {s: steps.count(s) for s in steps} == {GraphSteps(n, 9): 20 for n in range(10)}
    assert AlignProp(AlignPropSettings(last_steps=2)).graph_steps(10, 0.0) == GraphSteps(8, 9)


@pytest.mark.parametrize(
    ("objective", "value", "gradient"),
    [
        (ReFL(ReFLSettings()), 1e-3 * (1.0 + 0.0) / 2, [-5e-4, 0.0]),
        (AlignProp(AlignPropSettings(target=2.0, scale=0.1)), 0.1 * (1.0 + 1.0) / 2, [-0.05, 0.05]),
        (AlignProp(AlignPropSettings()), -2.0, [-0.5, -0.5]),
        (DRaFT(DRaFTSettings()), -2.0, [-0.5, -0.5]),
        (SRPO(SRPOSettings(wanted=[], unwanted=[], threshold=2.5)), 1.5 / 2, [-0.5, 0.0]),
    ],
    ids=["refl", "alignprop-target", "alignprop", "draft", "direct-align"],
)
def test_losses_of_rewards(objective, value, gradient):
    rewards = f64([[1.0, 3.0]]).requires_grad_()
    loss = objective.loss({"rewards": rewards}, {}, 2.0)
    loss.value.backward()
    assert loss.value.item() == pytest.approx(value)
    assert rewards.grad.flatten().tolist() == pytest.approx(gradient)


def test_srpo_draws_levels_and_takes_words_in_turn():
    objective = SRPO(SRPOSettings(lowest=0.5, highest=0.9))
    for draw in (0.0, 0.3, 0.999):
        path = objective.graph_steps(10, draw)
        b = 0.54 + 0.32 * draw
        assert (path.first, path.last) == (10, 9)
        assert [x for jump in path.jumps for x in jump] == pytest.approx([b + 0.04, b, b - 0.04, b])
    assert objective.phrases(6) == ["Detailed. ", "Painting. "]
    alone = SRPO(SRPOSettings(wanted=[], unwanted=[]))
    assert (len(alone.graph_steps(10, 0.5).jumps), alone.phrases(0)) == (1, [])


def test_srpo_compares_words_one_way_and_the_other():
    """Toward the picture (1 + k) r+ - r-, away from it (1 + k') r- - r+; k .1 to .25 and k' .3 to .01 by level."""
    objective = SRPO(SRPOSettings(lowest=0.5, highest=0.9, threshold=0.7))
    levels = torch.tensor([0.74, 0.66], dtype=torch.float64)  # b = .7, at half of the levels; b - d at .4 of them
    rewards = f64([[0.1, 0.3], [0.2, -0.1], [0.15, 0.1], [0.05, 0.4]]).requires_grad_()
    loss = objective.loss({"rewards": rewards, "from": levels}, {}, 2.0)
    k, away = 0.1 + 0.5 * 0.15, 0.3 - 0.4 * 0.29
    plus, minus = rewards.detach()[:2], rewards.detach()[2:]
    expected = (0.7 - (1 + k) * plus[0] + minus[0]).clamp(min=0) + (0.7 - (1 + away) * minus[1] + plus[1]).clamp(min=0)
    assert loss.value.item() == pytest.approx(expected.mean().item() / 2, rel=1e-6)
    (gradient,) = torch.autograd.grad(loss.value, rewards)
    assert gradient[:, 0].tolist() == pytest.approx([-(1 + k) / 4, 1 / 4, 1 / 4, -(1 + away) / 4], rel=1e-6)
    for row in range(4):
        values = []
        for sign in (1, -1):
            moved = rewards.detach().clone()
            moved[row, 1] += sign * 1e-6
            values.append(objective.loss({"rewards": moved, "from": levels}, {}, 2.0).value.item())
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(gradient[row, 1].item(), abs=1e-8)


def test_several_predictions_of_a_picture_are_averaged():
    rewards = f64([[1.0, 3.0], [2.0, 5.0], [6.0, 1.0]]).requires_grad_()
    loss = DRaFT(DRaFTSettings(renoise=2)).loss({"rewards": rewards}, {}, 2.0)
    loss.value.backward()
    assert loss.value.item() == pytest.approx(-(3.0 + 3.0) / 2)
    assert rewards.grad.flatten().tolist() == pytest.approx([-1 / 6] * 6)

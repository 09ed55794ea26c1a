"""Advantages and objectives against closed forms, golden numbers and float64 differences."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmrl.algorithms import diffusion_nft
from mmrl.algorithms.advantages import group_advantages
from mmrl.algorithms.diffusion_nft import DiffusionNFT, DiffusionNFTSettings
from mmrl.algorithms.draft import DRaFT, DRaFTSettings
from mmrl.algorithms.flow_grpo import FlowGRPO, FlowGRPOSettings
from mmrl.algorithms.objective import Scored, prepared_by

GOLDEN = torch.tensor([1.0, 2.0, 3.0, 4.0, 0.0, 0.0, 1.0, 1.0])
GROUPS = torch.tensor([0] * 4 + [1] * 4)


@pytest.mark.parametrize(
    ("std", "expected"),
    [
        ("group", [-1.3415, -0.4472, 0.4472, 1.3415, -0.9998, -0.9998, 0.9998, 0.9998]),
        ("batch", [-1.1338, -0.3779, 0.3779, 1.1338, -0.3779, -0.3779, 0.3779, 0.3779]),
        ("none", [-1.5, -0.5, 0.5, 1.5, -0.5, -0.5, 0.5, 0.5]),
    ],
)
def test_golden_advantages(std, expected):
    assert group_advantages(GOLDEN, GROUPS, std).values.tolist() == pytest.approx(expected, abs=1e-4)


@given(
    st.lists(st.lists(st.floats(-100, 100), min_size=2, max_size=6), min_size=1, max_size=5),
    st.sampled_from(["group", "batch", "none"]),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_advantages_sum_to_zero_in_every_group_and_ignore_order(rewards, std, random):
    flat = torch.tensor(list(itertools.chain(*rewards)), dtype=torch.float64)
    groups = torch.tensor([g for g, row in enumerate(rewards) for _ in row])
    a = group_advantages(flat, groups, std).values.double()
    for g in range(len(rewards)):
        assert abs(a[groups == g].sum()) <= 1e-4 * max(1.0, a.abs().max().item())
    order = list(range(len(flat)))
    random.shuffle(order)
    assert torch.allclose(group_advantages(flat[order], groups[order], std).values.double(), a[order], atol=1e-4)


@pytest.mark.parametrize("std", ["group", "batch", "none"])
def test_a_group_of_equal_rewards_has_no_advantage_and_is_counted(std):
    rewards = torch.tensor([0.1, 0.1, 0.1, 0.0, 1.0, 1.0], dtype=torch.float64)
    a = group_advantages(rewards, torch.tensor([0, 0, 0, 1, 1, 1]), std)
    assert a.values[:3].tolist() == [0, 0, 0]
    assert a.values[3] < 0 < a.values[4]
    assert (a.groups, a.zero_std_groups) == (2, 1)


def test_a_dropped_sample_leaves_its_groups_statistics_alone():
    rewards = torch.tensor([1.0, 2.0, float("nan"), 3.0])
    a = group_advantages(rewards, torch.zeros(4, dtype=torch.long), "none")
    assert a.values.tolist() == [-1, 0, 0, 1]
    assert a.valid.tolist() == [True, True, False, True]


def test_a_group_with_one_valid_sample_teaches_nothing():
    a = group_advantages(torch.tensor([1.0, float("nan"), 0.0, 1.0]), torch.tensor([0, 0, 1, 1]), "group")
    assert a.values[:2].tolist() == [0, 0]
    assert a.zero_std_groups == 1


def grpo(new, old, advantages, weights=None, importance=None, **settings):
    """The objective's loss on ``[B, T]`` log-probs."""
    objective = FlowGRPO(FlowGRPOSettings(**{"kl_coef": 0.0, **settings}))
    record = {
        "log_probs": old,
        "advantages": advantages,
        "weights": torch.ones(len(old)) if weights is None else weights,
        "std": torch.full((old.shape[1],), 0.5),
        "kl_std": torch.full((old.shape[1],), 0.5 / 0.1**0.5),  # as Flow-SDE's
        "dt": torch.full((old.shape[1],), -0.1),
    } | ({} if importance is None else {"importance": importance})
    return objective.loss(new, record, float(record["weights"].sum()) * old.shape[1])


def test_grpo_gradient_at_ratio_one_is_minus_advantage():
    old = torch.randn(3, 2)
    new = old.clone().requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.0])
    loss = grpo({"log_probs": new}, old, advantages)
    loss.value.backward()
    assert torch.allclose(new.grad, -advantages.unsqueeze(1).expand(3, 2) / 6)
    assert loss.maxima["policy/ratio_max_dev"] == 0


def test_grpo_of_samples_that_another_policy_drew_follows_the_policys_own_gradient():
    torch.manual_seed(0)
    theta = torch.randn(5, dtype=torch.float64, requires_grad=True)
    drew, values = torch.randn(5).double().softmax(0), torch.randn(5).double().clamp(-5, 5)
    log_probs = theta.log_softmax(0)
    (expected,) = torch.autograd.grad((log_probs.exp() * values).sum(), theta, retain_graph=True)
    new = log_probs.unsqueeze(1)  # all outcomes, each as often as the other policy draws it
    importance = new.detach().exp() / drew.unsqueeze(1)
    loss = grpo({"log_probs": new}, new.detach(), values, weights=drew, importance=importance)
    (found,) = torch.autograd.grad(loss.value, theta, retain_graph=True)
    assert torch.allclose(found, -expected)
    (plain,) = torch.autograd.grad(grpo({"log_probs": new}, new.detach(), values, weights=drew).value, theta)
    assert not torch.allclose(plain, -expected, rtol=0.1)


def test_grpo_clips_only_what_would_move_further():
    old = torch.zeros(4, 1)
    new = torch.tensor([[0.01], [0.01], [-0.01], [-0.01]], requires_grad=True)
    grpo({"log_probs": new}, old, torch.tensor([1.0, -1.0, 1.0, -1.0]), clip_range=1e-3).value.backward()
    assert [g != 0 for g in new.grad.flatten().tolist()] == [False, True, True, False]


def test_grpo_is_the_clipped_surrogate_in_float64():
    torch.manual_seed(0)
    old, new, a = torch.randn(5, 3).double(), torch.randn(5, 3).double(), torch.randn(5).double()
    expected = 0.0
    for i, t in itertools.product(range(5), range(3)):
        r, ai = math.exp(new[i, t] - old[i, t]), float(a[i])
        expected += -min(ai * r, ai * min(max(r, 0.8), 1.2)) / 15
    assert grpo({"log_probs": new}, old, a, clip_range=0.2).value.item() == pytest.approx(expected, rel=1e-6)


def test_grpo_leaves_dropped_samples_out_and_divides_by_the_rest():
    old = torch.zeros(2, 1)
    new = torch.zeros(2, 1, requires_grad=True)
    grpo({"log_probs": new}, old, torch.tensor([1.0, 1.0]), weights=torch.tensor([1.0, 0.0])).value.backward()
    assert new.grad.flatten().tolist() == [-1.0, 0.0]


def test_kl_is_the_true_gaussian_kl_times_minus_dt():
    old = torch.zeros(1, 1)
    distance = torch.full((1, 1), 0.3, requires_grad=True)
    loss = grpo({"log_probs": old, "reference_distance": distance}, old, torch.zeros(1), kl_coef=2.0)
    assert loss.value.item() == pytest.approx(2.0 * 0.3 / (2 * 0.5**2) * 0.1)
    loss.value.backward()
    assert distance.grad is not None
    assert distance.grad.item() > 0


@pytest.mark.parametrize("pieces", [1, 2, 3, 6])
def test_any_slicing_gives_the_same_gradient(pieces):
    torch.manual_seed(1)
    old, a = torch.randn(6, 4).double(), torch.randn(6).double()
    weight = torch.randn(4, dtype=torch.float64)

    def gradient(chunks):
        scale = torch.ones(4, dtype=torch.float64, requires_grad=True)
        for index in chunks:
            for t in range(4):
                new = {"log_probs": (old[index] * scale + 0.01 * weight)[:, t : t + 1]}
                record = {
                    "log_probs": old[index, t : t + 1], "advantages": a[index], "weights": torch.ones(len(index)),
                    "std": torch.ones(1), "dt": torch.ones(1),
                }  # fmt: skip
                FlowGRPO(FlowGRPOSettings(kl_coef=0, clip_range=0.3)).loss(new, record, 24.0).value.backward()
        return scale.grad

    whole = gradient([torch.arange(6)])
    assert torch.allclose(gradient(torch.arange(6).chunk(pieces)), whole, rtol=1e-10)


def test_golden_nft():
    def value(x):
        return torch.full((1, 1), x, dtype=torch.float64)

    x0, s, eps, v_old, v, beta, a = 0.2, 0.5, 1.0, 0.7, 0.9, 0.1, 1.5
    x_s = (1 - s) * x0 + s * eps
    loss, r = diffusion_nft.nft_loss(
        value(v), value(v_old), value(x_s), value(x0), torch.tensor([s]), torch.tensor([a]), beta, 5.0
    )
    assert (r.item(), loss.item()) == pytest.approx((0.65, 2.35), abs=1e-5)


def nft_gradient(advantage):
    torch.manual_seed(0)
    x0, eps, v_old = torch.randn(1, 4), torch.randn(1, 4), torch.randn(1, 4)
    v = v_old.clone().requires_grad_()
    loss, _ = diffusion_nft.nft_loss(
        v, v_old, 0.5 * x0 + 0.5 * eps, x0, torch.tensor([0.5]), torch.tensor([advantage]), 1.0, 5.0
    )
    loss.sum().backward()
    return v.grad


def test_nft_gradient_vanishes_without_advantage_and_changes_sign_with_it():
    assert nft_gradient(0.0).abs().max() < 1e-6
    assert torch.allclose(nft_gradient(2.0), -nft_gradient(-2.0), atol=1e-6)
    assert nft_gradient(2.0).abs().max() > 1e-3


def test_nft_pulls_the_reference_back():
    objective = DiffusionNFT(DiffusionNFTSettings(kl_coef=1.0))
    v = torch.ones(1, 4, requires_grad=True)
    same = torch.ones(1, 4)
    new = {"v": v, "v_old": same, "v_reference": torch.zeros(1, 4), "x_s": same, "x0": same, "sigma": torch.ones(1)}
    objective.loss(new, {"advantages": torch.zeros(1), "weights": torch.ones(1)}, 1.0).value.backward()
    assert v.grad is not None
    assert torch.allclose(v.grad, torch.full((1, 4), 2 / 4), atol=1e-6)


def test_nft_old_policy_decay_follows_the_paper():
    decay = DiffusionNFT(DiffusionNFTSettings()).copies["old"]
    assert [decay(n) for n in (0, 100, 499, 5000)] == pytest.approx([0.0, 0.1, 0.499, 0.5])


def test_draft_follows_the_rewards_gradient():
    rewards = torch.tensor([1.0, 3.0], requires_grad=True)
    DRaFT(DRaFTSettings()).loss({"rewards": rewards.unsqueeze(0)}, {}, 2.0).value.backward()
    assert rewards.grad is not None
    assert rewards.grad.tolist() == [-0.5, -0.5]


@pytest.mark.parametrize(
    ("objective", "std"),
    [
        (FlowGRPO(FlowGRPOSettings(advantage_std="group")), "group"),
        (DiffusionNFT(DiffusionNFTSettings()), "batch"),
    ],
)
def test_an_objective_knows_its_advantages_and_its_share_of_the_denominator(objective, std):
    rewards = GOLDEN.double()
    own = objective.advantages(Scored(rewards, GROUPS))
    assert torch.equal(own.values, group_advantages(rewards, GROUPS, std).values)
    assert objective.loss_denominator(torch.tensor([1.0, 0.0, 1.0]), torch.tensor([9.0, 9.0, 9.0])) == 18
    assert prepared_by(objective) == frozenset()
